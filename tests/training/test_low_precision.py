"""Weights below float32: masters follow float32, stochastic rounding is exact in the mean, losses are reported.

# x = down + f ulp: a draw is down + ulp with probability f, so that its variance is f (1 - f) ulp^2
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from clients.local_optim import stepper
from clients.trainer import SequentialTrainer, check_training
from clients.working_model import WorkingModel
from fedsign import run
from fedsign.config import from_dict, merged
from fedsign.errors import ConfigError
from fedsign.numerics import Numerics
from fedsign.optim.low_precision import Masters, lost_share, round_stochastically
from fedsign.records import ObjectiveSpec, Tensors, TrainReply, tensors_of
from fedsign.storage.checkpoints import load_tensors
from fedsign.workload import Workload
from tests.training import low_models
from tests.training.requests import request

BASE: dict[str, Any] = {
    "rounds": 3,
    "callbacks": [],
    "model": {"name": f"{low_models.__name__}:network", "hidden": [32, 32, 32]},
    "partition": {"num_clients": 6},
    "server": {"cohort_size": 3},
    "strategy": {"name": "fedavg"},
    "client": {"local_steps": 10, "lr": 1e-5, "optimizer": {"name": "adamw"}},
}
LISA = {"name": "lisa", "num_sampled_layers": 1, "period": 3, "blocks": "network.1"}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": {"name": "sgd"}},
    "adam": {"optimizer": {"name": "adam"}},
    "adamw": {"optimizer": {"name": "adamw"}},
    "LISA": {"optimizer": LISA},
    "GaLore": {"optimizer": {"name": "galore", "rank": 4, "blocks": "network.1"}},
    "clipped micro batches": {"micro_batch": 4, "batch_size": 16, "clip_norm": 0.1, "optimizer": {"name": "sgd"}},
}
PARTIAL = [pytest.param(case, marks=pytest.mark.needs("partial")) for case in ("LISA", "GaLore")]
STRATEGIES: dict[str, dict[str, Any]] = {
    "fedprox": {"mu": 100.0},
    "feddyn": {"alpha": 100.0},
    "moon": {},
    "fedsign": {},
}


def config(root: Path | str = "runs", **changes: Any) -> dict[str, Any]:
    return merged(BASE, {**changes, "results": {"root": str(root)}})


def trained(root: Path, dtype: str, **changes: Any) -> tuple[Tensor, set[torch.dtype], list[Mapping[str, Any]]]:
    """How far a run moved the weights, the dtypes of its model, and its records."""
    done = run(config(root, **merged(changes, {"model": {"dtype": dtype}})))
    end, start = load_tensors(done.path / "model.safetensors"), Workload(done.config).make_model().state_dict()
    moved = torch.cat([(end[name].double() - start[name].double()).flatten() for name in start])
    return moved, {tensor.dtype for tensor in end.values()}, done.rounds


def bf16(bits: Tensor) -> Tensor:
    return bits.to(torch.int16).view(torch.bfloat16)


def drawn(values: Tensor, seed: int = 0) -> Tensor:
    into = torch.empty_like(values, dtype=torch.bfloat16)
    round_stochastically(values, into=into, generator=torch.Generator().manual_seed(seed))
    return into


def test_values_of_bf16_stay_as_they_are_all_of_them() -> None:
    every = bf16(torch.arange(-(2**15), 2**15))
    found = drawn(every.float())
    assert len(every.unique()) > 65_000 and every.isinf().sum() == 2
    assert torch.equal(found.isnan(), every.isnan())
    assert torch.equal(found.view(torch.int16)[~every.isnan()], every.view(torch.int16)[~every.isnan()])  # -0, too


def test_nan_with_a_full_significand_stays_nan() -> None:
    """Adding 1 to the bits of the last NaN gives -0."""
    assert drawn(torch.tensor([2**31 - 1, -1], dtype=torch.int32).view(torch.float32)).isnan().all()


@given(
    st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**127), max_value=2.0**127),
    st.integers(0, 99),
)
def test_the_mean_of_many_draws_is_the_value_within_its_standard_error(value: float, seed: int) -> None:
    """Of n draws, the number of those up has the mean n f and the variance n f (1 - f).

    Five standard errors: beyond them is one of 1.7 million.  A half more for the lattice of a count.
    """
    num, bits = 4096, torch.tensor([value]).view(torch.int32)
    down = (bits & -(2**16)).view(torch.float32).item()
    fraction = (bits.item() & 0xFFFF) / 2**16
    found = drawn(torch.full((num,), value), seed).float()
    ups = int((found != down).sum())
    assert set(found[found != down].tolist()) <= {(bits - bits % 2**16 + 2**16).view(torch.float32).item()}
    assert abs(ups - num * fraction) <= 5 * (num * fraction * (1 - fraction)) ** 0.5 + 0.5


def test_draws_repeat_and_do_not_depend_on_the_memory_format() -> None:
    values = torch.randn(3, 4, 5, 600, generator=torch.Generator().manual_seed(0))
    assert torch.equal(drawn(values), drawn(values))
    assert not torch.equal(drawn(values), drawn(values, seed=1))
    assert torch.equal(drawn(values.to(memory_format=torch.channels_last)), drawn(values))
    both = drawn(torch.full((2**20 + 6,), 1 + 2**-8))  # more than one block
    assert abs((both == 1).double().mean().item() - 0.5) < 5 * 0.5 / 2**10


def test_parts_of_a_tensor_draw_what_the_whole_does() -> None:
    num = 2**20 + 6  # more than one block
    values = torch.randn(num, generator=torch.Generator().manual_seed(0))
    whole = drawn(values)
    for start, stop in ((0, 5), (3, 2**20 + 1), (2**20 + 1, num), (7, 7)):
        part, stream = torch.empty(stop - start, dtype=torch.bfloat16), torch.Generator().manual_seed(0)
        round_stochastically(values[start:stop], into=part, generator=stream, start=start, numel=num)
        assert torch.equal(part, whole[start:stop])
        after = torch.Generator().manual_seed(0)
        round_stochastically(values, into=torch.empty(num, dtype=torch.bfloat16), generator=after)
        assert torch.equal(stream.get_state(), after.get_state())  # the next tensor's draws are the same, too


@pytest.mark.parametrize("case", [*PARTIAL, *sorted(OPTIMIZERS.keys() - {"LISA", "GaLore"})])
def test_masters_follow_float32_where_plain_bf16_stands_still(case: str, tmp_path: Path) -> None:
    """Forward and backward passes in bf16 have relative errors of some 2^-8; the updates are within a few of these."""
    client = OPTIMIZERS[case]
    exact, _, _ = trained(tmp_path, "float32", client=client)
    followed, types, _ = trained(tmp_path, "bf16", client=client)
    still, plain_types, records = trained(tmp_path, "bf16", client={**client, "low_precision": "plain"})
    assert types == {torch.float32} and plain_types == {torch.bfloat16}
    assert (followed - exact).norm() < 0.06 * exact.norm()
    assert (still - exact).norm() > 0.9 * exact.norm()
    assert records[0]["lost_updates"] > 0.9


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_objectives_see_are_masters(strategy: str, tmp_path: Path) -> None:
    """A pull toward the received model is 0 in bf16 until a weight has moved by a 256th; MOON's is by autograd."""
    settings = {"strategy": {"name": strategy, **STRATEGIES[strategy]}, "client": {"lr": 1e-4}}
    exact, _, _ = trained(tmp_path, "float32", **settings)
    followed, _, _ = trained(tmp_path, "bf16", **settings)
    assert (followed - exact).norm() < 0.08 * exact.norm()


