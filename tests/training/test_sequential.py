"""The sequential path against a plain PyTorch loop, bit for bit: reusing objects across clients has no effect."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from clients.local_optim import LocalOptimizer, stepper
from clients.state.store import ClientStore
from clients.trainer import SequentialTrainer
from clients.working_model import BorrowingModel, LargeModel, WorkingModel
from fedsign.config import from_dict
from fedsign.numerics import Numerics
from fedsign.records import Failure, Tensors, TrainReply, tensors_of
from fedsign.seeding import Purpose, generator
from fedsign.workload import Workload
from tests.training.requests import request


def workload(**changes: Any) -> Workload:
    client = {"local_epochs": 2, **changes.pop("client", {})}
    partition = {"num_clients": 12, "alpha": 0.3, "min_partition_size": 1}
    return Workload(from_dict({"partition": partition, "client": client, **changes}))


def plain_loop(work: Workload, start: Tensors, partition: int, *, round: int, optimizer: Any) -> Tensors:
    """What anyone would write: a model, an optimizer, shuffled batches of 16."""
    model, samples = work.make_model(), work.samples_of(partition)
    model.load_state_dict(start)
    made = optimizer(model.parameters())
    rng = generator(work.config.seed, Purpose.BATCHES, round=round, partition=partition)
    for _ in range(work.config.client.local_epochs):
        for index in torch.from_numpy(rng.permutation(len(samples))).split(16):
            made.zero_grad()
            functional.cross_entropy(model(samples.features[index]), samples.targets[index]).backward()
            made.step()
    return tensors_of(model)


SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


@pytest.mark.parametrize(
    ("client", "optimizer"),
    [
        ({"optimizer": {"momentum": 0.0}}, lambda p: SGD(p, lr=0.05)),
        ({}, lambda p: SGD(p, lr=0.05, momentum=0.9)),
        (
            {"optimizer": {"nesterov": True}, "weight_decay": 0.01},
            lambda p: SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
        ),
        ({"optimizer": {"name": "adam"}, "weight_decay": 0.1}, lambda p: ADAM(p, lr=0.05, weight_decay=0.1)),
        ({"optimizer": {"name": "adamw"}, "weight_decay": 0.1}, lambda p: ADAMW(p, lr=0.05, weight_decay=0.1)),
    ],
    ids=["sgd", "momentum", "nesterov", "adam", "adamw"],
)
def test_clients_and_rounds_one_after_another_are_a_plain_loop_bit_for_bit(
    tmp_path: Path, client: dict[str, Any], optimizer: Any
) -> None:
    work = workload(client=client)
    trainer, start = SequentialTrainer(work), tensors_of(work.make_model())
    for round in (1, 2):
        replies = list(trainer.train_many([request(start, k, round=round) for k in (0, 3, 7)], ClientStore(tmp_path)))
        for reply in replies:
            assert isinstance(reply, TrainReply)
            expected = plain_loop(work, start, reply.partition, round=round, optimizer=optimizer)
            assert all(torch.equal(reply.tensors[name], expected[name]) for name in expected)
        assert isinstance(replies[0], TrainReply)
        start = replies[0].tensors


@given(data=st.data())
@hypothesis_settings(max_examples=60, deadline=None)
def test_a_step_of_sgd_is_torchs_bit_for_bit_whichever_gradients_are_missing(data: st.DataObject) -> None:
    """Scalars, and parameters that have a gradient in some steps only."""
    momentum = data.draw(st.sampled_from([0.0, 0.5, 0.9]))
    settings = {
        "lr": data.draw(st.sampled_from([0.1, 0.037])),
        "momentum": momentum,
        "weight_decay": data.draw(st.sampled_from([0.0, 0.013])),
        "nesterov": momentum > 0 and data.draw(st.booleans()),
    }
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    shapes = [(), (3,), (2, 5)]
    ours, theirs = ([nn.Parameter(torch.zeros(shape) + 1) for shape in shapes] for _ in range(2))
    fast, torchs = stepper(torch.optim.SGD(ours, **settings)), torch.optim.SGD(theirs, **settings)
    for _ in range(data.draw(st.integers(1, 4))):
        fast.clear()
        torchs.zero_grad()
        for one, other in zip(ours, theirs, strict=True):
            if data.draw(st.booleans()):
                one.grad = torch.from_numpy(np.asarray(rng.normal(size=one.shape), dtype=np.float32))
                other.grad = one.grad.clone()
        fast.step()
        torchs.step()
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


class Remembering(torch.optim.SGD):
    """Takes its first step in vain: what it knows lies outside of its state."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.num_steps = 0

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        return super().step(closure) if self.num_steps > 1 else None


