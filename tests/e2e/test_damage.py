"""Flip or cut any file of a run, then resume it: the same model and records, or an error that names the damage."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clients.state.database import StateDatabase
from clients.state.store import ClientStore
from fedsign.errors import ClientStateError, DataError, FedSignError, ResumeError
from fedsign.privacy.secret import MARK as KEY_MARK
from fedsign.privacy.secret import NAME as KEY
from fedsign.storage import checkpoints
from fedsign.storage.digests import read_json, sealed_json, unchained
from fedsign.storage.results import Record
from simulations import load_run, run
from simulations.callbacks.base import Callback
from simulations.landscape.target import target_of
from simulations.verify import verify
from tests.contract.transported import over_flowers_transport

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
    "private": {  # with a key, the states of clients, and a best model that is not the last
        "strategy": {"name": "feddyn"},
        "client": {"local_epochs": 1, "lr": 2.0},
        "data": {"validation_fraction": 0.2},
        "privacy": {"name": "local", "clip_norm": 0.5, "noise_multiplier": 0.1, "delta": 0.01},
    },
    "scaffold": {
        "strategy": {"name": "scaffold"},
        "client": {"local_epochs": 1},
        "server": {"cohort_size": 2, "optimizer": {"name": "adam", "lr": 0.01}},
    },
    "lisa": {"strategy": {"name": "fedavg"}, "client": {"local_steps": 3, "optimizer": LISA}},
    "sharded": {"strategy": {"name": "fedavg"}, "client": {"local_steps": 1, "sharding": {"ranks": 2}}},
}

PRIVATE = pytest.mark.needs("privacy", "selection")


class Stop(Callback):
    """Ends a run as Ctrl-C does."""

    def on_round(self, record: Record) -> None:
        if record["round"] == STOPPED_AFTER:
            raise KeyboardInterrupt


def run_in(root: Path, name: str, callbacks: list[Callback], *, seed: int = 0) -> Path:
    changes: dict[str, Any] = {"seed": seed, "results": {"root": str(root), "checkpoint_every": 2}}
    if name == "private":
        secret = root / "secret"
        secret.parent.mkdir(parents=True)
        secret.write_bytes(bytes([seed]) * 32)
        changes["results"]["keep_best"] = True
        changes["privacy"] = {**SETTINGS[name]["privacy"], "secret_file": str(secret)}
    with pytest.raises(KeyboardInterrupt) if callbacks else nullcontext():
        run({**EXPERIMENT, **SETTINGS[name], **changes}, callbacks=callbacks)
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
    models = [checkpoints.load_model(done.path / "model.safetensors")]
    if done.config.results.keep_best:
        models.append(checkpoints.load_model(done.folder.best))
    tensors = [*models, last.served, last.strategy, *states.values()]
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
    """A finished run, and one that was stopped after its second checkpoint."""
    folder = tmp_path_factory.mktemp("both")
    return run_in(folder / "finished", "private", []), run_in(folder / "stopped", "private", [Stop()])


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same with another seed."""
    folder = tmp_path_factory.mktemp("others")
    return run_in(folder / "finished", "private", [], seed=1), run_in(folder / "stopped", "private", [Stop()], seed=1)


def models_in(folder: Path) -> list[str | Exception]:
    """What is loaded and analyzed, or why it is not."""
    found: list[str | Exception] = []
    for load in (
        lambda: load_run(folder).model().state_dict(),
        lambda: load_run(folder).model(best=True).state_dict(),
        lambda: target_of(folder).tensors,
    ):
        try:
            found.append(checkpoints.tensors_digest(load()))
        except FedSignError as error:
            found.append(error)
    return found