@pytest.mark.parametrize("case", ["adamw", PARTIAL[0]])
def test_stochastic_rounding_moves_the_weights_as_far_as_float32(case: str, tmp_path: Path) -> None:
    """Along the exact update d, e = d + noise has <e, d> / <d, d> = 1 in the mean.

    It is 0.6 if the server rounds to nearest, and 0.03 if clients do.
    """
    settings = {"rounds": 5, "client": OPTIMIZERS[case]}
    exact, _, _ = trained(tmp_path, "float32", **settings)
    found, types, records = trained(tmp_path, "bf16", **merged(settings, {"client": {"low_precision": "stochastic"}}))
    assert types == {torch.bfloat16}
    assert abs(torch.dot(found, exact) / torch.dot(exact, exact) - 1) < 0.15
    assert "lost_updates" not in records[0]


@pytest.mark.parametrize("low_precision", ["master", "stochastic"])
@pytest.mark.needs("workers")
def test_worker_processes_draw_the_same_bits(low_precision: str, tmp_path: Path) -> None:
    hashes = []
    for workers in (1, 2):
        done = run(
            config(tmp_path, rounds=2, engine={"workers": workers}, client={"low_precision": low_precision, "lr": 1e-3})
        )
        hashes.append([(done.path / name).read_bytes() for name in ("rounds.jsonl", "model.safetensors")])
    assert hashes[0] == hashes[1]


