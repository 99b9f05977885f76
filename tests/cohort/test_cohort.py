"""The cohort path against its specification: stacked clients equal the same clients in sequence.

Differences are rounding: at most 1e-5 of a tensor's norm in float32, 1e-10 in float64.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

from clients.batches import Batching
from clients.cohort.chain import chain_layers
from clients.cohort.context import CohortContext
from clients.cohort.loss import CohortLoss
from clients.cohort.modules import CohortModel
from clients.cohort.paths import chunk_of, on_path
from clients.cohort.plan import CohortBatch, cohort_plan
from clients.cohort.trainer import CohortTrainer
from clients.state.store import ClientStore
from clients.trainer import LocalTrainer, SequentialTrainer, check_training
from fedsign.config import from_dict
from fedsign.data.base import Dataset, Samples
from fedsign.errors import ConfigError
from fedsign.objectives.base import LocalContext, Objective, Representation
from fedsign.objectives.moon import MoonObjective
from fedsign.records import Failure, ObjectiveSpec, Tensors, TrainReply, TrainRequest, one_by_one, tensors_of
from fedsign.tasks.classification import Classification
from fedsign.workload import Workload
from simulations import load_run, run

HERE = __name__
NUM_CLIENTS = 5
DTYPES = {"float32": (torch.float32, 1e-5), "float64": (torch.float64, 1e-10)}

OBJECTIVES: dict[str, ObjectiveSpec] = {
    "plain": ObjectiveSpec(),
    "fedprox": ObjectiveSpec(name="fedprox", settings={"mu": 0.5}),
    "feddyn": ObjectiveSpec(name="feddyn", settings={"alpha": 0.3}),
    "fedsign": ObjectiveSpec(name="fedsign", settings={"gamma": 0.01}),
    "fedsign-tensor-mean": ObjectiveSpec(name="fedsign", settings={"gamma": 1.0, "reduction": "tensor_mean"}),
    "fedsign-mean": ObjectiveSpec(name="fedsign", settings={"gamma": 1.0, "reduction": "mean"}),
    "moon": ObjectiveSpec(name="moon", settings={"mu": 2.0}),
    "scaffold": ObjectiveSpec(name="scaffold"),
    "the user's": ObjectiveSpec(name=f"{HERE}:Ridge"),
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": {"momentum": 0.0}},
    "momentum": {"optimizer": {"momentum": 0.9}, "weight_decay": 0.01},
    "nesterov": {"optimizer": {"momentum": 0.8, "nesterov": True}, "weight_decay": 0.01},
    "adamw": {"optimizer": {"name": "adamw"}, "weight_decay": 0.1, "lr": 0.01},
    "adam": {"optimizer": {"name": f"{HERE}:adam"}, "weight_decay": 0.1, "lr": 0.01},
}
MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"name": "mlp", "hidden": [12, 8]},
    "linear": {"name": "linear"},
    "mapped": {"name": f"{HERE}:normed"},
}


class Ridge(Objective):
    """Half the squared norm, whose gradient is theta, and how far the optimizer would go."""

    def penalty(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensor | None:
        far = context.unit_displacement
        strength = 0.1 if far is None else 0.1 * far
        return strength * torch.stack([theta.square().sum() for theta in parameters.values()]).sum() / 2


class Pulled(Objective):
    """A pull to where the client ended before, with its gradient; who asks for what is written down."""

    has_state = True
    asked: ClassVar[list[str]] = []

    def penalty(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensor | None:
        self.asked.append("penalty")
        return torch.stack([(theta - context.state[name]).square().sum() for name, theta in parameters.items()]).sum()

    def penalty_gradient(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensors | None:
        self.asked.append("gradient")
        return {name: 2 * (theta - context.state[name]) for name, theta in parameters.items()}

    def initial_state(self, received: Mapping[str, Tensor]) -> Tensors:
        return {name: theta.clone() for name, theta in received.items()}


class PulledToZero(Objective):
    """The norm's, of which a stack of clients has one for each."""

    def penalty(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensor | None:
        return torch.stack([theta.norm() for theta in parameters.values()]).sum()

    def penalty_gradient(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensors | None:
        return {name: theta / theta.norm() for name, theta in parameters.items()}


class HandsOut(Objective):
    """Gives the parameters themselves, which a trainer would write to."""

    def penalty(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensor | None:
        return torch.stack([theta.square().sum() for theta in parameters.values()]).sum() / 2

    def penalty_gradient(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensors | None:
        return dict(parameters)


def adam(parameters: Any, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=lr, weight_decay=weight_decay)


class Normed(nn.Module):
    """No chain of layers: it has to be mapped."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(num_inputs, 12), nn.LayerNorm(12)
        self.classifier = nn.Linear(12, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.classifier(hidden + torch.tanh(self.norm(hidden)))


def normed(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return Normed(input_shape[0], num_outputs)


def workload(
    dtype: torch.dtype = torch.float32, *, model: Mapping[str, Any] = MODELS["mlp"], **client: Any
) -> Workload:
    """Five clients that share 150 of the digits, 9 each at least."""
    config = from_dict(
        {
            "partition": {
                "name": "dirichlet_prefix",
                "num_clients": NUM_CLIENTS,
                "alpha": 0.5,
                "min_partition_size": 9,
            },
            "server": {"cohort_size": NUM_CLIENTS},
            "model": dict(model),
            "client": {"local_epochs": 2, "batch_size": 16, "lr": 0.05, **client},
        }
    )
    work = OfType(config)
    work.__dict__.update(dataset=few_digits(dtype), dtype=dtype)
    return work


@functools.cache
def few_digits(dtype: torch.dtype) -> Dataset:
    digits = Workload(from_dict({})).dataset
    assert isinstance(digits.train, Samples)
    few = replace(digits.train, features=digits.train.features[:150].to(dtype), targets=digits.train.targets[:150])
    return replace(digits, train=few)


class OfType(Workload):
    """A workload whose models have the type of its data."""

    _feature_type = torch.float32  # of a model as it is made

    def make_model(self) -> nn.Module:
        return super().make_model().to(self.__dict__.get("dtype", torch.float32))


def requests(
    work: Workload, objective: ObjectiveSpec, *, round: int = 1, start: Tensors | None = None, **changes: Any
) -> list[TrainRequest]:
    tensors = start or tensors_of(work.make_model())
    version = round - 1 if changes.pop("has_state", False) else 0
    return [
        TrainRequest(
            round=round, partition=partition, tensors=tensors, objective=objective, state_version=version,
            needed_versions=frozenset({version}), **changes,
        )
        for partition in range(NUM_CLIENTS)
    ]  # fmt: skip


def trained(trainer: LocalTrainer, asked: Sequence[TrainRequest], folder: Path) -> dict[int, TrainReply]:
    replies = {}
    for reply in one_by_one(trainer.train_many(asked, ClientStore(folder))):
        assert isinstance(reply, TrainReply), getattr(reply, "details", "")
        replies[reply.partition] = reply
    assert sorted(replies) == sorted(request.partition for request in asked)
    return replies


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert (found[name].double() - tensor.double()).norm() <= tolerance * tensor.double().norm(), name


def both_paths(
    work: Workload, objective: ObjectiveSpec, folder: Path, tolerance: float, *, chunk: int = 3
) -> dict[int, TrainReply]:
    """Two rounds on either path, the second from the first's states; returns the second's replies of the cohort."""
    sequential, cohort = SequentialTrainer(work), CohortTrainer(work, chunk=chunk)
    asked = requests(work, objective)
    found: dict[int, TrainReply] = {}
    for _ in (1, 2):
        expected = trained(sequential, asked, folder / "sequential")
        found = trained(cohort, asked, folder / "cohort")
        for partition, reply in expected.items():
            other = found[partition]
            assert_close(other.tensors, reply.tensors, tolerance)
            assert_close(other.extra, reply.extra, 10 * tolerance)  # a difference of models, so it has lost a digit
            loss = pytest.approx(
                reply.metrics["train-loss"], rel=1e-5
            )  # it is summed up in float32, whatever the model
            assert other.metrics["train-loss"] == loss
            facts = ("round", "partition", "roles", "num_examples", "has_state")
            assert [getattr(other, fact) for fact in facts] == [getattr(reply, fact) for fact in facts]
        stored = [sorted(path.relative_to(folder / each) for path in (folder / each).rglob("*.safetensors"))
                  for each in ("sequential", "cohort")]  # fmt: skip
        assert stored[0] == stored[1]
        start = expected[0].tensors
        shared = {name: tensor.sign() * 1e-3 for name, tensor in start.items()} if objective.name == "scaffold" else {}
        asked = requests(work, objective, round=2, start=start, shared=shared, has_state=expected[0].has_state)
    return found


# SCAFFOLD refuses optimizers that rescale gradients.  float32 is not repeated for every model.
TABLE = [
    (dtype, objective, optimizer, model)
    for dtype in DTYPES
    for objective in OBJECTIVES
    for optimizer in OPTIMIZERS
    for model in MODELS
    if not (objective == "scaffold" and optimizer.startswith("adam")) and (dtype == "float64" or model == "mlp")
]


@pytest.mark.parametrize(("dtype", "objective", "optimizer", "model"), TABLE)
def test_a_stack_gives_what_one_client_after_another_gives(
    dtype: str, objective: str, optimizer: str, model: str, tmp_path: Path
) -> None:
    type_, tolerance = DTYPES[dtype]
    work = workload(type_, model=MODELS[model], **OPTIMIZERS[optimizer])
    both_paths(work, OBJECTIVES[objective], tmp_path, tolerance)


def test_a_users_gradient_is_asked_for_once_a_step_and_its_penalty_is_never_differentiated(tmp_path: Path) -> None:
    work, spec = workload(torch.float64), ObjectiveSpec(name=f"{HERE}:Pulled")
    both_paths(work, spec, tmp_path, 1e-10)
    Pulled.asked.clear()
    trained(CohortTrainer(work, chunk=NUM_CLIENTS), requests(work, spec), tmp_path / "once")
    most_steps = max(2 * -(-len(index) // 16) for index in work.partition)
    assert most_steps > 2 and Pulled.asked == ["gradient"] * most_steps


def test_the_table_is_not_vacuous(tmp_path: Path) -> None:
    """Clients differ in numbers of steps and in last batches; every objective and optimizer gives a different
    result.
    """
    work = workload()
    sizes = [len(index) for index in work.partition]
    assert len({-(-size // 16) for size in sizes}) > 2 and len({size % 16 for size in sizes}) > 2 and min(sizes) < 16
    results = []
    for objective in OBJECTIVES.values():
        results.append(both_paths(work, objective, tmp_path / str(len(results)), 1e-5)[1].tensors)
    for changes in OPTIMIZERS.values():
        results.append(both_paths(workload(**changes), ObjectiveSpec(), tmp_path / str(len(results)), 1e-5)[1].tensors)
    for index, one in enumerate(results):
        for other in results[:index]:
            assert any((one[name] - other[name]).norm() > 1e-4 * one[name].norm() for name in one)
    assert chain_layers(work.make_model()) is not None
    assert chain_layers(workload(model=MODELS["mapped"]).make_model()) is None


@pytest.mark.parametrize(
    "settings",
    [
        {"clip_norm": 0.3},
        {"label_smoothing": 0.2},
        {"temperature": 0.5},
        {"local_epochs": 0, "local_steps": 7},
        {"local_epochs": 0, "local_steps": 1, "batch_size": 1},
        {"batch_size": 1},
        {"batch_size": 10_000},
        {"schedule": {"name": "exponential", "factor": 0.5}},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_setting_of_the_clients_training_is_kept(dtype: str, settings: dict[str, Any], tmp_path: Path) -> None:
    type_, tolerance = DTYPES[dtype]
    work = workload(type_, **settings)
    largest = max(range(NUM_CLIENTS), key=lambda partition: len(work.partition[partition]))
    changed = both_paths(work, OBJECTIVES["fedprox"], tmp_path / "with", tolerance)[largest].tensors
    default = both_paths(workload(type_), OBJECTIVES["fedprox"], tmp_path / "without", tolerance)[largest].tensors
    assert any((changed[name] - default[name]).norm() > 1e-4 * default[name].norm() for name in default)


def test_results_do_not_depend_on_the_chunk(tmp_path: Path) -> None:
    work = workload(torch.float64)
    asked = requests(work, OBJECTIVES["feddyn"])
    one, *others = [trained(CohortTrainer(work, chunk=chunk), asked, tmp_path / str(chunk)) for chunk in (1, 2, 5, 100)]
    for other in others:
        for partition, reply in one.items():
            assert_close(other[partition].tensors, reply.tensors, 1e-12)


def test_requests_of_several_rounds_objectives_and_models_are_answered_as_asked(tmp_path: Path) -> None:
    work = workload(torch.float64)
    start = tensors_of(work.make_model())
    far = {name: tensor + 0.1 for name, tensor in start.items()}
    asked = [
        requests(work, ObjectiveSpec(), start=start)[0],
        requests(work, OBJECTIVES["fedprox"], start=start)[1],
        requests(work, ObjectiveSpec(), start=far)[2],
        requests(work, ObjectiveSpec(), round=2, start=start)[3],
        requests(work, OBJECTIVES["scaffold"], start=far, shared=far)[4],
        requests(work, OBJECTIVES["scaffold"], start=far, shared=start)[0],
    ][:5]
    expected = trained(SequentialTrainer(work), asked, tmp_path / "sequential")
    found = trained(CohortTrainer(work, chunk=5), asked, tmp_path / "cohort")
    for partition, reply in expected.items():
        assert_close(found[partition].tensors, reply.tensors, 1e-10)


@given(st.data())
@hypothesis_settings(max_examples=100, deadline=None)
def test_a_plan_holds_the_batches_of_the_schedule_and_padding_weighs_nothing(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    batch_size = data.draw(st.integers(1, 50))
    steps = data.draw(st.integers(0, 9))
    epochs = 0 if steps else data.draw(st.integers(1, 3))
    starts = np.cumsum([0, *sizes])
    indices = [np.arange(start, start + size) for start, size in zip(starts, sizes, strict=False)]
    join_last = data.draw(st.booleans())
    rngs = [np.random.default_rng(client) for client in range(len(sizes))]
    batching = Batching(batch_size=batch_size, epochs=epochs, steps=steps, join_last=join_last)
    plan = cohort_plan(indices, rngs, batching)
    assert sorted(plan.order) == list(range(len(sizes)))
    for place, client in enumerate(plan.order):
        rng = np.random.default_rng(client)
        plans = list(batching.schedule(sizes[client], rng))
        expected = [indices[client][batch.numpy()].tolist() for epoch in plans for batch in epoch]
        for step, batch in enumerate(expected):
            is_true = plan.weights[step, place] > 0
            assert place < plan.active[step]
            assert plan.samples[step, place][is_true].tolist() == batch
            assert plan.lengths[step, place] == len(batch)
            assert set(plan.samples[step, place].tolist()) == set(batch)  # padding is the batch's own
            assert torch.allclose(plan.weights[step, place][is_true], torch.tensor(1 / len(batch)).double())
        assert all(place >= active for active in plan.active[len(expected) :])
        last = [len(batch) for batch in plans[-1]]
        counted = plan.loss_weights[len(expected) - len(last) : len(expected), place].tolist()
        assert counted == pytest.approx([length / sum(last) for length in last])
        assert plan.loss_weights[:, place].sum() == pytest.approx(1)


@pytest.mark.parametrize("objective", ["plain", "moon"])
@pytest.mark.parametrize("model", MODELS)
def test_padded_samples_contribute_nothing_to_loss_and_gradient(model: str, objective: str) -> None:
    """Whatever stands in the padding: the same loss, the same gradient as the true samples alone."""
    work = workload(torch.float64, model=MODELS[model])
    network, task = work.make_model(), Classification()
    part = MoonObjective() if objective == "moon" else Objective()
    loss = CohortLoss(CohortModel(network), task, part, chain_layers(network))
    received = {name: parameter.detach() for name, parameter in network.named_parameters()}
    away = {name: torch.stack([tensor + 0.05, tensor * 0.9]) for name, tensor in received.items()}
    context = CohortContext(
        received=received, received_is_stacked=False, state={name: 1.1 * tensor for name, tensor in away.items()},
        shared={}, shared_is_stacked=False, unit_displacement=None, sizes={},
    )  # fmt: skip
    features, targets = work.dataset.train.batch(torch.arange(10))
    features, targets = features.view(2, 5, -1), targets.view(2, 5)
    weights = torch.tensor([[1 / 3] * 3 + [0.0] * 2, [0.2] * 5], dtype=torch.float64)

    def gradients(features: Tensor, targets: Tensor) -> tuple[Tensor, list[Tensor]]:
        theta = {name: tensor.clone().requires_grad_() for name, tensor in away.items()}
        total, losses = loss(theta, CohortBatch(features, targets, weights), context)
        return (losses * weights).sum(1), list(torch.autograd.grad(total, list(theta.values())))

    losses, found = gradients(features, targets)
    other_features, other_targets = features.clone(), targets.clone()
    other_features[0, 3:] = 100.0
    other_targets[0, 3:] = 7
    again, others = gradients(other_features, other_targets)
    assert torch.equal(losses, again) and all(torch.equal(a, b) for a, b in zip(found, others, strict=True))
    # and in closed form: what autograd gives for the three true samples
    theta = {name: tensor[0].clone().requires_grad_() for name, tensor in away.items()}
    true = task.loss(functional_call(network, theta, (features[0, :3],)), targets[0, :3])
    assert losses[0].item() == pytest.approx(true.item(), rel=1e-12)
    if objective == "plain":
        for one, expected in zip(found, torch.autograd.grad(true, list(theta.values())), strict=True):
            torch.testing.assert_close(one[0], expected, rtol=1e-10, atol=1e-12)


def test_a_client_that_is_done_does_not_move(tmp_path: Path) -> None:
    """Bit for bit what it is when it is trained alone, with momentum and weight decay, beside one that goes on."""
    work = workload(torch.float64, **OPTIMIZERS["momentum"])
    sizes = [len(index) for index in work.partition]
    short, long = sizes.index(min(sizes)), sizes.index(max(sizes))
    assert 3 * min(sizes) < max(sizes)
    asked = requests(work, ObjectiveSpec())
    alone = trained(CohortTrainer(work, chunk=1), [asked[short]], tmp_path)[short]
    beside = trained(CohortTrainer(work, chunk=2), [asked[short], asked[long]], tmp_path)[short]
    assert_close(beside.tensors, alone.tensors, 1e-14)


def results_of(trainer: LocalTrainer, asked: Sequence[TrainRequest], folder: Path) -> dict[int, TrainReply | Failure]:
    return {result.partition: result for result in one_by_one(trainer.train_many(asked, ClientStore(folder)))}


def test_a_client_without_its_state_is_the_only_failure(tmp_path: Path) -> None:
    work = workload()
    spec = OBJECTIVES["feddyn"]
    asked = [
        replace(request, state_version=3 if request.partition == 2 else 0, round=4) for request in requests(work, spec)
    ]
    for trainer in (SequentialTrainer(work), CohortTrainer(work, chunk=5)):
        folder = tmp_path / type(trainer).__name__
        results = results_of(trainer, asked, folder)
        failed = {partition for partition, result in results.items() if isinstance(result, Failure)}
        assert failed == {2} and set(results) == set(range(NUM_CLIENTS))
        failure = results[2]
        assert isinstance(failure, Failure) and "the state of partition 2 after round 3 is not in" in failure.reason
        assert not list((folder / "000002").glob("*.safetensors")) and list((folder / "000001").glob("*.safetensors"))


def test_a_client_whose_part_of_the_stack_cannot_be_made_is_the_only_failure(tmp_path: Path) -> None:
    """Its state on disk has other shapes than the model."""
    work = workload(torch.float64)
    spec = OBJECTIVES["feddyn"]
    store = ClientStore(tmp_path)
    start = tensors_of(work.make_model())
    for partition in range(NUM_CLIENTS):
        extra = (1, 7) if partition == 3 else ()
        store.save(partition, 1, {name: torch.zeros(*tensor.shape, *extra) for name, tensor in start.items()})
    asked = requests(work, spec, round=2, start=start, has_state=True)
    results = results_of(CohortTrainer(work, chunk=5), asked, tmp_path)
    assert {partition for partition, result in results.items() if isinstance(result, Failure)} == {3}


def test_a_client_that_diverges_spoils_its_own_model_only(tmp_path: Path) -> None:
    work = workload()
    train = work.dataset.train
    assert isinstance(train, Samples)
    features = train.features.clone()
    features[work.partition[1][0]] = float("nan")
    work.__dict__["dataset"] = replace(work.dataset, train=replace(train, features=features))
    asked = requests(work, ObjectiveSpec())
    expected = trained(SequentialTrainer(work), asked, tmp_path)
    found = trained(CohortTrainer(work, chunk=5), asked, tmp_path)
    for partition, reply in expected.items():
        if partition == 1:
            for each in (reply, found[1]):
                assert not torch.isfinite(each.tensors["0.weight"]).any() and np.isnan(each.metrics["train-loss"])
        else:
            assert_close(found[partition].tensors, reply.tensors, 1e-5)


def test_an_objective_that_cannot_be_made_fails_every_client_that_was_asked_for_it(tmp_path: Path) -> None:
    work = workload()
    bad, good = requests(work, ObjectiveSpec(name="no_such_objective"))[:2], requests(work, ObjectiveSpec())[2:]
    results = results_of(CohortTrainer(work, chunk=5), [*bad, *good], tmp_path)
    assert {partition for partition, result in results.items() if isinstance(result, Failure)} == {0, 1}
    failure = results[1]
    assert isinstance(failure, Failure) and "no_such_objective" in failure.reason and "Traceback" in failure.details


# The rule


class Counting(nn.Module):
    """A buffer that no rule of ours knows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return x


class OwnNorm(nn.BatchNorm1d):
    pass


class FunctionalDropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, self.training)


def with_alpha_dropout(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return nn.Sequential(nn.AlphaDropout(0.5), nn.Linear(*input_shape, num_outputs))


def with_functional_dropout(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return nn.Sequential(FunctionalDropout(), nn.Linear(*input_shape, num_outputs))


def with_counter(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return nn.Sequential(Counting(), nn.Linear(*input_shape, num_outputs))


def with_own_norm(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return nn.Sequential(OwnNorm(*input_shape), nn.Linear(*input_shape, num_outputs))


def with_frozen(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(*input_shape, 8).requires_grad_(False), nn.Linear(8, num_outputs))


def with_shared_weights(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    inner = nn.Linear(*input_shape, *input_shape)
    return nn.Sequential(inner, nn.ReLU(), inner, nn.Linear(*input_shape, num_outputs))


class Centered(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def centered(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return nn.Sequential(Centered(), nn.Linear(*input_shape, num_outputs))


class ByValue(Objective):
    """Branches on a number: there is no one answer for a stack."""

    def penalty(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensor | None:
        norm = torch.stack([theta.norm() for theta in parameters.values()]).sum()
        return norm if norm.item() > 1 else None


class Contrasting(Objective):
    contrasts = True

    def contrast(self, z: Representation, context: LocalContext) -> Tensor | None:
        return z.present.std()


class MeanOnly:
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets)


def rmsprop(parameters: Any, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=lr, weight_decay=weight_decay)


REFUSED: dict[str, tuple[dict[str, Any], ObjectiveSpec, str]] = {
    "alpha dropout": ({"model": {"name": f"{HERE}:with_alpha_dropout"}}, ObjectiveSpec(), "cannot be repeated"),
    "hidden dropout": (
        {"model": {"name": f"{HERE}:with_functional_dropout"}},
        ObjectiveSpec(),
        "depends on the other samples",
    ),
    "own buffer": ({"model": {"name": f"{HERE}:with_counter"}}, ObjectiveSpec(), "changes the buffer '0.seen'"),
    "own batch norm": (
        {"model": {"name": f"{HERE}:with_own_norm"}},
        ObjectiveSpec(),
        "a BatchNorm of a kind of its own",
    ),
    "frozen weights": ({"model": {"name": f"{HERE}:with_frozen"}}, ObjectiveSpec(), "'0.weight' is not trained"),
    "shared weights": ({"model": {"name": f"{HERE}:with_shared_weights"}}, ObjectiveSpec(), "two layers share"),
    "mixed samples": ({"model": {"name": f"{HERE}:centered"}}, ObjectiveSpec(), "depends on the other samples"),
    "optimizer": ({"client": {"optimizer": {"name": f"{HERE}:rmsprop"}}}, ObjectiveSpec(), "none of torch's SGD"),
    "task": ({"task": f"{HERE}:MeanOnly"}, ObjectiveSpec(), "cannot be stacked"),
    "branch": ({}, ObjectiveSpec(name=f"{HERE}:ByValue"), "two stacked clients raises"),
    "norm": ({}, ObjectiveSpec(name=f"{HERE}:PulledToZero"), "not the gradient of its penalty for each client"),
    "no new tensors": ({}, ObjectiveSpec(name=f"{HERE}:HandsOut"), "not the gradient of its penalty for each client"),
    "contrast": ({}, ObjectiveSpec(name=f"{HERE}:Contrasting"), "contrast_is_mean"),
}


@pytest.mark.parametrize("row", REFUSED)
def test_what_a_stack_cannot_do_exactly_is_refused_in_a_sentence_and_sequential_by_itself(row: str) -> None:
    changes, spec, why = REFUSED[row]
    config = from_dict({"partition": {"num_clients": 6}, "server": {"cohort_size": 3}, **changes})
    cohort = Workload(config).with_section("client", path="cohort")
    with pytest.raises(ConfigError, match=f"^client.path=cohort was given, but .*{re.escape(why)}.*; use client.path="):
        check_training(cohort, spec)
    decided = on_path(Workload(config).with_section("client", path="auto"), spec)
    assert (decided.config.client.path, decided.config.client.chunk) == ("sequential", 0)


class Elsewhere:
    """An engine that does not say that clients train in this process."""


@pytest.mark.parametrize(
    ("changes", "spec", "path"),
    [
        ({}, ObjectiveSpec(), "cohort"),
        ({"model": {"name": "linear"}}, ObjectiveSpec(name="feddyn"), "cohort"),
        ({"model": {"name": "mlp", "hidden": [1000, 1000]}}, ObjectiveSpec(), "sequential"),
        ({"model": {"name": f"{HERE}:normed"}}, ObjectiveSpec(), "sequential"),
        ({}, ObjectiveSpec(name=f"{HERE}:Ridge"), "sequential"),
        ({}, ObjectiveSpec(name=f"{HERE}:Pulled"), "cohort"),
    ],
    ids=["mlp", "linear", "large", "not a chain", "the user's objective", "the user's with its gradient"],
)
def test_auto_is_decided_by_the_experiment_alone(changes: dict[str, Any], spec: ObjectiveSpec, path: str) -> None:
    given = Workload(from_dict({"partition": {"num_clients": 6}, "server": {"cohort_size": 3}, **changes}))
    decided = on_path(given.with_section("client", path="auto"), spec).config.client
    assert (decided.path, decided.chunk) == (path, 3 if path == "cohort" else 0)
    assert on_path(given.with_section("client", path="cohort"), spec).config.client.path == "cohort"
    elsewhere = Workload(given.config.replace(**{"engine.name": f"{HERE}:Elsewhere"}))
    assert on_path(elsewhere.with_section("client", path="auto"), spec).config.client.path == "sequential"
    with pytest.raises(ConfigError, match=r"client.path=cohort was given, but engine.name=.*Elsewhere gives each"):
        check_training(elsewhere.with_section("client", path="cohort"), spec)


def test_a_chunk_takes_no_more_than_its_share_of_memory() -> None:
    """Eight copies of a model of 8 MB and a little, in 256 MiB: four clients or less."""
    large = {"model": {"name": "mlp", "hidden": [1000, 1000]}, "server": {"cohort_size": 20}}
    chunk = chunk_of(Workload(from_dict(large)))
    num_parameters = 64 * 1000 + 1000 + 1000 * 1000 + 1000 + 1000 * 10 + 10
    assert chunk == 256 * 2**20 // (8 * 4 * num_parameters + 2 * 4 * 16 * (64 + 4 * 1000 + 10))
    assert 1 < chunk < 20


SMALL: dict[str, Any] = {
    "rounds": 4, "callbacks": [], "strategy": {"name": "feddyn"}, "partition": {"num_clients": 6, "alpha": 1.0},
    "server": {"cohort_size": 4}, "client": {"path": "auto"},
}  # fmt: skip


def test_the_path_is_written_into_the_run_and_kept_on_resume(tmp_path: Path) -> None:
    done = run({**SMALL, "rounds": 2, "results": {"root": str(tmp_path)}})
    assert (load_run(done.path).config.client.path, load_run(done.path).config.client.chunk) == ("cohort", 4)
    longer = run(from_dict({**SMALL, "results": {"root": str(tmp_path)}}), resume=done.path)
    assert (longer.config.client.path, longer.config.client.chunk) == ("cohort", 4)
    straight = run({**SMALL, "results": {"root": str(tmp_path)}})
    assert longer.rounds == straight.rounds  # the same bits, killed or not


def test_a_run_from_before_there_were_paths_goes_on_sequentially(tmp_path: Path) -> None:
    begun = run({**SMALL, "rounds": 2, "client": {"path": "sequential"}, "results": {"root": str(tmp_path)}})
    config = begun.path / "config.toml"
    without = re.sub(r"^(path|chunk|# digest:) .*\n", "", config.read_text(encoding="utf-8"), flags=re.MULTILINE)
    config.write_text(without, encoding="utf-8")
    resumed = run({"rounds": 4}, resume=begun.path)
    assert resumed.config.client.path == "sequential"
    straight = run({**SMALL, "client": {"path": "sequential"}, "results": {"root": str(tmp_path)}})
    assert resumed.rounds == straight.rounds


def test_a_whole_run_of_stacks_is_the_sequential_run_to_rounding(tmp_path: Path) -> None:
    lines = []
    for path in ("sequential", "cohort"):
        done = run({**SMALL, "client": {"path": path}, "results": {"root": str(tmp_path / path)}})
        lines.append(done.rounds[-1])
    assert lines[0]["loss"] == pytest.approx(lines[1]["loss"], rel=1e-4)
    assert lines[0]["clients"] == lines[1]["clients"] and lines[0]["accuracy"] == lines[1]["accuracy"]
