"""The settings of a client's training: steps, clipping, smoothing, schedules, batches of one sample."""

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from clients.batches import Batching, batches
from clients.local_step import LocalStep
from clients.state.store import ClientStore
from clients.trainer import SequentialTrainer, check_training
from clients.working_model import WorkingModel
from fedsign import plugins
from fedsign.compatibility import Experiment
from fedsign.config import from_dict
from fedsign.errors import ConfigError
from fedsign.objectives.base import LocalContext, Objective
from fedsign.optim.displacement import unit_displacement
from fedsign.records import ObjectiveSpec, Tensors, TrainReply, TrainRequest, tensors_of
from fedsign.schedules.warmup import warmup_cosine, warmup_linear
from fedsign.seeding import Purpose, generator
from fedsign.workload import Workload


def workload(**client: Any) -> Workload:
    return Workload(
        from_dict({"partition": {"num_clients": 6, "alpha": 1.0}, "server": {"cohort_size": 3}, "client": client})
    )


def train(work: Workload, folder: Path, *, round: int = 1, partition: int = 2, **changes: Any) -> TrainReply:
    return SequentialTrainer(work).train(
        request(work, round=round, partition=partition, **changes), ClientStore(folder)
    )


def request(work: Workload, *, round: int = 1, partition: int = 2, **changes: Any) -> TrainRequest:
    values = {"objective": ObjectiveSpec(), "state_version": 0, "needed_versions": frozenset(), **changes}
    return TrainRequest(round=round, partition=partition, tensors=tensors_of(work.make_model()), **values)


def gradient(work: Workload, theta: Tensors, index: Any, *, smoothing: float = 0.0) -> Tensors:
    """Of the task's loss on some of client 2's samples; smoothed labels are (1 - s) one-hot + s / 10."""
    samples = work.samples_of(2)
    free = {name: tensor.clone().requires_grad_() for name, tensor in theta.items()}
    logits = functional_call(work.make_model(), free, (samples.features[index],))
    wanted = (1 - smoothing) * functional.one_hot(samples.targets[index], 10) + smoothing / 10
    loss = -(wanted * logits.log_softmax(1)).sum(1).mean()
    return dict(zip(theta, torch.autograd.grad(loss, list(free.values())), strict=True))


def first_batch(work: Workload, size: int) -> Any:
    rng = generator(0, Purpose.BATCHES, round=1, partition=2)
    return torch.from_numpy(rng.permutation(len(work.samples_of(2))))[:size]


ONE_STEP: dict[str, Any] = {"local_steps": 1, "batch_size": 8, "lr": 0.1, "optimizer": {"momentum": 0.0}}


def test_one_local_step_is_one_gradient_step(tmp_path: Path) -> None:
    work = workload(**ONE_STEP)
    start = tensors_of(work.make_model())
    g = gradient(work, start, first_batch(work, 8))
    for name, tensor in train(work, tmp_path).tensors.items():
        torch.testing.assert_close(tensor, start[name] - 0.1 * g[name], rtol=1e-4, atol=1e-7)


def test_clipping_bounds_the_norm_over_all_parameters(tmp_path: Path) -> None:
    work = workload(**ONE_STEP, clip_norm=0.5)
    start = tensors_of(work.make_model())
    g = gradient(work, start, first_batch(work, 8))
    norm = torch.cat([tensor.flatten() for tensor in g.values()]).norm()
    assert norm > 0.6  # otherwise nothing is clipped
    for name, tensor in train(work, tmp_path).tensors.items():
        torch.testing.assert_close(tensor, start[name] - 0.1 * 0.5 / norm * g[name], rtol=1e-4, atol=1e-7)
    wide = train(workload(**ONE_STEP, clip_norm=100.0), tmp_path).tensors
    unclipped = train(workload(**ONE_STEP), tmp_path).tensors
    assert all(torch.equal(wide[name], unclipped[name]) for name in wide)


