"""Flip or cut any file of a run, then resume it: the same model and records, or an error that names the damage."""

import shutil
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clients.state.database import StateDatabase
from fedsign.errors import FedSignError
from fedsign.storage import checkpoints
from fedsign.storage.results import Record
from simulations import load_run, run
from simulations.callbacks.base import Callback

ROUNDS, STOPPED_AFTER = 6, 5  # with checkpoints after 2, 4 and 6
NOT_READ_BACK = {"lock", "report.html"}
EXPERIMENT: dict[str, Any] = {
    "rounds": ROUNDS,
    "callbacks": [],
    "partition": {"num_clients": 4, "alpha": 1.0},
    "server": {"cohort_size": 2},
    "model": {"name": "mlp", "hidden": [4]},
}
LISA = {"name": "lisa", "blocks": "0,2", "num_sampled_layers": 1, "period": 3}
SETTINGS: dict[str, dict[str, Any]] = {
    "feddyn": {"strategy": {"name": "feddyn"}, "client": {"local_epochs": 1}},
    "scaffold": {
        "strategy": {"name": "scaffold"},
        "client": {"local_epochs": 1},
        "server": {"cohort_size": 2, "optimizer": {"name": "adam", "lr": 0.01}},
    },
    "lisa": {"strategy": {"name": "fedavg"}, "client": {"local_steps": 3, "optimizer": LISA}},
    "sharded": {"strategy": {"name": "fedavg"}, "client": {"local_steps": 1, "sharding": {"ranks": 2}}},
}


class Stop(Callback):
    """Ends a run as Ctrl-C does."""

    def on_round(self, record: Record) -> None:
        if record["round"] == STOPPED_AFTER:
            raise KeyboardInterrupt


def run_in(root: Path, name: str, callbacks: list[Callback]) -> Path:
    with pytest.raises(KeyboardInterrupt) if callbacks else nullcontext():
        run(
            {**EXPERIMENT, **SETTINGS[name], "results": {"root": str(root), "checkpoint_every": 2}}, callbacks=callbacks
        )
    (config,) = root.glob("*/*/config.toml")
    return config.parent


def outcome_of(folder: Path) -> tuple[Any, ...]:
    """The records, the final model and the clients' states that the last checkpoint counts on."""
    done = load_run(folder)
    last = checkpoints.load_latest(done.folder.checkpoints)
    assert last is not None and last.round == ROUNDS and done.outcome == {"status": "finished"}
    database = StateDatabase(done.folder.clients)
    states = {key: database.read(*key) for key in last.client_versions.items()}
    database.close()
    tensors = [checkpoints.load_tensors(done.path / "model.safetensors"), last.served, last.strategy, *states.values()]
    return (
        done.rounds,
        [line["round"] for line in done.folder.timings()],
        done.folder.partition,
        last.client_versions,
        [None if each is None else checkpoints.tensors_digest(each) for each in tensors],
    )


def damage(file: Path, rng: np.random.Generator) -> str:
    """Flip one bit, or cut the file anywhere; says what was done."""
    content = bytearray(file.read_bytes())
    place = int(rng.integers(len(content)))
    if rng.random() < 0.7:
        content[place] ^= 1 << int(rng.integers(8))
        file.write_bytes(content)
        return f"bit flipped in byte {place} of {file.name}"
    file.write_bytes(content[:place])
    return f"{file.name} cut to {place} bytes"


@pytest.mark.parametrize(
    ("name", "num_damages"),
    [
        ("feddyn", 20),
        ("lisa", 20),
        pytest.param("feddyn", 800, marks=pytest.mark.slow),
        pytest.param("scaffold", 700, marks=pytest.mark.slow),
        pytest.param("lisa", 500, marks=pytest.mark.slow),
        pytest.param("sharded", 30, marks=pytest.mark.slow),
    ],
)
def test_whatever_is_flipped_or_cut_no_other_model_or_records_come_out_without_a_word(
    tmp_path: Path, name: str, num_damages: int
) -> None:
    finished = run_in(tmp_path / "finished", name, [])
    stopped = run_in(tmp_path / "stopped", name, [Stop()])
    expected = outcome_of(finished)
    rng = np.random.default_rng(num_damages)
    seen: Counter[str] = Counter()
    for trial in range(num_damages):
        folder = tmp_path / "damaged"
        shutil.copytree((finished, stopped)[trial % 2], folder)
        files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name not in NOT_READ_BACK)
        file = files[int(rng.integers(len(files)))]
        if not file.stat().st_size:
            shutil.rmtree(folder)
            continue
        done = damage(file, rng)
        try:
            run(resume=folder)
            found = outcome_of(folder)  # which reads states that no round has asked for
        except FedSignError as error:
            assert str(folder) in str(error) and any(part in str(error) for part in (file.name, file.parent.name)), done
            seen["refused"] += 1
        else:
            assert found == expected, done
            seen["the same"] += 1
        shutil.rmtree(folder)
    assert seen["refused"] > num_damages / 10 and seen["the same"] > num_damages / 10, seen


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A finished run of FedDyn, and one that was stopped after its second checkpoint."""
    folder = tmp_path_factory.mktemp("both")
    return run_in(folder / "finished", "feddyn", []), run_in(folder / "stopped", "feddyn", [Stop()])


@pytest.mark.parametrize(
    ("name", "cut_to"),
    [
        ("checkpoints/round-000004/served.safetensors", None),
        ("checkpoints/round-000004/strategy.safetensors", None),
        ("checkpoints/round-000004/clients.safetensors", None),
        ("clients/states.sqlite", None),
        ("rounds.jsonl", None),
        ("rounds.jsonl", 272),
    ],
)
def test_a_damaged_file_is_named_and_the_run_goes_on_without_it_or_not_at_all(
    tmp_path: Path, both: tuple[Path, Path], name: str, cut_to: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A bit of a weight, of a client's version, of a figure in a record; records cut within their first lines."""
    finished, stopped = both
    folder = Path(shutil.copytree(stopped, tmp_path / "damaged"))
    file = folder / name
    content = bytearray(file.read_bytes())
    inside = {".sqlite": state_of(folder).tobytes(), ".jsonl": b"."}.get(file.suffix)
    content[-2 if inside is None else content.index(inside) + 1] ^= 1
    file.write_bytes(content[:cut_to])
    try:
        run(resume=folder)
        found = outcome_of(folder)
    except FedSignError as error:
        assert str(file) in str(error)
    else:
        assert found == outcome_of(finished)
        assert str(file.parent) in caplog.text, "the checkpoint before was taken, and that was said"


def state_of(folder: Path) -> np.ndarray:
    """The largest tensor of a client's state that the newest checkpoint counts on."""
    last = checkpoints.load_latest(folder / "checkpoints")
    assert last is not None
    database = StateDatabase(folder / "clients")
    state = database.read(*next(iter(last.client_versions.items())))
    database.close()
    assert state is not None
    return max(state.values(), key=lambda tensor: tensor.numel()).numpy()


@pytest.mark.parametrize("name", ["partition.json", "timings.jsonl"])
def test_a_file_that_is_no_text_is_an_error_that_names_it(tmp_path: Path, both: tuple[Path, Path], name: str) -> None:
    folder = Path(shutil.copytree(both[0], tmp_path / "damaged"))
    (folder / name).write_bytes(b"\xff\xfe" + (folder / name).read_bytes()[2:])
    done = load_run(folder)
    with pytest.raises(FedSignError, match=name):
        _ = done.folder.partition if name == "partition.json" else done.folder.timings()
