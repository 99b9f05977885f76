"""Hand-written gradients of stacked models against autograd."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clients.cohort.chain import chain_gradient, chain_layers
from clients.cohort.context import CohortContext
from clients.cohort.loss import CohortLoss, penalty_gradient
from clients.cohort.modules import CohortModel
from clients.cohort.optim import CohortOptimizer
from clients.cohort.plan import CohortBatch
from fedsign.objectives.base import LocalContext, Objective
from fedsign.objectives.fedprox import FedProxObjective
from fedsign.objectives.fedsign import FedSignObjective
from fedsign.records import Tensors
from fedsign.tasks.base import SampleTask
from fedsign.tasks.classification import Classification
from fedsign.tasks.regression import Regression

NUM_CLIENTS, BATCH = 3, 5
FUNCTIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
    "gelu by tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
    "leaky relu": lambda: nn.LeakyReLU(0.2),
    "elu": lambda: nn.ELU(0.7),
    "softplus": lambda: nn.Softplus(beta=2.0, threshold=1.0),
    "relu6": nn.ReLU6,
    "identity": nn.Identity,
}
TASKS: dict[str, tuple[SampleTask, int]] = {
    "classes": (Classification(), 4),
    "smoothed": (Classification(label_smoothing=0.3), 4),
    "sharpened": (Classification(label_smoothing=0.3, temperature=0.5), 4),
    "regression": (Regression(), 1),
}


def stacked(model: nn.Module, seed: int = 1) -> Tensors:
    """Parameters [K, ...] of different clients."""
    random = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(NUM_CLIENTS, *tensor.shape, generator=random, dtype=torch.float64)
        for name, tensor in model.named_parameters()
    }


def nothing_to_read() -> CohortContext:
    return CohortContext(
        received={},
        received_is_stacked=False,
        state={},
        shared={},
        shared_is_stacked=False,
        unit_displacement=None,
        sizes={},
    )


def batch_for(task: SampleTask, num_outputs: int) -> CohortBatch:
    """Features [K, B, 2, 3], targets and weights [K, B]; the second client's batch is filled up."""
    random = torch.Generator().manual_seed(2)
    features = torch.randn(NUM_CLIENTS, BATCH, 2, 3, generator=random, dtype=torch.float64)
    if isinstance(task, Regression):
        targets = torch.randn(NUM_CLIENTS, BATCH, generator=random, dtype=torch.float64)
    else:
        targets = torch.randint(num_outputs, (NUM_CLIENTS, BATCH), generator=random)
    lengths = torch.tensor([BATCH, 2, BATCH - 1])[:, None]
    weights = (torch.arange(BATCH) < lengths) / lengths.double()
    return CohortBatch(features, targets, weights)


@pytest.mark.parametrize("task_name", TASKS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_gradient_of_a_chain_is_that_of_autograd(function: str, task_name: str) -> None:
    task, num_outputs = TASKS[task_name]
    model = nn.Sequential(
        nn.Flatten(),
        nn.Sequential(nn.Linear(6, 7), FUNCTIONS[function]()),
        nn.Linear(7, 3, bias=False),
        FUNCTIONS[function](),
        nn.Linear(3, num_outputs),
    ).double()
    batch = batch_for(task, num_outputs)
    theta = stacked(model)
    free = {name: tensor.clone().requires_grad_() for name, tensor in theta.items()}
    loss = CohortLoss(CohortModel(model), task, Objective(), chain_layers(model))
    total, expected_losses = loss(free, batch, nothing_to_read())
    expected = dict(zip(free, torch.autograd.grad(total, list(free.values())), strict=True))
    chain = chain_gradient(chain_layers(model), task, (2, 3))
    assert chain is not None
    before = {name: tensor.clone() for name, tensor in theta.items()}
    into = {name: torch.full_like(tensor, 2.0) for name, tensor in theta.items()}
    losses = chain.add(theta, batch, into, beta=0.5, alpha=3.0)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-12, atol=1e-12)
    for name, gradient in expected.items():
        assert torch.equal(theta[name], before[name]) and gradient.abs().max() > 1e-3
        torch.testing.assert_close(into[name], 1 + 3 * gradient, rtol=1e-12, atol=1e-12)
    chain.add(theta, batch, theta, beta=1, alpha=-0.1)  # a step of gradient descent in place
    for name, gradient in expected.items():
        torch.testing.assert_close(theta[name], before[name] - 0.1 * gradient, rtol=1e-12, atol=1e-12)