def test_label_smoothing_trains_on_smoothed_labels(tmp_path: Path) -> None:
    work = workload(**ONE_STEP, label_smoothing=0.2)
    start = tensors_of(work.make_model())
    g = gradient(work, start, first_batch(work, 8), smoothing=0.2)
    for name, tensor in train(work, tmp_path).tensors.items():
        torch.testing.assert_close(tensor, start[name] - 0.1 * g[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("part", "factors"),
    [
        ({"name": "constant"}, [1.0, 1.0, 1.0]),
        ({"name": "exponential", "factor": 0.5}, [1.0, 0.5, 0.25]),
        ({"name": "step", "every": 2, "factor": 0.1}, [1.0, 1.0, 0.1]),
        ({"name": "cosine", "final": 0.2}, [0.2 + 0.4 * (1 + np.cos(np.pi * t / 40)) for t in range(3)]),
    ],
)
def test_a_schedule_scales_the_steps_of_each_round(part: dict[str, Any], factors: list[float], tmp_path: Path) -> None:
    """One plain SGD step moves by lr x gradient, so the moved distance shows the round's rate."""
    work = workload(**ONE_STEP, schedule=part)
    whole = workload(**ONE_STEP)
    start = tensors_of(work.make_model())
    for round, factor in enumerate(factors, start=1):
        scaled, full = (train(each, tmp_path, round=round).tensors for each in (work, whole))
        for name in start:
            expected = start[name] + factor * (full[name] - start[name])
            torch.testing.assert_close(scaled[name], expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("optimizer", [{"name": "sgd"}, {"name": "adamw"}])
def test_a_schedule_per_step_counts_the_steps_of_all_rounds(optimizer: dict[str, Any], tmp_path: Path) -> None:
    """Round 2 of 40 with 3 steps a round: steps 4, 5 and 6 of 120, by a plain loop that sets the rate before each
    step.
    """
    settings = {"local_steps": 3, "batch_size": 8, "lr": 0.1, "optimizer": optimizer}
    work = workload(**settings, schedule={"name": "exponential", "factor": 0.5, "per": "step"})
    model, samples = work.make_model(), work.samples_of(2)
    start = tensors_of(model)
    kind = {"sgd": partial(torch.optim.SGD, momentum=0.9), "adamw": partial(torch.optim.AdamW, weight_decay=0.0)}
    made = kind[optimizer["name"]](model.parameters(), lr=0.1)
    rng = generator(work.config.seed, Purpose.BATCHES, round=2, partition=2)
    for step, index in enumerate(torch.from_numpy(rng.permutation(len(samples))).split(8)[:3], start=4):
        made.param_groups[0]["lr"] = 0.1 * 0.5 ** (step - 1)
        made.zero_grad()
        work.task.loss(model(samples.features[index]), samples.targets[index]).backward()
        made.step()
    expected = tensors_of(model)
    trainer = SequentialTrainer(work)
    for _ in range(2):  # the optimizer is used again, and begins with the full rate
        found = trainer.train(request(work, round=2), ClientStore(tmp_path)).tensors
    assert any(not torch.equal(expected[name], start[name]) for name in start)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("micro_batch", [1, 3, 8])
@pytest.mark.parametrize("objective", ["plain", "fedprox", "moon"])
def test_micro_batches_take_the_whole_batchs_step(micro_batch: int, objective: str, tmp_path: Path) -> None:
    settings = {"local_steps": 4, "batch_size": 8, "lr": 0.1, "clip_norm": 1.0}
    spec = ObjectiveSpec(name=objective, settings={} if objective == "plain" else {"mu": 0.5})
    whole = train(workload(**settings), tmp_path, objective=spec)
    pieces = train(workload(**settings, micro_batch=micro_batch), tmp_path, objective=spec)
    for name, tensor in whole.tensors.items():
        torch.testing.assert_close(pieces.tensors[name], tensor, rtol=1e-4, atol=1e-6)
    assert pieces.metrics["train-loss"] == pytest.approx(whole.metrics["train-loss"], rel=1e-5)


def test_micro_batches_are_refused_where_a_batch_is_more_than_its_samples() -> None:
    data, model = {"name": "digits", "flat": False}, {"name": "cnn", "channels": [4, 8]}
    work = Workload(from_dict({"data": data, "model": model, "client": {"micro_batch": 4}}))
    with pytest.raises(ConfigError, match=r"client\.micro_batch=4 .* has BatchNorm"):
        check_training(work, ObjectiveSpec())


def test_a_rate_per_step_is_refused_by_an_objective_that_needs_one_rate() -> None:
    work = workload(schedule={"name": "cosine", "per": "step"})
    with pytest.raises(ConfigError, match=r"client\.schedule\.per=step .* objective 'scaffold'"):
        check_training(work, ObjectiveSpec(name="scaffold"))


@pytest.mark.needs("cohort")
@pytest.mark.parametrize("client", [{"micro_batch": 4}, {"schedule": {"name": "cosine", "per": "step"}}])
def test_a_stack_of_clients_refuses_what_is_for_one_after_another(client: dict[str, Any]) -> None:
    from clients.cohort.rules import COHORT

    why = COHORT.why_not(Experiment(workload=workload(**client), spec=ObjectiveSpec()))
    assert why.endswith("is for one client after another only")


@hypothesis_settings(deadline=None, max_examples=200)
@given(total=st.integers(1, 200), share=st.floats(0, 1), final=st.floats(0, 1))
def test_a_warm_up_rises_to_one_and_then_falls(total: int, share: float, final: float) -> None:
    for rule in (warmup_cosine, warmup_linear):
        factors = [rule(count, total, warmup=share, final=final) for count in range(1, total + 1)]
        top = factors.index(max(factors))
        assert factors[: top + 1] == sorted(factors[: top + 1]) and factors[top:] == sorted(factors[top:], reverse=True)
        assert max(factors) == 1 and factors[0] > 0 and min(factors[top:]) >= min(final, 1) - 1e-12


def test_local_steps_alone_replace_the_epochs() -> None:
    client = from_dict({"client": {"local_steps": 7}}).client
    assert (client.local_steps, client.local_epochs) == (7, 0)
    client = from_dict({}).replace(**{"client.local_steps": 7}).client
    assert (client.local_steps, client.local_epochs) == (7, 0)


@pytest.mark.parametrize("client", [{"local_steps": 3, "local_epochs": 2}, {"local_epochs": 0}])
def test_steps_and_epochs_are_one_or_the_other(client: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="expected one of the two above 0"):
        from_dict({"client": client})


def test_smoothing_is_for_classes() -> None:
    with pytest.raises(ConfigError, match="task=regression, which has no labels to smooth"):
        from_dict({"task": "regression", "metrics": ["rmse"], "client": {"label_smoothing": 0.1}})
    with pytest.raises(ConfigError, match="task=regression, which has no softmax"):
        from_dict({"task": "regression", "metrics": ["rmse"], "client": {"temperature": 0.5}})


@hypothesis_settings(deadline=None, max_examples=200)
@given(
    samples=st.integers(1, 40),
    size=st.integers(1, 12),
    steps=st.integers(0, 15),
    join=st.booleans(),
    seed=st.integers(0, 9),
)
def test_the_plan_has_the_steps_that_were_promised(samples: int, size: int, steps: int, join: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    batching = Batching(batch_size=size, epochs=0 if steps else 3, steps=steps, join_last=join)
    plan = list(batching.schedule(samples, rng))
    assert sum(map(len, plan)) == batching.num_steps(samples) == (steps or 3 * len(plan[0]))
    for epoch in plan[:-1]:  # whole epochs see every sample once
        assert torch.equal(torch.cat(epoch).sort().values, torch.arange(samples))
    for index in (index for epoch in plan for index in epoch):
        assert 1 <= len(index) <= size + join
        assert not (join and len(index) == 1 < min(size, samples)), "a batch of one is left"


def test_without_joining_the_order_is_the_same() -> None:
    apart, joined = (batches(9, 4, np.random.default_rng(1), join_last=join) for join in (False, True))
    assert [len(index) for index in apart] == [4, 4, 1]
    assert torch.equal(torch.cat(apart), torch.cat(joined))


def normalized(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(*input_shape, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, num_outputs))


def test_torch_refuses_a_batch_of_one_with_batchnorm() -> None:
    """What the rule is for."""
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        normalized((64,), 10)(torch.zeros(1, 64))


@pytest.mark.parametrize(("samples", "size"), [(17, 16), (33, 16), (1, 16), (5, 1)])
def test_batchnorm_trains_on_any_number_of_samples(samples: int, size: int, tmp_path: Path) -> None:
    work = Workload(
        from_dict(
            {
                "model": {"name": f"{__name__}:normalized"},
                "partition": {"name": f"{__name__}:first", "num_clients": 1, "num_samples": samples},
                "server": {"cohort_size": 1},
                "client": {"batch_size": size},
            }
        )
    )
    start = tensors_of(work.make_model())
    after = train(work, tmp_path, partition=0).tensors
    assert all(torch.isfinite(tensor).all() for tensor in after.values())
    assert not torch.equal(after["3.weight"], start["3.weight"])
    moved = not torch.equal(after["1.running_mean"], start["1.running_mean"])
    assert moved == (min(samples, size) > 1)  # statistics of one sample are none


def first(train: Any, num_clients: int, rng: Any, *, num_samples: int) -> list[Any]:
    """The first samples for one client; the others are left out."""
    return [np.arange(num_samples)]


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.5, True)])
def test_unit_displacement_is_what_torch_does(momentum: float, nesterov: bool) -> None:
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([parameter], lr=0.3, momentum=momentum, nesterov=nesterov)
    for _ in range(5):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert unit_displacement(optimizer, 5) == pytest.approx(-parameter.item())


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_adams_first_step_is_lr_times_the_sign(name: str, tmp_path: Path) -> None:
    """m / (1 - beta1) = g and v / (1 - beta2) = g^2 after one step, so that it moves by lr g / |g| (eps aside)."""
    step = {"local_steps": 1, "batch_size": 8, "lr": 0.001, "weight_decay": 0.1}
    work = workload(**step, optimizer={"name": name})
    start = tensors_of(work.make_model())
    g = gradient(work, start, first_batch(work, 8))
    for tensor, after in train(work, tmp_path).tensors.items():
        coupled = g[tensor] + 0.1 * start[tensor] if name == "adam" else g[tensor]
        expected = start[tensor] * (1 - 0.001 * 0.1 * (name == "adamw")) - 0.001 * coupled.sign()
        clear = coupled.abs() > 1e-4  # where eps = 1e-8 is nothing
        assert clear.any()
        torch.testing.assert_close(after[clear], expected[clear], rtol=1e-4, atol=1e-6)


