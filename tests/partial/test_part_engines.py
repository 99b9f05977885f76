"""Partial training on every engine: the bits of the in-process run, including bytes sent down."""

import json
import os
import subprocess
import sys
from pathlib import Path
from shutil import rmtree

import pytest

from tests.e2e.command import settings
from tests.e2e.test_engines import ENGINES, SMALL, WORKERS, hashes, hashes_of_run, wait_until

LISA: dict[str, object] = {
    "client__optimizer__name": "lisa",
    "client__optimizer__blocks": "0,2",  # the hidden layers of the network
    "client__optimizer__num_sampled_layers": 1,
    "client__optimizer__period": 5,
    "client__optimizer__draws": "per_round",  # so that a layer is left alone in every round, and need not be downloaded
    "client__local_steps": 5,
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """FedDyn's hashes in process: it has a memory at the server, and states at the clients."""
    return hashes_of_run(tmp_path_factory.mktemp("reference"), "feddyn", **LISA)


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["superlink", WORKERS])
def test_an_engine_gives_the_bits_of_the_run_in_process(engine: str, reference: dict[str, str], tmp_path: Path) -> None:
    assert any(name.endswith("received.safetensors") for name in reference)  # the account is compared too
    assert hashes_of_run(tmp_path, "feddyn", **LISA, **ENGINES[engine]) == reference


@pytest.mark.needs("deployment")
@pytest.mark.engines
@pytest.mark.slow
def test_nodes_that_lose_what_they_received_are_sent_everything_in_the_same_round(
    reference: dict[str, str], tmp_path: Path
) -> None:
    """Between two rounds of a run on a SuperLink, while its nodes sleep; the lines stay those of the run in process."""
    choice = settings(strategy__name="feddyn", results__root=tmp_path, **LISA, **ENGINES["superlink"])
    command = [sys.executable, "-m", "simulations.cli", "run", *SMALL, *choice]
    with (tmp_path / "said.txt").open("w") as said:
        environment = os.environ | {"FEDSIGN_TEST_IS_PATIENT": "1"}
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=said, stderr=said)
        try:
            wait_until(lambda: any(path.stat().st_size for path in tmp_path.glob("*/*/rounds.jsonl")), timeout_s=240)
            (folder,) = [path.parent for path in tmp_path.glob("*/*/rounds.jsonl")]
            assert list((folder / "clients" / "received").glob("*.safetensors"))
            rmtree(folder / "clients" / "received")
            assert process.wait(240) == 0, (tmp_path / "said.txt").read_text()
        finally:
            process.kill()
            process.wait()
    assert hashes(folder) == reference
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert not any(line["failures"] for line in lines)
    assert all(line["bytes_down"] < lines[0]["bytes_down"] for line in lines[1:])
    logs = "".join(path.read_text(errors="replace") for path in folder.rglob("*.log"))
    assert "that the request of round" in logs + (tmp_path / "said.txt").read_text()