class _Own(nn.Linear):
    """A subclass may do anything."""


class _OwnTask(Classification):
    """A subclass may do anything."""


@pytest.mark.parametrize(
    ("model", "task", "shape"),
    [
        (nn.Sequential(_Own(6, 4)), Classification(), (6,)),
        (nn.Sequential(nn.Linear(6, 4)), _OwnTask(), (6,)),
        (nn.Sequential(nn.Linear(3, 4)), Classification(), (2, 3)),  # [n, 2, classes], which a loss reads otherwise
        (nn.Sequential(nn.Flatten(), nn.Linear(6, 2)), Regression(), (2, 3)),
        (nn.Sequential(nn.Flatten(), nn.LayerNorm(6), nn.Linear(6, 4)), Classification(), (2, 3)),
        (nn.Sequential(nn.Flatten(2), nn.Linear(3, 4)), Classification(), (6,)),
    ],
    ids=["own layer", "own task", "not flat", "two outputs", "layer norm", "other flatten"],
)
def test_what_is_not_known_by_hand_is_left_to_autograd(model: nn.Module, task: Any, shape: tuple[int, ...]) -> None:
    assert chain_gradient(chain_layers(model), task, shape) is None


def test_a_model_with_hooks_is_left_to_autograd() -> None:
    model = nn.Sequential(nn.Linear(6, 4))
    assert chain_gradient(chain_layers(model), Classification(), (6,)) is not None
    model[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    assert chain_gradient(chain_layers(model), Classification(), (6,)) is None


class _Constant(Objective):
    def penalty(self, parameters: Any, context: LocalContext) -> Tensor | None:
        return torch.ones((), dtype=torch.float64)


class _Stronger(FedProxObjective):
    def penalty(self, parameters: Any, context: LocalContext) -> Tensor | None:
        term = super().penalty(parameters, context)
        return None if term is None else 2 * term


def test_a_penalty_of_the_users_own_is_differentiated_and_a_constant_has_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(6, 4))
    theta, received = stacked(model), {name: tensor[0] for name, tensor in stacked(model, seed=3).items()}
    context = CohortContext(
        received=received,
        received_is_stacked=False,
        state={},
        shared={},
        shared_is_stacked=False,
        unit_displacement=None,
        sizes={name: tensor.numel() for name, tensor in received.items()},
    )

    def added(objective: Objective) -> Tensors | None:
        gradient = penalty_gradient(objective, theta, context)
        return None if gradient is None else gradient()

    twice, constant = added(_Stronger(mu=0.5)), added(_Constant())
    assert twice is not None and constant is not None
    for name, gradient in twice.items():
        torch.testing.assert_close(gradient, theta[name] - received[name], rtol=1e-12, atol=1e-12)
    assert not any(gradient.any() for gradient in constant.values())
    for nothing in (Objective(), FedProxObjective(mu=0), FedSignObjective(gamma=0)):
        assert added(nothing) is None


@pytest.mark.parametrize(
    ("settings", "descent"),
    [({}, 0.1), ({"momentum": 0.9}, None), ({"weight_decay": 0.1}, None), ({"momentum": 0.9, "nesterov": True}, None)],
)
def test_plain_gradient_descent_is_known_as_such(settings: dict[str, Any], descent: float | None) -> None:
    parameters = [torch.zeros(1, requires_grad=True)]
    stacked = CohortOptimizer(torch.optim.SGD(parameters, lr=0.1, **settings), parameters)
    assert stacked.descent == descent
