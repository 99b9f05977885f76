"""[privacy] and [attack] on engines with other processes: bits equal those in process, and the secret stays private."""

from pathlib import Path

import pytest

from fedsign.privacy.secret import NAME
from tests.e2e.command import fedsign, settings

pytestmark = pytest.mark.needs("robustness")
PRIVATE = settings(
    rounds=2,
    partition__num_clients=3,
    partition__alpha=1.0,
    server__cohort_size=2,
    callbacks=[],
    privacy__noise_multiplier=1,
    privacy__clip_norm=0.5,
    privacy__delta=0.01,
    privacy__secret_file="secret",
    attack__name="sign_flip",
    attack__fraction=0.4,
)


def run_on(folder: Path, kind: str, engine: str) -> Path:
    """The run's folder."""
    root = folder / f"{kind}-{engine}"
    given = settings(privacy__name=kind, strategy__name="scaffold", engine__name=engine, results__root=root)
    done = fedsign("run", *PRIVATE, *given, "--set", f"privacy.secret_file={folder / 'secret'}", folder=folder)
    assert done.returncode == 0, done.stderr
    assert "epsilon" in done.stdout
    (config,) = root.glob("*/*/config.toml")
    return config.parent


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.parametrize(("engine", "kind"), [("ray", "central"), ("superlink", "local")])
def test_a_private_run_has_the_same_bits_on_an_engine_and_its_secret_travels_nowhere(
    engine: str, kind: str, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_bytes(bytes(range(32)))
    here, there = run_on(tmp_path, kind, "in_process"), run_on(tmp_path, kind, engine)
    for name in ("rounds.jsonl", "privacy.jsonl", "model.safetensors"):
        assert (here / name).read_bytes() == (there / name).read_bytes(), name
    key = bytes(range(32))
    holders = [path for path in there.rglob("*") if path.is_file() and key in path.read_bytes()]
    assert holders and all(path.name == NAME and path.stat().st_mode & 0o777 == 0o600 for path in holders)
