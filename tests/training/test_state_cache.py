"""States in memory: within their budget, on disk when a checkpoint refers to them, and never of another version."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clients.state.cache import StateCache
from clients.state.database import StateDatabase
from clients.state.store import ClientStore
from fedsign.errors import ClientStateError, DiskFullError
from fedsign.federation.exchange import ClientLedger
from fedsign.records import ObjectiveSpec, Tensors, TrainRequest
from fedsign.storage import checkpoints
from simulations import Run, load_run, run
from tests.e2e.checkpoints import files_of

MIB = 2**20


def asking(partition: int, *, round: int, version: int, needed: set[int]) -> TrainRequest:
    return TrainRequest(
        round=round,
        partition=partition,
        tensors={},
        objective=ObjectiveSpec(),
        state_version=version,
        needed_versions=frozenset(needed),
    )


def state_of(value: float, *, num: int = 2) -> Tensors:
    return {"h": torch.full((num,), float(value))}


def value_of(state: Tensors | None) -> float:
    assert state is not None
    return state["h"][0].item()


def killed(folder: Path, store: StateCache, *, budget_bytes: int) -> StateCache:
    """What a process finds that is started after the first one was killed: nothing that was not committed."""
    store._database.close()
    return StateCache(folder, budget_bytes=budget_bytes)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_whatever_is_lost_killed_or_spilled_the_state_asked_for_is_there(data: st.DataObject) -> None:
    """A server and three clients through random rounds: sampled or not, accepted or lost, checkpoint, kill and resume.

    The value of a state is the list of rounds that made it, so that a wrong version cannot go unnoticed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, budget_bytes = Path(name), data.draw(st.sampled_from([0, 700, 1400, 3000, MIB]), label="budget")
        store, ledger = StateCache(folder, budget_bytes=budget_bytes), ClientLedger()
        history: dict[tuple[int, int], list[int]] = {}  # (partition, version) -> rounds that made it
        saved: dict[int, dict[tuple[int, int], list[int]]] = {}  # checkpointed round -> history then
        round = 0
        for _ in range(data.draw(st.integers(1, 10))):
            round += 1
            accepted = []
            for partition in data.draw(st.sets(st.integers(0, 2)), label="sampled"):
                version = ledger.versions.get(partition, 0)
                asked = asking(partition, round=round, version=version, needed=ledger.needed(partition))
                state = store.load(asked)
                made_by = [] if state is None else state["h"].int().tolist()
                assert made_by == history.get((partition, version), [])
                if state is not None:
                    state["h"] += 1000  # what a careless objective does to its own copy
                store.save(partition, round, {"h": torch.tensor([*made_by, round], dtype=torch.float32)})
                assert store.held_bytes <= budget_bytes
                if data.draw(st.booleans(), label="accepted"):
                    accepted.append(partition)
                    history[partition, round] = [*made_by, round]
            ledger.commit(round, accepted)
            if data.draw(st.booleans(), label="checkpoint"):
                store.commit(ledger.versions)
                if data.draw(st.booleans(), label="put in place"):  # or killed right before
                    saved[round] = dict(history)
                    saved = {kept: saved[kept] for kept in sorted(saved)[-2:]}
                    ledger.checkpoint(round, on_disk=sorted(saved))
            if data.draw(st.booleans(), label="killed"):
                store = killed(folder, store, budget_bytes=budget_bytes)
                round = max(saved, default=0)
                tables = {kept: table for kept, table in ledger.checkpoints.items() if kept <= round}
                ledger = ClientLedger(dict(tables.get(round, {})), tables)
                history = dict(saved.get(round, {}))
        store._database.close()


def test_a_state_is_in_memory_until_a_commit_writes_the_versions_that_the_server_counts_on(tmp_path: Path) -> None:
    store = StateCache(tmp_path, budget_bytes=MIB)
    for partition in range(3):
        store.save(partition, 1, state_of(partition))
    assert not list(tmp_path.iterdir())
    store.commit({0: 1, 1: 0})  # the reply of client 1 was lost, client 2's too
    assert [store.versions(partition) for partition in range(3)] == [[1], [], []]
    store._database.close()
    assert value_of(StateDatabase(tmp_path).read(0, 1)) == 0