def test_the_share_of_lost_updates_is_that_of_the_elements_with_a_gradient() -> None:
    """1 + 2^-9 is 1 in bf16, and 0 + 2^-9 is not; the third has no gradient, and an empty tensor no elements."""
    values, gradient = torch.tensor([1.0, 0.0, 1.0]).bfloat16(), torch.tensor([-1.0, -1.0, 0.0]).bfloat16()
    parameters = nn.Parameter(values), nn.Parameter(values[:0].clone())
    parameters[0].grad, parameters[1].grad = gradient, gradient[:0]
    assert lost_share(parameters, torch.optim.SGD(parameters, lr=2**-9).step) == 0.5
    assert lost_share(parameters[1:], lambda: None) is None


def reply_of(workload: Workload, served: Tensors) -> tuple[TrainReply, SequentialTrainer]:
    trainer = SequentialTrainer(workload)
    (reply,) = trainer.train_many([request(served)], states=None)  # type: ignore[arg-type]
    assert isinstance(reply, TrainReply), reply
    return reply, trainer


def served_by(workload: Workload) -> Tensors:
    """A float32 model between the values of bf16."""
    tensors, noise = tensors_of(workload.make_model()), torch.Generator().manual_seed(0)
    return {
        name: tensor.float() * (1 + 1e-3 * torch.rand(tensor.shape, generator=noise))
        for name, tensor in tensors.items()
    }


def test_a_client_starts_from_the_exact_values_and_steps_as_a_plain_loop() -> None:
    """Gradients of the bf16 model, AdamW on float32 parameters of its own, which are rounded into the model."""
    workload = Workload(from_dict(config(client={"lr": 1e-3, "weight_decay": 0.1})))
    served = served_by(workload)
    reply, _ = reply_of(workload, served)
    model, trainer = workload.make_model(), SequentialTrainer(workload)
    masters = {name: nn.Parameter(tensor.clone()) for name, tensor in served.items()}
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-3, weight_decay=0.1)
    order, _ = trainer._draws(request(served))
    for epoch in trainer._batching.schedule(len(workload.share_of(2)), order):
        for chosen in epoch:
            model.load_state_dict({name: master.detach() for name, master in masters.items()})  # rounds
            features, targets = workload.training_samples.batch(torch.from_numpy(workload.share_of(2)[chosen.numpy()]))
            model.zero_grad()
            functional.cross_entropy(model(features).float(), targets).backward()
            for name, parameter in model.named_parameters():
                masters[name].grad = parameter.grad.float()  # type: ignore[union-attr]
            optimizer.step()
    assert any(not torch.equal(masters[name], served[name]) for name in served)
    for name, master in masters.items():
        assert torch.equal(reply.tensors[name], master.detach()), name