def remembering(parameters: Any, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    return Remembering(parameters, lr)


def hooked(parameters: Any, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """torch's SGD with a hook that quarters every gradient."""

    def quarter(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad /= 4

    made = torch.optim.SGD(parameters, lr=lr)
    made.register_step_pre_hook(quarter)
    return made


def first_step_in_vain(parameters: Any) -> torch.optim.Optimizer:
    return Remembering(parameters, 0.05)


@pytest.mark.parametrize(
    ("name", "plain"),
    [("remembering", first_step_in_vain), ("hooked", lambda p: torch.optim.SGD(p, lr=0.0125))],
)
def test_a_users_optimizer_is_made_anew_for_every_client_and_steps_in_its_own_way(
    tmp_path: Path, name: str, plain: Any
) -> None:
    work = workload(client={"optimizer": {"name": f"{__name__}:{name}"}})
    start = tensors_of(work.make_model())
    requests = [request(start, k) for k in (3, 7)]
    for reply in SequentialTrainer(work).train_many(requests, ClientStore(tmp_path)):
        assert isinstance(reply, TrainReply)
        expected = plain_loop(work, start, reply.partition, round=1, optimizer=plain)
        for tensor in expected:
            torch.testing.assert_close(reply.tensors[tensor], expected[tensor], rtol=1e-5, atol=1e-7)


def test_an_optimizer_of_torchs_is_made_once_a_rate_and_one_of_others_for_every_client() -> None:
    made: list[float] = []

    def maker(factory: Any) -> LocalOptimizer:
        def make(lr: float) -> torch.optim.Optimizer:
            made.append(lr)
            found: torch.optim.Optimizer = factory([nn.Parameter(torch.zeros(1))])
            return found

        return LocalOptimizer(make)

    for factory, expected in ((torch.optim.Adam, [0.1, 0.2]), (first_step_in_vain, [0.1, 0.1, 0.2, 0.2])):
        made.clear()
        local = maker(factory)
        for lr in (0.1, 0.1, 0.2, 0.2):
            local.fresh(lr).state["anything"] = 1  # type: ignore[index,assignment]
        assert made == expected


class Averaging(nn.Module):
    """Puts a new buffer in place of its old one in every pass."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, features: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * features.mean(0)
        outputs: Tensor = self.layer(features - self.mean)
        return outputs


def averaging(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return Averaging()


def test_a_buffer_that_a_pass_replaces_is_received_and_sent(tmp_path: Path) -> None:
    work = workload(
        model={"name": f"{__name__}:averaging"}, client={"local_epochs": 0, "local_steps": 2, "batch_size": 8}
    )
    start = tensors_of(work.make_model()) | {"mean": torch.full((64,), 4.0)}
    trainer = SequentialTrainer(work)
    for partition in (3, 7):
        reply = trainer.train(request(start, partition), ClientStore(tmp_path))
        samples = work.samples_of(partition)
        order = torch.from_numpy(
            generator(0, Purpose.BATCHES, round=1, partition=partition).permutation(len(samples))
        ).split(8)
        first, second = samples.features[order[0]].mean(0), samples.features[order[1 % len(order)]].mean(0)
        if len(order) > 1:
            torch.testing.assert_close(reply.tensors["mean"], 0.25 * start["mean"] + 0.25 * first + 0.5 * second)


def test_what_does_not_fit_the_model_fails_as_load_state_dict_does(tmp_path: Path) -> None:
    work = workload()
    start = tensors_of(work.make_model())
    name = next(iter(start))
    missing = {key: tensor for key, tensor in start.items() if key != name}
    for wrong in ({**start, name: torch.zeros(1)}, missing, {**start, "other": torch.zeros(1)}):
        with pytest.raises(RuntimeError) as expected:
            work.make_model().load_state_dict(wrong)
        (failure,) = SequentialTrainer(work).train_many([request(wrong, 3)], ClientStore(tmp_path))
        assert isinstance(failure, Failure)
        assert failure.reason == " ".join(f"RuntimeError: {expected.value}".split())


class Counting(nn.Module):
    """Its state is more than tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.loaded = 0
        self.register_load_state_dict_post_hook(lambda module, keys: setattr(module, "loaded", module.loaded + 1))


def test_a_module_that_loads_in_its_own_way_is_asked_to() -> None:
    model = WorkingModel(Counting(), Numerics(device=torch.device("cpu")))
    model.load(tensors_of(model.module))
    assert model.module.loaded == 1


def test_received_parameters_are_converted_once_a_round_and_are_those_of_the_request() -> None:
    model = WorkingModel(nn.Linear(2, 3).double(), Numerics(device=torch.device("cpu")))
    came = tensors_of(nn.Linear(2, 3))
    first = model.received(came, round=1)
    assert first["weight"].dtype == torch.float64 and torch.equal(first["weight"], came["weight"].double())
    assert model.received(dict(came), round=1) is first
    came["weight"].zero_()  # a server may move its model in place between rounds
    assert torch.equal(model.received(came, round=2)["weight"], torch.zeros(3, 2, dtype=torch.float64))


def unaligned(tensor: Tensor) -> Tensor:
    """The same values, 4 bytes off what torch allocates."""
    return torch.cat([torch.zeros(1), tensor.reshape(-1)])[1:].view(tensor.shape)


def test_an_evaluated_model_borrows_its_tensors_and_copies_those_at_other_addresses() -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    model = BorrowingModel(module, Numerics(device=torch.device("cpu")))
    initial = model.copies()
    assert initial["0.weight"].data_ptr() == module[0].weight.data_ptr()  # handed over
    given = {name: tensor.clone() for name, tensor in tensors_of(module).items()}
    given["0.bias"] = unaligned(given["0.bias"] + 1)
    model.load(given)
    assert module[0].weight.data_ptr() == given["0.weight"].data_ptr()
    assert module[0].bias.data_ptr() % 64 == 0 and torch.equal(module[0].bias, given["0.bias"])
    module(torch.randn(8, 64))  # writes into buffers
    assert torch.equal(given["1.running_mean"], initial["1.running_mean"])
    model.empty()
    assert sum(parameter.numel() for parameter in (module[0].weight, module[1].weight)) == 0
    assert all(tensor.numel() for tensor in (*initial.values(), *given.values()))


def test_a_refused_load_leaves_the_tensors_that_were_borrowed_before() -> None:
    """`load_state_dict` copies what fits before it raises."""
    model = BorrowingModel(nn.Linear(64, 64), Numerics(device=torch.device("cpu")))
    given = {"weight": torch.zeros(64, 64), "bias": torch.zeros(64)}
    model.load(given)
    assert model.module.get_parameter("weight").data_ptr() == given["weight"].data_ptr()
    with pytest.raises(RuntimeError, match="size mismatch for bias"):
        model.load({"weight": torch.ones(64, 64), "bias": torch.zeros(3)})
    assert not given["weight"].any()


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_large_model_replies_with_the_bits_of_a_small_one_and_with_the_memory_it_trained(
    optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replies = []
    for least in (2**26, 0):
        monkeypatch.setattr("clients.working_model.LARGE_BYTES", least)
        work = workload(client={"optimizer": {"name": optimizer, **({"momentum": 0.9} if optimizer == "sgd" else {})}})
        trainer, tensors = SequentialTrainer(work), tensors_of(work.make_model())
        assert isinstance(trainer._model, LargeModel) == (least == 0)
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        replies.append([trainer.train(request(tensors, client), ClientStore(tmp_path)) for client in (0, 1, 0)])
        assert all(torch.equal(before[name], tensors[name]) for name in tensors)
    for small, large in zip(*replies, strict=True):
        assert all(torch.equal(small.tensors[name], large.tensors[name]) for name in small.tensors)


def test_no_gradient_and_no_moment_outlasts_a_clients_steps(tmp_path: Path) -> None:
    work = workload(client={"optimizer": {"name": "adamw"}})
    trainer = SequentialTrainer(work)
    trainer.train(request(tensors_of(work.make_model())), ClientStore(tmp_path))
    optimizer = trainer._optimizer._optimizer
    assert optimizer is not None and not optimizer.state
    assert all(parameter.grad is None for parameter in trainer._model.parameters.values())


def test_a_stream_does_not_depend_on_how_its_seed_is_handed_over() -> None:
    """Also for numbers above 32 bits, which are two words."""
    for numbers in [(0, 0, 0), (2**31 - 1, 7, 999_999), (2**40, 1, 2), (5, 2**32, 3)]:
        seed, round, partition = numbers
        ours = generator(seed, Purpose.BATCHES, round=round, partition=partition)
        plain = np.random.default_rng(np.random.SeedSequence([seed, 5, round, partition]))
        assert ours.integers(2**63, size=4).tolist() == plain.integers(2**63, size=4).tolist()
