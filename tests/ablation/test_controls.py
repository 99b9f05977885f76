"""Parts of regularizers against closed forms and finite differences, and the norms that a control is held at."""

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clients.cohort.context import CohortContext, cohort_context
from clients.cohort.loss import CohortLoss, penalty_gradient
from clients.cohort.modules import CohortModel
from clients.cohort.plan import CohortBatch
from fedsign.ablation.moon_part import MoonPart
from fedsign.ablation.sign_push import SignPush
from fedsign.errors import ConfigError, RoundError
from fedsign.models.features import forward_with_features
from fedsign.objectives.base import LocalContext, Objective, Representation
from fedsign.objectives.fedsign import FedSignObjective
from fedsign.objectives.moon import MoonObjective
from fedsign.records import Role, Tensors
from fedsign.tasks.classification import Classification
from simulations import run
from strategies.control import Control, random_signs
from tests.papers.local import local

SIGNS, FORMS, REDUCTIONS = (
    ("received", "own", "random"),
    ("sigmoid", "linear", "square"),
    ("sum", "tensor_mean", "mean"),
)
STEP = 1e-6


def drawn(seed: int) -> Tensors:
    random = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=random, dtype=torch.float64) for name, shape in (("a", (3, 2)), ("b", (2,)))
    }


def context() -> LocalContext:
    received = drawn(1)
    received["a"][0, 0] = 0.0  # FedSign has no term there
    return local(received, shared=random_signs(received, 0))


def slopes(value: Callable[[Tensors], float], theta: Tensors) -> Tensors:
    """Central differences of a function of the parameters."""
    found = {}
    for name, tensor in theta.items():
        found[name] = torch.zeros_like(tensor)
        for index in range(tensor.numel()):
            step = torch.zeros_like(tensor)
            step.view(-1)[index] = STEP
            above, below = (value({**theta, name: moved}) for moved in (tensor + step, tensor - step))
            found[name].view(-1)[index] = (above - below) / (2 * STEP)
    return found


def penalty_slopes(objective: Objective, theta: Tensors, given: LocalContext) -> Tensors:
    """Central differences of the penalty."""

    def penalty(parameters: Tensors) -> float:
        found = objective.penalty(parameters, given)
        assert found is not None
        return found.item()

    return slopes(penalty, theta)