@pytest.mark.needs("partial")
def test_lisa_has_masters_of_what_was_drawn_only() -> None:
    client = {"lr": 1e-3, "local_steps": 3, "optimizer": LISA}
    workload = Workload(from_dict(config(client=client)))
    served = served_by(workload)
    reply, _ = reply_of(workload, served)
    assert {tensor.dtype for tensor in reply.tensors.values()} == {torch.float32}
    assert len({name.split(".")[2] for name in reply.tensors if name.startswith("network.1.")}) == 1
    assert len(reply.tensors) == len(served) - 2 * 2  # weights and biases of the two other blocks
    masters = Masters(lambda parameter: parameter.detach().float())
    model = workload.make_model()
    first, second, *_ = model.parameters()
    first.grad = torch.ones_like(first)
    stepper(torch.optim.SGD([first, second], lr=1.0), [first, second], masters).step()
    assert first in masters and second not in masters


def test_an_optimizer_of_a_part_steps_that_part_in_float32() -> None:
    trained, frozen = (nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2))
    masters = Masters(lambda parameter: parameter.detach().float())
    trained.grad = torch.ones_like(trained)
    stepper(torch.optim.SGD([trained], lr=1e-4), [frozen, trained], masters).step()
    torch.testing.assert_close(masters.value(trained), torch.full((2,), 1 - 1e-4))
    assert frozen not in masters


def test_an_objective_without_a_gradient_of_its_own_pulls_masters_back() -> None:
    """d/dw of sum (w - w_0)^2 / 2 is w - w_0, here 1e-4, which bf16 weights of 1 do not show."""
    network = nn.Linear(3, 2, bias=False).bfloat16()
    nn.init.ones_(network.weight)
    model = WorkingModel(network, Numerics(device=torch.device("cpu")))
    model.load({"weight": torch.full((2, 3), 1 + 1e-4)})
    (value,) = model.values().values()
    (0.5 * (value - 1.0).square().sum()).backward()
    assert network.weight.grad is not None and torch.equal(network.weight.detach(), torch.ones_like(network.weight))
    torch.testing.assert_close(network.weight.grad.float(), torch.full((2, 3), 1e-4), rtol=2**-8, atol=0)


def test_gradients_of_micro_batches_add_up_in_float32(tmp_path: Path) -> None:
    """In bf16, 1 + 2^-9 is 1, so that gradients of many pieces would stop to add up."""
    workload = Workload(from_dict(config(client=OPTIMIZERS["clipped micro batches"])))
    _, trainer = reply_of(workload, served_by(workload))
    assert {parameter.grad_dtype for parameter in trainer._model.low} == {torch.float32}


def test_a_float32_model_is_trained_as_before() -> None:
    model = WorkingModel(nn.Linear(2, 2), Numerics(device=torch.device("cpu")))
    assert model.low == [] and model.updates(None, seed=0) is None  # type: ignore[arg-type]
    assert model.values() is model.in_training


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"dtype": "float32"}, "client": {"low_precision": "stochastic"}}, "has no weights below float32"),
        (
            {"model": {"dtype": "float16"}, "client": {"low_precision": "stochastic"}},
            "are float16, and only bfloat16 is",
        ),
        ({"client": {"low_precision": "nearest"}}, "expected 'master', 'stochastic' or 'plain'"),
        pytest.param(
            {"client": {"path": "cohort"}},
            "client.low_precision=master steps in float32, but the model's weights are bfloat16",
            marks=pytest.mark.needs("cohort"),
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_training(Workload(from_dict(config(**changes))), ObjectiveSpec())


def test_float16_has_masters_too(tmp_path: Path) -> None:
    exact, _, _ = trained(tmp_path, "float32")
    followed, types, _ = trained(tmp_path, "float16")
    assert types == {torch.float32} and (followed - exact).norm() < 0.06 * exact.norm()