def test_nothing_is_written_for_clients_without_state(tmp_path: Path) -> None:
    store = StateCache(tmp_path / "clients", budget_bytes=MIB)
    assert store.load(asking(0, round=1, version=0, needed=set())) is None
    store.commit({})
    assert not list(tmp_path.iterdir())


def test_the_budget_counts_numbers_and_tensors_and_the_least_recently_used_leave_first(tmp_path: Path) -> None:
    """A state of 1,000 float32 is 4,000 bytes and a tensor of 640: five fit into 24,000 bytes, a sixth does not."""
    store = StateCache(tmp_path, budget_bytes=24_000)
    for partition in range(5):
        store.save(partition, 1, state_of(partition, num=1000))
        assert store.held_bytes == 4640 * (partition + 1)
    store.load(asking(0, round=2, version=1, needed={1}))  # now client 1 is the one longest not used
    store.save(5, 1, state_of(5, num=1000))
    assert store.held_bytes == 5 * 4640
    assert [bool(store._database.versions(partition)) for partition in range(6)] == [False, True, *[False] * 4]
    for partition in range(6):
        assert value_of(store.load(asking(partition, round=2, version=1, needed={1}))) == partition
    store.save(0, 2, state_of(7, num=10_000))  # larger than the budget: straight to the disk
    assert store.held_bytes <= 24_000 and value_of(store.load(asking(0, round=3, version=2, needed={1, 2}))) == 7
    store._database.close()


def test_what_was_spilled_but_not_committed_is_taken_back_by_a_kill(tmp_path: Path) -> None:
    store = StateCache(tmp_path, budget_bytes=0)
    store.save(0, 1, state_of(1))
    store.commit({0: 1})
    store.save(0, 2, state_of(2))
    assert store.versions(0) == [1, 2]
    store = killed(tmp_path, store, budget_bytes=0)
    assert store.versions(0) == [1]
    with pytest.raises(ClientStateError, match=r"partition 0 after round 2 is not in .*there: \[1\]"):
        store.load(asking(0, round=3, version=2, needed={1, 2}))


def test_versions_that_nobody_can_ask_for_are_removed_in_memory_and_on_disk(tmp_path: Path) -> None:
    store = StateCache(tmp_path, budget_bytes=MIB)
    for version in (1, 3):
        store.save(0, version, state_of(version))
        store.commit({0: version})
    store.save(0, 5, state_of(5))  # a reply that is lost
    store.load(asking(0, round=7, version=3, needed={1, 3}))
    assert store.versions(0) == [1, 3]
    store.load(asking(0, round=8, version=3, needed={3}))
    assert store.versions(0) == store._database.versions(0) == [3]


def test_what_is_kept_is_a_copy_as_it_would_come_from_the_disk(tmp_path: Path) -> None:
    """On the CPU, contiguous, ordered by name, so that a resumed run computes with the same bits."""
    given = {"b": torch.arange(6.0).reshape(2, 3).T, "a": torch.zeros(3, requires_grad=True), "n": torch.tensor(3)}
    store = StateCache(tmp_path, budget_bytes=MIB)
    store.save(0, 1, given)
    given["b"] += 1
    in_memory = store.load(asking(0, round=2, version=1, needed={1}))
    store.commit({0: 1})
    store = killed(tmp_path, store, budget_bytes=MIB)
    from_disk = store.load(asking(0, round=2, version=1, needed={1}))
    assert in_memory is not None and from_disk is not None
    assert list(in_memory) == list(from_disk) == ["a", "b", "n"]
    for name, tensor in from_disk.items():
        assert torch.equal(in_memory[name], tensor) and in_memory[name].dtype == tensor.dtype
        assert in_memory[name].stride() == tensor.stride() and not in_memory[name].requires_grad
    assert from_disk["b"][2, 1] == 5.0


