"""docs/tuned.md matches the committed results, and its experiments are valid configurations."""

import pytest

from benchmarks.tuned import __main__ as tuned
from fedsign.config import load


def test_the_page_is_what_the_results_make() -> None:
    assert tuned.PAGE.read_text(encoding="utf-8") == tuned.page(), "run python -m benchmarks.tuned"


@pytest.mark.parametrize(("name", "data"), zip(tuned.TITLES, ("mnist", "npz"), strict=True))
def test_an_experiment_is_a_configuration_of_its_name(name: str, data: str) -> None:
    config = load(tuned.RESULTS.parent / f"{name.removeprefix('tuned-')}.toml", [])
    assert config.name == name and config.data.name == data
