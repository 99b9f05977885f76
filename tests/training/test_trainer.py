"""A client's training against a hand-written loop, and its promises about state and randomness."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from clients.state.store import ClientStore
from clients.trainer import SequentialTrainer
from fedsign.config import from_dict
from fedsign.errors import ClientStateError
from fedsign.federation.exchange import ClientLedger
from fedsign.records import Failure, ObjectiveSpec, Role, Tensors, TrainReply, TrainRequest, tensors_of
from fedsign.seeding import Purpose, generator
from fedsign.workload import Workload
from tests.training.requests import request


def workload(**changes: Any) -> Workload:
    return Workload(from_dict({"partition": {"num_clients": 6, "alpha": 1.0}, "server": {"cohort_size": 3}, **changes}))


def by_hand(work: Workload, start: Tensors, *, round: int, partition: int, drift: dict[str, Any]) -> Tensors:
    """SGD with momentum as in its definition, gradients by hand: m = 0.9 m + g, theta = theta - 0.05 m.

    `drift` adds the objective's gradient in closed form: "mu" FedProx, "gamma" FedSign, "alpha"/"h" FedDyn.
    """
    model, samples = work.make_model(), work.samples_of(partition)
    theta = {name: tensor.clone() for name, tensor in start.items()}
    momentum = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
    rng = generator(work.config.seed, Purpose.BATCHES, round=round, partition=partition)
    for _ in range(work.config.client.local_epochs):
        order = rng.permutation(len(samples))
        for begin in range(0, len(order), 16):
            index = order[begin : begin + 16]
            free = {name: tensor.clone().requires_grad_() for name, tensor in theta.items()}
            outputs = functional_call(model, free, (samples.features[index],))
            functional.cross_entropy(outputs, samples.targets[index]).backward()
            for name in theta:
                gradient = free[name].grad
                assert gradient is not None
                gradient = gradient + drift.get("mu", 0.0) * (theta[name] - start[name])
                s = torch.sigmoid(theta[name])
                gradient = gradient - drift.get("gamma", 0.0) * start[name].sign() * s * (1 - s)
                if "alpha" in drift:
                    pull = drift["h"][name] + theta[name] - start[name]
                    gradient = gradient + drift["alpha"] * pull
                momentum[name] = 0.9 * momentum[name] + gradient
                theta[name] = theta[name] - 0.05 * momentum[name]
    return theta


@pytest.mark.parametrize(
    ("objective", "drift"),
    [
        (ObjectiveSpec(), {}),
        (ObjectiveSpec(name="fedprox", settings={"mu": 0.1}), {"mu": 0.1}),
        (ObjectiveSpec(name="fedsign", settings={"gamma": 0.003}), {"gamma": 0.003}),
    ],
    ids=["plain", "fedprox", "fedsign"],
)
def test_training_is_the_loop_written_by_hand(tmp_path: Path, objective: ObjectiveSpec, drift: dict[str, Any]) -> None:
    work = workload()
    start = tensors_of(work.make_model())
    reply = SequentialTrainer(work).train(request(start, objective=objective, round=3), ClientStore(tmp_path))
    expected = by_hand(work, start, round=3, partition=2, drift=drift)
    for name, tensor in reply.tensors.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-6)
    assert reply.num_examples == len(work.samples_of(2))


def test_feddyns_second_round_is_the_loop_by_hand_with_the_state_of_the_first(tmp_path: Path) -> None:
    """h = theta_1 - theta_0 after the first round; the second minimizes with alpha (h + theta - theta_1)."""
    work, store = workload(), ClientStore(tmp_path)
    trainer = SequentialTrainer(work)
    spec = ObjectiveSpec(name="feddyn", settings={"alpha": 0.5})
    start = tensors_of(work.make_model())
    first = trainer.train(request(start, objective=spec), store).tensors
    again = request(first, objective=spec, round=2, state_version=1, needed_versions=frozenset({1}))
    second = trainer.train(again, store).tensors
    h = {name: first[name] - start[name] for name in start}
    assert max(tensor.abs().max().item() for tensor in h.values()) > 1e-3
    expected = by_hand(work, first, round=2, partition=2, drift={"alpha": 0.5, "h": h})
    for name, tensor in second.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-6)


def test_a_clients_result_depends_neither_on_who_was_trained_before_nor_on_the_global_generators(
    tmp_path: Path,
) -> None:
    work = workload(model={"name": f"{__name__}:with_dropout"})
    start = tensors_of(work.make_model())
    store = ClientStore(tmp_path)
    alone = SequentialTrainer(work).train(request(start), store).tensors
    torch.manual_seed(99)
    state = torch.random.get_rng_state()
    trainer = SequentialTrainer(work)
    trainer.train(request(start, partition=4), store)
    after_another = trainer.train(request(start), store).tensors
    assert torch.equal(torch.random.get_rng_state(), state), "the global generator was advanced"
    for name, tensor in alone.items():
        assert torch.equal(tensor, after_another[name])
    other_round = trainer.train(request(start, round=2), store).tensors
    assert not all(torch.equal(alone[name], other_round[name]) for name in alone)


def with_dropout(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(*input_shape, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, num_outputs))


def test_batchnorm_statistics_travel_as_buffers(tmp_path: Path) -> None:
    work = workload(model={"name": "cnn"})
    start = tensors_of(work.make_model())
    reply = SequentialTrainer(work).train(request(start), ClientStore(tmp_path))
    buffers = {name for name, role in reply.roles.items() if role is Role.BUFFER}
    assert {name.rpartition(".")[2] for name in buffers} == {"running_mean", "running_var", "num_batches_tracked"}
    assert all(not torch.equal(reply.tensors[name], start[name]) for name in buffers)


def test_a_client_that_raises_is_a_failure_and_the_next_one_is_trained(tmp_path: Path) -> None:
    work = workload()
    start = tensors_of(work.make_model())
    broken = request(start, objective=ObjectiveSpec(name="no_such_objective"))
    good = request(start, partition=3)
    failure, reply = SequentialTrainer(work).train_many([broken, good], ClientStore(tmp_path))
    assert isinstance(failure, Failure) and failure.partition == 2
    assert "no_such_objective" in failure.reason and "Traceback" in failure.details
    assert isinstance(reply, TrainReply) and reply.partition == 3


def test_stateless_objectives_leave_nothing_on_disk(tmp_path: Path) -> None:
    work = workload()
    SequentialTrainer(work).train(request(tensors_of(work.make_model())), ClientStore(tmp_path))
    assert not list(tmp_path.iterdir())


def state_of(value: float) -> Tensors:
    return {"h": torch.full((2,), value)}


def asking(*, round: int, version: int, needed: set[int]) -> TrainRequest:
    return request({}, partition=0, round=round, state_version=version, needed_versions=frozenset(needed))


def store_with(folder: Path, *versions: int) -> ClientStore:
    store = ClientStore(folder)
    for version in versions:
        store.save(0, version, state_of(version))
    return store


def test_a_client_starts_from_the_version_the_server_counts_on_not_from_its_newest(tmp_path: Path) -> None:
    store = store_with(tmp_path, 2, 5)  # the reply of round 5 was lost
    kept = store.load(asking(round=7, version=2, needed={2}))
    assert kept is not None and torch.equal(kept["h"], state_of(2)["h"])
    assert store.versions(0) == [2]
    assert store.load(asking(round=7, version=0, needed=set())) is None
    assert store.versions(0) == []


def test_a_refused_reply_does_not_cost_the_committed_state(tmp_path: Path) -> None:
    """Version 5 was refused, then a checkpoint was written in round 10 that counts on version 3."""
    store = store_with(tmp_path, 3, 5)
    kept = store.load(asking(round=12, version=3, needed={3}))
    assert kept is not None and torch.equal(kept["h"], state_of(3)["h"])


def test_states_that_a_checkpoint_counts_on_stay_and_others_go(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 3, 7)
    store.load(asking(round=9, version=7, needed={3, 7}))
    assert store.versions(0) == [3, 7]


def test_a_late_request_leaves_the_state_of_a_younger_one_alone(tmp_path: Path) -> None:
    """Round 5's process was too late; round 6 was answered by another one before the first had begun."""
    store = store_with(tmp_path, 3, 6)
    store.load(asking(round=5, version=3, needed={3}))
    assert store.versions(0) == [3, 6]