def test_adam_has_no_unit_displacement() -> None:
    assert unit_displacement(torch.optim.AdamW([nn.Parameter(torch.zeros(1))]), 3) is None


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_optimizers_are_torchs_made_with_the_same_settings(name: str) -> None:
    theirs = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    ours = plugins.build("optimizer", name, {}, parameters, 0.1, 0.01)
    own = {"momentum": 0.9} if name == "sgd" else {}
    assert type(ours) is theirs
    assert ours.state_dict() == theirs(parameters, lr=0.1, weight_decay=0.01, **own).state_dict()
    assert "add_param_group" not in vars(ours)


def test_a_run_does_not_import_torchs_compiler(tmp_path: Path) -> None:
    """It takes as long as importing torch."""
    adamw = {"strategy": {"name": "fedavg"}, "client": {"optimizer": {"name": "adamw"}}}
    code = (
        "import sys; from simulations import run\n"
        f"for changes in ({{}}, {adamw}): run({{'rounds': 2, 'results': {{'root': {str(tmp_path)!r}}}, **changes}})\n"
        "print({'torch._dynamo', 'sympy'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.needs("language")
def test_pieces_of_text_weigh_by_the_tokens_that_they_score() -> None:
    """Rows that score 1, 7 and 4 tokens: the mean over 12 is no mean of the rows' means."""
    config = from_dict(
        {
            "task": "language",
            "metrics": ["perplexity"],
            "data": {"name": "pytext", "block_length": 8},
            "partition": {"name": "iid", "num_clients": 2},
            "server": {"cohort_size": 1},
            "model": {"name": "gpt", "depth": 1, "width": 16, "num_heads": 2},
        }
    )
    gradients = []
    for micro_batch in (0, 1, 2):
        work = Workload(config).with_section("client", micro_batch=micro_batch)
        model = WorkingModel(work.make_model(), work.numerics)
        features, targets = work.samples_of(0).batch(torch.arange(3))
        targets = targets.clone()
        targets[0, 1:], targets[1, 7:], targets[2, 4:] = -100, -100, -100
        made = torch.optim.SGD(model.parameters.values(), lr=1.0)
        context = LocalContext(received={}, state={}, shared={}, unit_displacement=None, sizes={})
        loss = LocalStep(work, model, Objective(), context, made)(features, targets)
        assert loss.item() == pytest.approx(work.task.loss(work.make_model()(features), targets).item(), rel=1e-5)
        gradients.append([parameter.grad for parameter in model.parameters.values()])
    for piecewise in gradients[1:]:
        torch.testing.assert_close(piecewise, gradients[0], rtol=1e-4, atol=1e-6)
