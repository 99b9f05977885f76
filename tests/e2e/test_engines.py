"""Three engines, the same bits: in process, Ray actors, SuperNode processes over HTTP."""

import hashlib
import re
from pathlib import Path

import pytest

from tests.e2e.command import fedsign, settings

ENGINES = ("ray", "superlink")
HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "your-own-strategy.md"
SMALL = settings(
    rounds=3,
    partition__num_clients=3,
    partition__alpha=1.0,
    server__cohort_size=3,
    callbacks=[],
    results__checkpoint_every=1,
)


def own_strategy() -> str:
    """The file that the how-to shows."""
    (source,) = re.findall(r"```python\n(.*?)```", HOW_TO.read_text(encoding="utf-8"), flags=re.DOTALL)
    return str(source)


def play(folder: Path, strategy: str, engine: str) -> dict[str, str]:
    """Run it and return the hashes of all that should not depend on the engine."""
    root = folder / f"{strategy.replace(':', '-')}-{engine}"
    done = fedsign(
        "run", *SMALL, *settings(strategy__name=strategy, engine__name=engine, results__root=root), folder=folder
    )
    assert done.returncode == 0, done.stderr
    (config,) = root.glob("*/*/config.toml")
    run = config.parent
    paths = [
        run / "rounds.jsonl",
        run / "model.safetensors",
        *sorted((run / "checkpoints" / "round-000003").iterdir()),
        *sorted((run / "clients").glob("*/round-000003.safetensors")),
    ]
    return {str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


@pytest.fixture(scope="module")
def user_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds nothing but the user's own file."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "anchored.py").write_text(own_strategy(), encoding="utf-8")
    return folder


@pytest.fixture(scope="module", params=["fedavg", "feddyn", "fedsign", "anchored:Anchored"])
def reference(request: pytest.FixtureRequest, user_folder: Path) -> tuple[str, dict[str, str]]:
    """A strategy and its hashes in process."""
    return request.param, play(user_folder, request.param, "in_process")


@pytest.mark.engines
@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_gives_the_bits_of_the_run_in_process(
    user_folder: Path, reference: tuple[str, dict[str, str]], engine: str
) -> None:
    strategy, expected = reference
    has_client_state = any(name.startswith("clients/") for name in expected)
    assert has_client_state == (strategy in {"feddyn", "anchored:Anchored"})
    assert play(user_folder, strategy, engine) == expected


@pytest.mark.engines
def test_flowers_own_strategy_gives_the_same_bits_on_ray(user_folder: Path) -> None:
    assert play(user_folder, "flower_fedavg", "ray") == play(user_folder, "flower_fedavg", "in_process")


def test_the_strategy_of_the_how_to_fits_on_one_page() -> None:
    assert len(own_strategy().splitlines()) <= 60