def test_a_missing_state_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    with pytest.raises(ClientStateError, match=r"partition 0 after round 3 is not in"):
        ClientStore(tmp_path).load(asking(round=4, version=3, needed={3}))


@given(st.data())
@hypothesis_settings(max_examples=150, deadline=None)
def test_whatever_is_lost_or_killed_the_state_asked_for_is_there(data: st.DataObject) -> None:
    """A server and one client through random rounds: sampled or not, accepted or lost, checkpoint, kill and resume.

    The value of a state is the list of rounds that made it, so that a wrong version cannot go unnoticed.
    """
    with tempfile.TemporaryDirectory() as folder:
        store, ledger = ClientStore(Path(folder)), ClientLedger()
        history: dict[int, list[int]] = {0: []}  # version -> rounds that made it, as the server counts on it
        saved: dict[int, dict[int, list[int]]] = {}  # checkpointed round -> history then
        round = 0
        for _ in range(data.draw(st.integers(1, 12))):
            round += 1
            if data.draw(st.booleans(), label="sampled"):
                version = ledger.versions.get(0, 0)
                state = store.load(asking(round=round, version=version, needed=ledger.needed(0)))
                made_by = [] if state is None else state["h"].int().tolist()
                assert made_by == history[version]
                store.save(0, round, {"h": torch.tensor([*made_by, round], dtype=torch.float32)})
                if data.draw(st.booleans(), label="accepted"):
                    ledger.commit(round, [0])
                    history[round] = [*made_by, round]
            if data.draw(st.booleans(), label="checkpoint"):
                saved[round] = dict(history)
                saved = {kept: saved[kept] for kept in sorted(saved)[-2:]}
                ledger.checkpoint(round, on_disk=sorted(saved))
            if saved and data.draw(st.booleans(), label="killed"):
                round = data.draw(st.sampled_from(sorted(saved)), label="resumed from")
                saved = {kept: value for kept, value in saved.items() if kept <= round}
                tables = {kept: table for kept, table in ledger.checkpoints.items() if kept <= round}
                ledger, history = ClientLedger(dict(tables[round]), tables), dict(saved[round])
