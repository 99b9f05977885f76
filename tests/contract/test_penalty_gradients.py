"""Hand-written penalty gradients of objectives, on each path, against autograd in float64."""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from clients.cohort.context import CohortContext
from clients.cohort.loss import by_autograd, penalty_gradient
from clients.local_step import LocalStep
from clients.working_model import WorkingModel
from fedsign import plugins
from fedsign.config import from_dict
from fedsign.errors import ConfigError
from fedsign.objectives.base import LocalContext, Objective
from fedsign.objectives.feddyn import FedDynObjective
from fedsign.objectives.fedprox import FedProxObjective
from fedsign.objectives.fedsign import FedSignObjective
from fedsign.objectives.scaffold import ScaffoldObjective
from fedsign.records import ObjectiveSpec, Tensors
from fedsign.registry import KINDS
from fedsign.workload import Workload
from simulations import run
from strategies.fedavg import FedAvg
from tests.papers.local import local

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "your-own-strategy.md"
NUM_CLIENTS, SHAPES = 3, {"weight": (4, 6), "bias": (4,), "scale": ()}


class Elastic(Objective):
    """A user's: the push is the same for all clients, so on the cohort path it has no clients' axis."""

    def penalty(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensor | None:
        return torch.stack([(theta * context.received[name]).sum() for name, theta in parameters.items()]).sum()

    def penalty_gradient(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensors | None:
        return {name: context.received[name].clone() for name in parameters}


REGISTERED: dict[str, Objective] = {name: plugins.build("objective", name, {}) for name in KINDS["objective"].table}
OBJECTIVES = {name: objective for name, objective in REGISTERED.items() if objective.has_gradient} | {
    "fedsign tensor_mean": FedSignObjective(gamma=0.9, reduction="tensor_mean"),
    "fedsign mean": FedSignObjective(gamma=0.9, reduction="mean"),
    "a user's": Elastic(),
}


def drawn(seed: int, *, num: int | None = None) -> Tensors:
    random = torch.Generator().manual_seed(seed)
    first = () if num is None else (num,)
    return {
        name: torch.randn((*first, *shape), generator=random, dtype=torch.float64) for name, shape in SHAPES.items()
    }


def context_of(seed: int) -> LocalContext:
    """Every third element was received as 0, where FedSign has no term."""
    received = drawn(seed)
    received["weight"].flatten()[::3] = 0.0
    state = dict(reversed(drawn(seed + 1).items()))  # files have their own order
    return local(received, state=state, shared=drawn(seed + 2))


def given(objective: Objective, theta: Mapping[str, Tensor], context: LocalContext) -> Tensors:
    with torch.no_grad():
        found = objective.penalty_gradient(theta, context)
    assert found is not None and list(found) == list(theta)
    return found


def test_every_penalty_of_ours_gives_its_gradient() -> None:
    assert {name for name, each in REGISTERED.items() if each.has_penalty} == {
        name for name, each in REGISTERED.items() if each.has_gradient
    }
    assert {"fedprox", "feddyn", "fedsign", "scaffold"} <= OBJECTIVES.keys()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_is_autograds_of_the_penalty_in_new_tensors(name: str) -> None:
    objective, context = OBJECTIVES[name], context_of(1)
    theta = {key: tensor.requires_grad_() for key, tensor in drawn(0).items()}
    penalty = objective.penalty(theta, context)
    assert penalty is not None
    expected = torch.autograd.grad(penalty, list(theta.values()))
    for _ in range(2):  # what it gave may be written to
        for found, wanted in zip(given(objective, theta, context).values(), expected, strict=True):
            assert wanted.abs().max() > 1e-5
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-16)
            found.zero_()


@pytest.mark.parametrize("received_is_stacked", [False, True])
@pytest.mark.parametrize("shared", ["nothing", "one for all", "stacked"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_of_a_stack_is_each_clients(name: str, shared: str, received_is_stacked: bool) -> None:
    objective, theta = OBJECTIVES[name], drawn(0, num=NUM_CLIENTS)
    clients = [context_of(10 * place) for place in range(NUM_CLIENTS)]
    if not received_is_stacked:
        clients = [replace(each, received=clients[0].received) for each in clients]
    if shared != "stacked":
        clients = [replace(each, shared={} if shared == "nothing" else clients[0].shared) for each in clients]
    stack = CohortContext(
        received={key: torch.stack([each.received[key] for each in clients]) for key in SHAPES}
        if received_is_stacked
        else dict(clients[0].received),
        received_is_stacked=received_is_stacked,
        state={key: torch.stack([each.state[key] for each in clients]) for key in SHAPES},
        shared={key: torch.stack([each.shared[key] for each in clients]) for key in SHAPES}
        if shared == "stacked"
        else dict(clients[0].shared),
        shared_is_stacked=shared == "stacked",
        unit_displacement=[1.0, 2.0, 3.0],
        sizes=clients[0].sizes,
    )
    gradient = penalty_gradient(objective, theta, stack)
    assert gradient is not None
    found, mapped = gradient(), by_autograd(objective, theta, stack)
    assert found is not None
    for place, context in enumerate(clients):
        for key, wanted in given(objective, {key: theta[key][place] for key in theta}, context).items():
            torch.testing.assert_close(found[key][place], wanted, rtol=1e-14, atol=0)
            torch.testing.assert_close(mapped[key][place], wanted, rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_of_a_part_of_a_tensor_is_that_part_of_the_gradient(name: str) -> None:
    objective, theta, context = OBJECTIVES[name], drawn(0), context_of(1)
    whole = given(objective, theta, context)
    for some in (slice(0, 1), slice(1, None)):  # a rank may have nothing of a tensor

        def part(tensors: Mapping[str, Tensor], some: slice = some) -> Tensors:
            return {key: tensor.flatten()[some] for key, tensor in tensors.items()}

        mine = replace(context, received=part(context.received), state=part(context.state), shared=part(context.shared))
        for key, found in given(objective, part(theta), mine).items():
            torch.testing.assert_close(found, whole[key].flatten()[some], rtol=1e-14, atol=0)


class _Stronger(FedProxObjective):
    def penalty(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensor | None:
        term = super().penalty(parameters, context)
        return None if term is None else 2 * term


class _Gentle(_Stronger):
    def penalty_gradient(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensors | None:
        return {name: theta - context.received[name] for name, theta in parameters.items()}


def test_who_overrides_a_penalty_alone_does_not_inherit_the_others_gradient() -> None:
    assert _Stronger().has_penalty and not _Stronger().has_gradient
    assert _Gentle().has_gradient and not Objective().has_penalty


def agreement(theta: Tensor, received: Tensor) -> Tensor:
    """FedSign's Eq. 1 by element: sgp(theta_t) sigma(theta) + sgp(-theta_t) sigma(-theta), sgp(x) = 1 if x > 0 else
    0.
    """
    return (received > 0) / (1 + torch.exp(-theta)) + (received < 0) / (1 + torch.exp(theta))


WRITTEN: dict[str, tuple[Objective, Callable[[Tensors, LocalContext], Tensor]]] = {
    "fedprox": (
        FedProxObjective(mu=0.3),
        lambda theta, c: sum(0.3 / 2 * (theta[name] - c.received[name]).norm() ** 2 for name in theta),
    ),
    "feddyn": (
        FedDynObjective(alpha=0.3),
        lambda theta, c: sum(
            0.3 * ((theta[name] * c.state[name]).sum() + (theta[name] - c.received[name]).norm() ** 2 / 2)
            for name in theta
        ),
    ),
    "scaffold": (
        ScaffoldObjective(),
        lambda theta, c: sum((theta[name] * (c.shared[name] - c.state[name])).sum() for name in theta),
    ),
    "fedsign": (
        FedSignObjective(gamma=0.1),
        lambda theta, c: sum(-0.1 * agreement(theta[name], c.received[name]).sum() for name in theta),
    ),
    "fedsign tensor_mean": (
        FedSignObjective(gamma=100, reduction="tensor_mean"),
        lambda theta, c: sum(-100 / 6 * agreement(theta[name], c.received[name]).mean() for name in theta),
    ),
    "fedsign mean": (
        FedSignObjective(gamma=1000, reduction="mean"),
        lambda theta, c: sum(-1000 / 2778 * agreement(theta[name], c.received[name]).sum() for name in theta),
    ),
}  # fmt: skip


@pytest.mark.parametrize("micro_batch", [0, 5])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_local_step_takes_the_gradient_of_the_written_objective(name: str, micro_batch: int) -> None:
    """In float32, to 1e-6 of autograd's gradient in float64 of the loss as written in the paper; the MLP has 2778
    parameters.
    """
    objective, written = WRITTEN[name]
    work = Workload(from_dict({"model": {"hidden": [32, 16]}, "client": {"micro_batch": micro_batch}}))
    model = WorkingModel(work.make_model(), work.numerics)
    features, targets = work.dataset.train.batch(torch.arange(12))

    def drawn_like(seed: int) -> Tensors:
        random = torch.Generator().manual_seed(seed)
        return {key: 0.3 * torch.randn(each.shape, generator=random) for key, each in model.parameters.items()}

    received = drawn_like(1)
    for tensor in received.values():
        tensor.flatten()[::3] = 0.0
    context = local(received, state=drawn_like(2), shared=drawn_like(3))
    assert context.num_elements == 2778

    def step(objective: Objective) -> Tensors:
        optimizer = torch.optim.SGD(model.parameters.values(), lr=0.0)
        LocalStep(work, model, objective, context, optimizer)(features, targets)
        return {key: each.grad.clone() for key, each in model.parameters.items() if each.grad is not None}

    found, plain = step(objective), step(Objective())
    doubles = {
        of: {key: tensor.double() for key, tensor in getattr(context, of).items()}
        for of in ("received", "state", "shared")
    }
    theta = {key: each.detach().double().requires_grad_() for key, each in model.parameters.items()}
    loss = work.task.loss(functional_call(model.module, theta, (features.double(),)), targets)
    loss = loss + written(theta, replace(context, **doubles))
    for key, wanted in zip(theta, torch.autograd.grad(loss, [*theta.values()]), strict=True):
        assert (wanted - plain[key]).norm() > 0.05 * plain[key].norm()
        assert (found[key] - wanted).norm() <= 1e-6 * wanted.norm()
        if isinstance(objective, FedSignObjective):  # no term where the received value is 0
            assert torch.equal(found[key].flatten()[::3], plain[key].flatten()[::3])


def test_the_how_tos_objective_passes_the_how_tos_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, check, _ = re.findall(r"```python\n(.*?)```", HOW_TO.read_text(encoding="utf-8"), flags=re.DOTALL)
    (tmp_path / "anchored.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "anchored", raising=False)
    exec(check, {})
    with pytest.raises(AssertionError, match="not close"):
        exec(check.replace("objective.penalty_gradient(", "AnchorLoss().penalty_gradient("), {})
    monkeypatch.delitem(sys.modules, "anchored")


class Doubled(Elastic):
    """Wrong by a factor of 2."""

    def penalty(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensor | None:
        return super().penalty(parameters, context)

    def penalty_gradient(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensors | None:
        return {name: 2 * context.received[name] for name in parameters}


class HandsOutReceived(Elastic):
    """Gives tensors that are not its own, which a trainer would write to."""

    def penalty(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensor | None:
        return super().penalty(parameters, context)

    def penalty_gradient(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensors | None:
        return {name: context.received[name] for name in parameters}


class Asks(FedAvg):
    def __init__(self, *, objective: str) -> None:
        super().__init__()
        self.named = objective

    def objective(self, round: int) -> ObjectiveSpec:
        return ObjectiveSpec(name=f"{__name__}:{self.named}")


@pytest.mark.parametrize("path", ["sequential", pytest.param("auto", marks=pytest.mark.needs("cohort"))])
@pytest.mark.parametrize(
    ("objective", "said"),
    [
        ("Elastic", None),
        (
            "Doubled",
            r"penalty_gradient of objective '.*:Doubled' gave .* for an element of '0?.*weight', autograd of penalty",
        ),
        ("HandsOutReceived", "penalty_gradient of objective '.*:HandsOutReceived' gave 0 for an element"),
    ],
)
def test_a_gradient_that_is_not_the_penaltys_is_refused_before_the_run(
    objective: str, said: str | None, path: str, tiny: dict[str, Any]
) -> None:
    tree = {
        **tiny,
        "strategy": {"name": f"{__name__}:Asks", "objective": objective},
        "client": {"path": path, "lr": 1e-3},
    }
    if said is None:
        assert len(run(tree).rounds) == 2
    else:
        with pytest.raises(ConfigError, match=said):
            run(tree)
