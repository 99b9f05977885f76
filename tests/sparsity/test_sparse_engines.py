"""Sparse clients in workers and on a SuperLink: the bits of the in-process run, including bytes sent."""

from pathlib import Path

import pytest

from tests.e2e.test_engines import ENGINES, WORKERS, hashes_of_run

SPARSE: dict[str, object] = {
    "model__hidden": [32, 64, 32],
    "parameterization__name": "smupar",
    "parameterization__density": 0.125,
    "sparsity__draw": "exact",
    "client__optimizer__name": "packed_adamw",
    "client__lr": 0.003,
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """FedDyn's hashes in process: it has a memory at the server, and states at the clients."""
    return hashes_of_run(tmp_path_factory.mktemp("reference"), "feddyn", **SPARSE)


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["superlink", WORKERS])
def test_an_engine_gives_the_bits_of_the_run_in_process(engine: str, reference: dict[str, str], tmp_path: Path) -> None:
    assert hashes_of_run(tmp_path, "feddyn", **SPARSE, **ENGINES[engine]) == reference