def test_a_state_larger_than_a_value_of_the_database_is_kept_in_pieces(tmp_path: Path) -> None:
    database = StateDatabase(tmp_path, piece_bytes=1000)
    database.write(4, 1, {"h": torch.arange(5000.0)})
    database.write(4, 1, {"h": torch.arange(3000.0)})  # replaced, with fewer pieces
    kept = database.read(4, 1)
    assert kept is not None and torch.equal(kept["h"], torch.arange(3000.0))
    database.close()


def test_only_versions_of_earlier_rounds_are_removed(tmp_path: Path) -> None:
    """A client may be asked again in a round whose state it has saved, when its reply was lost."""
    database = StateDatabase(tmp_path)
    for version in (1, 2, 3, 4):
        database.write(0, version, state_of(version))
    database.remove(0, before=3, but={1})
    assert database.versions(0) == [1, 3, 4]
    database.close()


def test_states_in_files_as_other_engines_keep_them_are_found(tmp_path: Path) -> None:
    ClientStore(tmp_path).save(0, 3, state_of(3))
    store = StateCache(tmp_path, budget_bytes=MIB)
    assert value_of(store.load(asking(0, round=4, version=3, needed={3}))) == 3


def test_a_full_disk_is_said_and_what_was_committed_is_whole(tmp_path: Path) -> None:
    store = StateCache(tmp_path, budget_bytes=0)
    store.save(0, 1, state_of(1))
    store.commit({0: 1})
    assert store._database._connection is not None
    store._database._connection.execute("PRAGMA max_page_count = 20")
    with pytest.raises(DiskFullError, match=r"the disk is full: .*states\.sqlite"):
        for partition in range(100):
            store.save(partition, 2, state_of(2, num=10_000))
    store = killed(tmp_path, store, budget_bytes=0)
    assert value_of(store.load(asking(0, round=2, version=1, needed={1}))) == 1


def test_a_damaged_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "states.sqlite").write_bytes(b"no database at all" * 1000)
    with pytest.raises(ClientStateError, match=r"states\.sqlite cannot be read or written \(file is not a database\)"):
        StateCache(tmp_path, budget_bytes=0)


EXPERIMENT: dict[str, Any] = {
    "rounds": 8,
    "callbacks": [],
    "partition": {"num_clients": 8, "alpha": 1.0},
    "server": {"cohort_size": 4},
    "model": {"name": "mlp", "hidden": [8]},
}


def run_with_cache(root: Path, strategy: str, *, state_cache_mib: float, rounds: int = 8) -> Run:
    client = {"local_epochs": 1, "state_cache_mib": state_cache_mib}
    results = {"root": str(root), "checkpoint_every": 3}
    return run({**EXPERIMENT, "rounds": rounds, "strategy": {"name": strategy}, "client": client, "results": results})


def traces(done: Run) -> dict[str, str]:
    """The lines of a run, its models, and the versions that the server counts on."""
    last = max(done.folder.checkpoints.glob("round-*"))
    return {"lines": (done.path / "rounds.jsonl").read_text(encoding="utf-8"), **files_of(last)}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["feddyn", "scaffold", "moon"])
def test_a_run_does_not_depend_on_the_budget_nor_on_being_resumed_with_a_tiny_one(
    tmp_path: Path, strategy: str
) -> None:
    whole = traces(run_with_cache(tmp_path / "all in memory", strategy, state_cache_mib=256))
    assert traces(run_with_cache(tmp_path / "none", strategy, state_cache_mib=0)) == whole
    begun = run_with_cache(tmp_path / "two", strategy, state_cache_mib=0.01, rounds=5)
    assert traces(run({"rounds": 8}, resume=begun.path)) == whole
    checkpoint = checkpoints.load_latest(load_run(begun.path).folder.checkpoints)
    assert checkpoint is not None and len(checkpoint.client_versions) == 8
    store = StateDatabase(begun.folder.clients)
    assert all(store.read(partition, version) for partition, version in checkpoint.client_versions.items())
