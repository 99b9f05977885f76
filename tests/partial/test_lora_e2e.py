"""Adapters over a SuperLink: the run equals that of one process, and its files hold only adapters, and a base if the
server changes it.
"""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.command import fedsign, settings

OPTIMIZERS: dict[str, dict[str, object]] = {
    "average": {},
    "fedex": {"client__optimizer__aggregation": "fedex"},
    "flora": {"client__optimizer__aggregation": "flora", "client__optimizer__ranks": [8, 3]},
}


def run_in(folder: Path, name: str, optimizer: dict[str, object], **engine: object) -> Path:
    asked = settings(
        rounds=2,
        callbacks=[],
        partition__num_clients=2,
        server__cohort_size=2,
        client__local_epochs=1,
        client__lr=0.01,
        client__optimizer__name="lora",
        client__optimizer__head=True,
        client__optimizer__dropout=0.1,
        results__root=folder / name,
        **engine,
        **optimizer,
    )
    done = fedsign("run", *asked, folder=folder)
    assert done.returncode == 0, done.stderr
    (config,) = (folder / name).glob("*/*/config.toml")
    return config.parent


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    [
        pytest.param({"engine__workers": 2}, marks=pytest.mark.needs("workers")),
        {"engine__name": "superlink", "engine__num_supernodes": 2},
        pytest.param({"engine__name": "ray"}, marks=pytest.mark.needs("ray")),
    ],
    ids=["workers", "superlink", "ray"],
)
@pytest.mark.parametrize("aggregation", OPTIMIZERS)
def test_adapters_travel_and_the_lines_and_the_model_are_those_of_one_process(
    aggregation: str, tmp_path: Path, engine: dict[str, object]
) -> None:
    optimizer = OPTIMIZERS[aggregation]
    here, there = run_in(tmp_path, "here", optimizer), run_in(tmp_path, "there", optimizer, **engine)
    for name in ("rounds.jsonl", "model.safetensors"):
        assert (here / name).read_bytes() == (there / name).read_bytes()
    names = load_file(there / "model.safetensors").keys()
    assert any(".lora_A." in name for name in names)
    assert any(".base_layer." in name for name in names) == (aggregation != "average")