@pytest.mark.parametrize(("sign", "form", "reduction"), product(SIGNS, FORMS, REDUCTIONS))
def test_the_gradient_is_that_of_finite_differences_on_both_paths(sign: Any, form: Any, reduction: Any) -> None:
    objective, theta, given = SignPush(sign=sign, form=form, gamma=0.3, reduction=reduction), drawn(0), context()
    expected, found = penalty_slopes(objective, theta, given), objective.penalty_gradient(theta, given)
    stack = CohortContext(
        received=dict(given.received),
        received_is_stacked=False,
        state={},
        shared=dict(given.shared),
        shared_is_stacked=False,
        unit_displacement=None,
        sizes=given.sizes,
    )
    of_stack = penalty_gradient(
        objective, {name: torch.stack([tensor, tensor]) for name, tensor in theta.items()}, stack
    )
    assert found is not None and of_stack is not None
    stacked = of_stack()
    assert stacked is not None
    for name, wanted in expected.items():
        assert wanted.abs().max() > 1e-4
        torch.testing.assert_close(found[name], wanted, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(stacked[name].expand(2, *wanted.shape)[1], wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_received_sign_and_the_sigmoid_are_fedsign(reduction: Any) -> None:
    theta, given = drawn(0), context()
    ours = SignPush(gamma=0.3, reduction=reduction).penalty_gradient(theta, given)
    its = FedSignObjective(gamma=0.3, reduction=reduction).penalty_gradient(theta, given)
    assert ours is not None and its is not None
    for name, wanted in its.items():
        torch.testing.assert_close(ours[name], wanted, rtol=1e-12, atol=0)


def test_own_signs_are_a_negative_l1_penalty_and_a_negative_weight_decay() -> None:
    theta, given = drawn(0), context()
    l1, decay = (SignPush(sign="own", form=form, gamma=0.3).penalty(theta, given) for form in ("linear", "square"))
    flat = torch.cat([tensor.flatten() for tensor in theta.values()])
    assert l1 is not None and decay is not None
    assert l1.item() == pytest.approx(-0.3 / 4 * flat.abs().sum().item(), rel=1e-12)
    assert decay.item() == pytest.approx(-0.3 / 2 * flat.square().sum().item(), rel=1e-12)


def test_random_signs_are_fixed_even_and_independent_of_the_models() -> None:
    tensors = {"a": torch.randn(100, 100), "b": torch.randn(64), "count": torch.tensor(3)}
    signs = random_signs(tensors, 0)
    assert signs.keys() == {"a", "b"} and all(set(each.unique().tolist()) == {-1.0, 1.0} for each in signs.values())
    for other in (signs["a"], signs["a"] * tensors["a"].sign()):
        assert abs(other.mean().item()) < 4 / 100  # four standard deviations of the mean of 10,000
    again, another = random_signs(tensors, 0), random_signs(tensors, 1)
    assert torch.equal(signs["a"], again["a"]) and not torch.equal(signs["a"], another["a"])


def test_random_signs_are_drawn_and_sent_for_trained_parameters_only() -> None:
    control = Control(objective="sign_push", settings={"sign": "random"})
    control.roles = {"trained": Role.PARAMETER, "frozen": Role.FROZEN, "running_mean": Role.BUFFER}
    served = {name: torch.randn(7) for name in control.roles}
    signs = control.request(1, served, range(3), cohort_size=2, seed=0).shared
    assert signs.keys() == {"trained"} and torch.equal(signs["trained"], random_signs(served, 0)["trained"])


def representation(z: Tensor, given: LocalContext, others: dict[str, Tensor]) -> Representation:
    return Representation(present=z, of=lambda model: others["received" if model is given.received else "previous"])


def test_the_halves_of_moons_contrast_add_up_to_its_slope_where_both_are_equally_near() -> None:
    """z_glob and z_prev mirrored at z: cos is the same to both, so p = 1/2."""
    z = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64).requires_grad_()
    others = {
        "received": torch.tensor([[1.0, 0.7, 0.2]]).double(),
        "previous": torch.tensor([[1.0, -0.7, 0.2]]).double(),
    }
    given = local({"a": torch.zeros(1)}, state={"a": torch.ones(1)})
    terms: dict[str, Objective] = {
        "whole": MoonObjective(mu=2.0),
        "received": MoonPart(mu=2.0),
        "previous": MoonPart(mu=2.0, part="previous"),
    }
    slopes = {}
    for name, objective in terms.items():
        term = objective.contrast(representation(z, given, others), given)
        assert term is not None
        (slopes[name],) = torch.autograd.grad(term, z)
    torch.testing.assert_close(slopes["received"] + slopes["previous"], slopes["whole"], rtol=1e-12, atol=1e-14)
    assert slopes["whole"].norm() > 0.1


@pytest.mark.parametrize("part", ["received", "previous"])
def test_the_gradient_of_a_half_is_that_of_finite_differences_on_both_paths(part: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    theta, received, previous = ({name: draw(p.shape) for name, p in model.named_parameters()} for _ in range(3))
    features, targets = draw((5, 4)), torch.tensor([0, 1, 0, 1, 1])
    task, given = Classification(), local(received, state=previous)

    def loss(parameters: Tensors, mu: float) -> Tensor:
        outputs, present = forward_with_features(model, parameters, features)
        z = Representation(present=present, of=lambda others: forward_with_features(model, {**others}, features)[1])
        contrast = MoonPart(mu=mu, part=part).contrast(z, given)
        return task.loss(outputs, targets) + (0 if contrast is None else contrast)

    expected = slopes(lambda parameters: loss(parameters, 2.0).item(), theta)
    without = slopes(lambda parameters: loss(parameters, 0.0).item(), theta)
    assert (expected["0.weight"] - without["0.weight"]).abs().max() > 1e-2

    free = {name: tensor.clone().requires_grad_() for name, tensor in theta.items()}
    found = torch.autograd.grad(loss(free, 2.0), list(free.values()))
    stack = {name: torch.stack([tensor, received[name]]).requires_grad_() for name, tensor in theta.items()}
    batch = CohortBatch(torch.stack([features] * 2), torch.stack([targets] * 2), torch.full((2, 5), 1 / 5).double())
    of_two = CohortLoss(CohortModel(model), task, MoonPart(mu=2.0, part=part))
    total, _ = of_two(stack, batch, cohort_context([given, given]))
    stacked = torch.autograd.grad(total, list(stack.values()))
    for wanted, alone, both in zip(expected.values(), found, stacked, strict=True):
        torch.testing.assert_close(alone, wanted, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(both[0], wanted, rtol=1e-6, atol=1e-8)


SMALL: dict[str, Any] = {
    "rounds": 3,
    "callbacks": [],
    "partition": {"num_clients": 6, "alpha": 1.0},
    "server": {"cohort_size": 3},
    "client": {"local_epochs": 1},
    "model": {"hidden": [16]},
}


def norms(tmp_path: Path, strategy: dict[str, Any]) -> list[float]:
    done = run({**SMALL, "strategy": {"name": "control", **strategy}, "results": {"root": str(tmp_path)}})
    found = torch.cat([tensor.flatten() for tensor in done.model().parameters()]).double().norm().item()
    assert done.rounds[-1]["weight_norm"] == pytest.approx(found, rel=1e-6)
    return [line["weight_norm"] for line in done.rounds]


def test_a_control_is_held_at_the_norms_given(tmp_path: Path) -> None:
    free = norms(tmp_path / "free", {})
    wanted = [9.0, 10.0, 11.0]
    assert max(abs(one - other) for one, other in zip(free, wanted, strict=True)) > 1
    assert norms(tmp_path / "held", {"weight_norms": wanted}) == pytest.approx(wanted, rel=1e-6)


def test_a_control_moves_by_the_norms_given(tmp_path: Path) -> None:
    """A mean of updates is scaled: 1/1000 of the way is nearly no way."""
    start = norms(tmp_path / "still", {"update_norms": [1e-6] * 3})
    assert start[0] == pytest.approx(start[2], abs=1e-5)
    assert math.isclose(start[0], start[1], rel_tol=1e-6)


def test_a_control_of_its_own_norms_is_itself(tmp_path: Path) -> None:
    free = norms(tmp_path / "free", {"objective": "sign_push", "settings": {"sign": "random"}})
    held = norms(tmp_path / "held", {"objective": "sign_push", "settings": {"sign": "random"}, "weight_norms": free})
    assert held == pytest.approx(free, rel=1e-6)


def test_too_few_norms_and_unknown_settings_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RoundError, match=r"strategy\.weight_norms with 2 numbers was given for round 3"):
        norms(tmp_path, {"weight_norms": [1.0, 1.0]})
    with pytest.raises(ConfigError, match="gama"):
        Control(objective="sign_push", settings={"gama": 0.1})


@pytest.mark.needs("cohort")
def test_random_signs_push_a_cohort_like_one_client_after_another(tmp_path: Path) -> None:
    losses = []
    for path in ("sequential", "cohort"):
        settings = {"sign": "random", "gamma": 0.01}
        done = run(
            {
                "rounds": 2,
                "callbacks": [],
                "partition": {"num_clients": 4, "alpha": 1.0},
                "server": {"cohort_size": 4},
                "client": {"local_steps": 3, "path": path},
                "strategy": {"name": "control", "objective": "sign_push", "settings": settings},
                "results": {"root": str(tmp_path / path)},
            }
        )
        losses.append([line["loss"] for line in done.rounds])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
