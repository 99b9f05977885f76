"""A check that was stopped does not repeat its finished trainings."""

from functools import partial
from pathlib import Path

import pytest

from simulations.recipes.cells import on_all_cores
from simulations.recipes.kept import keeping


def training(name: str, folder: Path) -> dict[str, float]:
    """Notes that it ran; `second` fails until there is a file `go`."""
    with (folder / name).open("a") as file:
        file.write("x")
    if name == "second" and not (folder / "go").exists():
        raise ArithmeticError(name)
    return {"loss": 0.1 + 0.2, "rounds": 3}


def test_finished_trainings_are_kept_until_the_check_ends(tmp_path: Path) -> None:
    keep = tmp_path / "kept"
    jobs = {name: partial(training, name, tmp_path) for name in ("first", "second")}
    with pytest.raises(ArithmeticError), keeping(keep):
        on_all_cores({"first": jobs["first"]})
        on_all_cores(jobs)
    assert len([*keep.iterdir()]) == 1
    (tmp_path / "go").touch()
    with keeping(keep):
        found = on_all_cores(jobs)
    assert found == {name: {"loss": 0.1 + 0.2, "rounds": 3} for name in jobs}
    assert [*found] == ["first", "second"]
    assert [(tmp_path / name).read_text() for name in jobs] == ["x", "xx"]
    assert not keep.exists()
