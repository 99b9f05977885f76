"""FedSign, arXiv 2405.12489, Eq. 1, reimplemented from the paper and compared by element."""

import pytest
import torch

from fedsign.objectives.fedsign import FedSignObjective, Reduction
from tests.papers.local import local

GAMMA = 0.003


def sgp(x: torch.Tensor) -> torch.Tensor:
    """1 if x > 0 else 0, the paper's step."""
    return (x > 0).to(x.dtype)


def equation_1(theta: torch.Tensor, theta_t: torch.Tensor) -> torch.Tensor:
    """sgp(theta_t) sigma(theta) + sgp(-theta_t) sigma(-theta), elementwise."""
    sigma = lambda x: 1 / (1 + torch.exp(-x))  # noqa: E731
    return sgp(theta_t) * sigma(theta) + sgp(-theta_t) * sigma(-theta)


def tensors(seed: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """theta and theta_t in float64, theta_t with zeros in it."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"weight": (5, 7), "bias": (5,), "norm.weight": (3,)}
    draw = lambda shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    received = {name: draw(shape) for name, shape in shapes.items()}
    received["weight"][0, :3] = 0.0
    received["bias"][2] = 0.0
    return {name: draw(shape).requires_grad_() for name, shape in shapes.items()}, received


@pytest.mark.parametrize("reduction", ["sum", "tensor_mean", "mean"])
def test_the_penalty_is_equation_1_under_each_reduction(reduction: Reduction) -> None:
    theta, received = tensors(0)
    terms = [equation_1(theta[name], received[name]) for name in theta]
    num_elements = sum(term.numel() for term in terms)
    reduced = {
        "sum": sum(term.sum() for term in terms),
        "tensor_mean": sum(term.mean() for term in terms) / len(terms),
        "mean": sum(term.sum() for term in terms) / num_elements,
    }[reduction]
    penalty = FedSignObjective(gamma=GAMMA, reduction=reduction).penalty(theta, local(received))
    assert penalty is not None
    torch.testing.assert_close(penalty, -GAMMA * reduced, rtol=1e-12, atol=0)


def test_its_gradient_is_the_closed_form_element_by_element() -> None:
    """d/dtheta of Eq. 1 is sign(theta_t) s(1 - s), s = sigma(theta), since sigma(-x)' = -s(1 - s)."""
    theta, received = tensors(1)
    penalty = FedSignObjective(gamma=GAMMA).penalty(theta, local(received))
    assert penalty is not None
    penalty.backward()
    for name in theta:
        s = torch.sigmoid(theta[name].detach())
        expected = -GAMMA * torch.sign(received[name]) * s * (1 - s)
        assert theta[name].grad is not None
        torch.testing.assert_close(theta[name].grad, expected, rtol=1e-12, atol=0)


def test_elements_whose_received_value_is_zero_get_exactly_no_gradient() -> None:
    theta, received = tensors(2)
    penalty = FedSignObjective(gamma=GAMMA).penalty(theta, local(received))
    assert penalty is not None
    penalty.backward()
    gradient = theta["weight"].grad
    assert gradient is not None
    assert (received["weight"] == 0).sum() == 3
    assert (gradient[received["weight"] == 0] == 0).all()
    assert (gradient[received["weight"] != 0] != 0).all()


def test_the_gradient_does_not_vanish_where_training_starts() -> None:
    """At theta = theta_t, |gradient| = gamma s(1 - s); with the small weights of a new network about gamma/4."""
    received = {"weight": 0.1 * torch.randn(1000, generator=torch.Generator().manual_seed(3))}
    theta = {"weight": received["weight"].clone().requires_grad_()}
    penalty = FedSignObjective(gamma=GAMMA).penalty(theta, local(received))
    assert penalty is not None
    penalty.backward()
    gradient = theta["weight"].grad
    assert gradient is not None
    assert (gradient.abs() > 0.9 * GAMMA / 4).all()
    assert (gradient.abs() <= GAMMA / 4).all()


def test_descending_it_raises_the_agreement_of_signs() -> None:
    theta, received = tensors(4)
    before = sum(equation_1(theta[name], received[name]).sum().item() for name in theta)
    penalty = FedSignObjective(gamma=1.0).penalty(theta, local(received))
    assert penalty is not None
    penalty.backward()
    after = 0.0
    for name, value in theta.items():
        assert value.grad is not None
        after += equation_1(value.detach() - 0.1 * value.grad, received[name]).sum().item()
    assert after > before


def test_gamma_zero_has_no_term_at_all() -> None:
    theta, received = tensors(5)
    assert FedSignObjective(gamma=0.0).penalty(theta, local(received)) is None