def spoil(file: Path, how: str, other: Path) -> None:
    content = bytearray(file.read_bytes())
    if how == "deleted":
        file.unlink()
    elif how == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif how.startswith("of another"):
        shutil.copy(other, file)
    else:
        content[-2 if file.suffix == ".safetensors" else len(content) // 3] ^= 4
        file.write_bytes(content)


def files_read_back(folder: Path) -> list[Path]:
    files = (file for file in folder.rglob("*") if file.is_file() and file.name not in NOT_READ_BACK)
    return sorted(file.relative_to(folder) for file in files)


@PRIVATE
@pytest.mark.parametrize(
    "how",
    [
        "deleted",
        "of another run",
        *(pytest.param(how, marks=pytest.mark.slow) for how in ("cut", "flipped", "of another name")),
    ],
)
@pytest.mark.parametrize("ended", ["finished", "stopped"])
def test_every_file_of_a_run_is_restored_or_named_when_it_is(
    tmp_path: Path, both: tuple[Path, Path], others: tuple[Path, Path], ended: str, how: str
) -> None:
    """Verifying names it; resuming gives records, model, and states of an undisturbed run, or names it, too."""
    good, foreign = (pair[ended == "stopped"] for pair in (both, others))
    expected, models = outcome_of(both[0]), models_in(good)
    assert not [each for each in models if isinstance(each, Exception)] and models[0] == models[2] != models[1]
    seen: Counter[str] = Counter()
    files = files_read_back(good)
    for name in files:
        alike = [each for each in files if each.suffix == name.suffix]
        other = good / alike[alike.index(name) - 1] if how == "of another name" else foreign / name
        if how.startswith("of another") and (good / name).read_bytes() == other.read_bytes():
            continue  # such as environment.json
        folder = Path(shutil.copytree(good, tmp_path / "spoiled"))
        spoil(folder / name, how, other)
        for loaded, undamaged in zip(models_in(folder), models, strict=True):
            is_named = isinstance(loaded, Exception) and any(
                each in str(loaded) for each in (name.name, name.parent.name)
            )
            assert loaded == undamaged or is_named, f"{name} {how}: {loaded}"
        if (name.suffix, how) != (".sqlite", "flipped"):  # it has room that nothing is in
            said = [f"{file} {damage}" for file, damage in verify(folder) if damage]
            assert any(name.name in each or name.parent.name in each for each in said), f"{name} {how}: {said}"
        try:
            run(resume=folder)
            found = outcome_of(folder)
        except FedSignError as error:
            assert str(folder) in str(error) and name.name in str(error), f"{name} {how}"
            seen["named"] += 1
        else:
            assert found == expected, f"{name} {how}"
            seen["restored"] += 1
        shutil.rmtree(folder)
    assert min(seen["named"], seen["restored"]) >= 4, seen


@PRIVATE
def test_a_key_that_is_gone_with_its_mark_or_of_another_run_is_an_error_that_names_it(
    tmp_path: Path, both: tuple[Path, Path], others: tuple[Path, Path]
) -> None:
    """Else, the noise would come from a new stream, without a word."""
    for source in (None, others[1]):
        folder = Path(shutil.copytree(both[1], tmp_path / f"spoiled {source is None}"))
        for name in (KEY, KEY_MARK):
            (folder / "clients" / name).unlink()
            if source is not None:
                shutil.copy(source / "clients" / name, folder / "clients")
        assert KEY in " ".join(damage for _, damage in verify(folder) if damage)
        with pytest.raises(ResumeError, match=re.escape(KEY)):
            run(resume=folder)


@PRIVATE
def test_another_runs_configuration_is_an_error_that_names_both_runs(
    tmp_path: Path, both: tuple[Path, Path], others: tuple[Path, Path]
) -> None:
    folder = Path(shutil.copytree(both[1], tmp_path / "spoiled"))
    shutil.copy(others[1] / "config.toml", folder)
    ids = [load_run(path).folder.id for path in (others[1], both[1])]
    said = (
        rf"config\.toml is missing or damaged \(it is of the run {ids[0]}, but manifest\.json is of the run {ids[1]}\)"
    )
    for read in (lambda: run(resume=folder), lambda: load_run(folder).config):
        with pytest.raises(ResumeError, match=said):
            read()
    shutil.copy(others[1] / "manifest.json", folder)  # then the checkpoints are foreign
    with pytest.raises(
        ResumeError, match=rf"round-000004.* is of the run {ids[1]}, but manifest\.json is of the run {ids[0]}"
    ):
        run(resume=folder)
    with pytest.raises(ResumeError, match=r"state\.json"):
        _ = load_run(folder).rounds


@PRIVATE
@pytest.mark.parametrize("name", ["partition.json", "timings.jsonl"])
def test_a_file_that_is_no_text_is_an_error_that_names_it(tmp_path: Path, both: tuple[Path, Path], name: str) -> None:
    folder = Path(shutil.copytree(both[0], tmp_path / "damaged"))
    (folder / name).write_bytes(b"\xff\xfe" + (folder / name).read_bytes()[2:])
    done = load_run(folder)
    with pytest.raises(FedSignError, match=name):
        _ = done.folder.partition if name == "partition.json" else done.folder.timings()


@PRIVATE
def test_a_run_without_a_manifest_is_read_and_resumed_with_a_word(
    tmp_path: Path, both: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """As earlier versions wrote it: no file holds the run's id."""
    folder = Path(shutil.copytree(both[1], tmp_path / "earlier"))
    (folder / "manifest.json").unlink()
    config = folder / "config.toml"
    config.write_text("".join(line for line in config.read_text().splitlines(True) if not line.startswith("#")))
    for state in (*folder.glob("checkpoints/*/state.json"), folder / "clients" / KEY_MARK):
        content, _ = read_json(state.read_text())
        state.write_text(sealed_json({key: value for key, value in content.items() if key != "run"}))
    run(resume=folder)
    assert outcome_of(folder) == outcome_of(both[0])
    assert f"{folder} has no manifest" in caplog.text and not (folder / "manifest.json").exists()


@PRIVATE
def test_verify_names_what_is_not_there_and_what_does_not_belong(tmp_path: Path, both: tuple[Path, Path]) -> None:
    for good in both:
        assert not [damage for _, damage in verify(good) if damage]
    folder = Path(shutil.copytree(both[0], tmp_path / "spoiled"))
    shutil.rmtree(folder / "checkpoints")
    foreign = [folder / "clients" / "000001" / "notes.txt", folder / "checkpoints" / "round-000001" / "notes.txt"]
    for file in foreign:
        file.parent.mkdir(parents=True)
        file.touch()
    records = folder / "rounds.jsonl"  # forged and chained anew
    lines = [line.replace('"accuracy": 0', '"accuracy": 1') for line in unchained(records.read_text().splitlines())]
    records.unlink()
    for line in lines:
        load_run(folder).folder.append(records.name, json.loads(line))
    wrong = {file for file, damage in verify(folder) if damage}
    assert wrong == {*foreign, records, folder / "checkpoints" / f"round-{ROUNDS:06d}"}


@PRIVATE
def test_a_damaged_client_state_is_restored_from_an_earlier_checkpoint(
    tmp_path: Path, both: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """One bit of a state that only the newest checkpoint refers to."""
    folder = Path(shutil.copytree(both[1], tmp_path / "spoiled"))
    earlier, newest = checkpoints.client_versions_on_disk(folder / "checkpoints").values()
    client = next(client for client, version in newest.items() if earlier.get(client) != version)
    database = StateDatabase(folder / "clients")
    state = database.read(client, newest[client])
    database.close()
    assert state is not None
    flip_in(folder / "clients" / "states.sqlite", state["0.weight"].numpy().tobytes())
    assert f"client {client}'s state" in " ".join(damage for _, damage in verify(folder))
    run(resume=folder)
    assert outcome_of(folder) == outcome_of(both[0])
    assert "round-000004 is damaged (" in caplog.text and f"client {client}'s state" in caplog.text


def flip_in(file: Path, part: bytes) -> None:
    content = bytearray(file.read_bytes())
    content[content.index(part) + 1] ^= 1
    file.write_bytes(content)


def over_messages(tree: dict[str, Any]) -> None:
    """As on Ray and SuperNodes, which keep states in files: a bit of each is flipped after round 2."""

    def flip(round: int, states: Path) -> None:
        for file in states.rglob("*.safetensors") if round == 2 else ():
            spoil(file, "flipped", file)

    over_flowers_transport(Path(tree["results"]["root"]), tree, before=flip)


@pytest.mark.parametrize(
    ("play", "changes"),
    [
        (run, {}),
        (over_messages, {}),
        pytest.param(run, {"engine": {"workers": 2}}, marks=[pytest.mark.slow, pytest.mark.needs("workers")]),
        pytest.param(
            *(run, {"client": {"local_steps": 1, "sharding": {"ranks": 2}}}),
            marks=[pytest.mark.slow, pytest.mark.needs("sharding")],
        ),
    ],
)
def test_a_client_state_that_is_lost_during_a_run_ends_it_by_name(
    tmp_path: Path, play: Callable[[dict[str, Any]], object], changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else, the client would fail in every later round."""
    monkeypatch.setattr(StateDatabase, "read", lambda self, partition, version: None)
    feddyn = {**EXPERIMENT, **SETTINGS["feddyn"], **changes, "results": {"root": str(tmp_path)}}
    feddyn["client"] = {**feddyn["client"], "state_cache_mib": 0}
    with pytest.raises(
        ClientStateError, match=r"cannot go on without the state of client \d: ClientStateError: .* is damaged"
    ):
        play(feddyn)


def test_a_state_file_of_another_client_round_or_run_is_refused(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, run="this")
    state = {"h": torch.arange(3.0)}
    for client, version in ((0, 1), (0, 2), (1, 2)):
        store.save(client, version, state)
    ClientStore(tmp_path / "other", run="that").save(0, 2, state)
    own = tmp_path / "000000" / "round-000002.safetensors"
    for file, what in {
        "000001/round-000002": "client 1",
        "000000/round-000001": "round 1",
        "other/000000/round-000002": "run that",
    }.items():
        shutil.copy(tmp_path / f"{file}.safetensors", own)
        with pytest.raises(ClientStateError, match=f"it is of {what}, not of"):
            store.read(0, 2)


@pytest.mark.needs("tables")
def test_a_run_whose_data_have_changed_is_not_resumed(tmp_path: Path) -> None:
    """One label of one sample, in a file of the same name."""
    rng = np.random.default_rng(0)
    features, labels = rng.normal(size=(40, 3)).astype(np.float32), np.arange(40) % 2
    data = {"name": "npz", "path": str(tmp_path / "data.npz")}
    np.savez(data["path"], x_train=features, y_train=labels, x_test=features, y_test=labels)
    done = run({**EXPERIMENT, "rounds": 1, "data": data, "results": {"root": str(tmp_path / "runs")}})
    assert len(run({"rounds": 2}, resume=done.path).rounds) == 2
    labels[3] = 1 - labels[3]
    np.savez(data["path"], x_train=features, y_train=labels, x_test=features, y_test=labels)
    with pytest.raises(
        DataError, match=r"the data of data\.name=npz are not those that the run in .* was started with"
    ):
        run({"rounds": 3}, resume=done.path)
    assert len(load_run(done.path).rounds) == 2
