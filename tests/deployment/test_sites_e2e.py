"""Two hospitals on a SuperLink: each SuperNode serves the folder named by its own configuration."""

import json
from pathlib import Path

import pytest

from tests.deployment.test_sites import write_site
from tests.e2e.command import fedsign, settings

ENGINES = ("ray", "superlink")
FRAGILE = '''
def fragile(outputs, targets):
    """Fails at the smaller site."""
    if len(targets) == 8:
        raise ValueError("too few")
    return 1.0
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hospitals")
    (made / "fragile.py").write_text(FRAGILE, encoding="utf-8")
    for number, (name, size) in enumerate((("north clinic", 60), ("south", 40))):
        write_site(made / name, size, seed=number)
    return made


def run_on(folder: Path, engine: str) -> Path:
    root = folder / f"runs-{engine}"
    chosen = settings(
        rounds=2,
        callbacks='["report"]',
        metrics='["accuracy", "fragile:fragile"]',
        data__name="npz",
        data__class_names='["no", "yes"]',
        partition__name="sites",
        partition__num_clients=2,
        partition__roots='["north clinic", "south"]',
        partition__input_shape="[5]",
        server__cohort_size=2,
        strategy__name="feddyn",
        client__local_steps=3,
        engine__name=engine,
        results__root=root,
    )
    done = fedsign("run", *chosen, folder=folder)
    assert done.returncode == 0, done.stderr
    (config,) = root.glob("*/*/config.toml")
    return config.parent


@pytest.fixture(scope="module")
def reference(folder: Path) -> Path:
    return run_on(folder, "in_process")


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_sites_give_the_bits_of_the_run_in_process_and_keep_to_themselves_what_is_theirs(
    folder: Path, reference: Path, engine: str
) -> None:
    done = run_on(folder, engine)
    for name in ("rounds.jsonl", "sites.jsonl", "model.safetensors"):
        assert (done / name).read_bytes() == (reference / name).read_bytes(), name
    failures = [json.loads(line) for line in (done / "failures.jsonl").read_text().splitlines()]
    assert [each["reason"] for each in failures] == ["in evaluation: ValueError: too few"] * 2
    is_private = engine == "superlink"
    assert all(("Traceback" in each["details"]) != is_private for each in failures)
    assert ("counts_are_private" in json.loads((done / "partition.json").read_text())) == is_private
    if is_private:
        traveled = (done / "app" / "pyproject.toml").read_text(encoding="utf-8")
        assert "north clinic" not in traveled and "south" not in traveled
        assert "in fragile" in (done / "logs" / "supernode-1.log").read_text(encoding="utf-8")
