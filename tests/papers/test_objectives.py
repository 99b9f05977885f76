"""Gradients of FedProx, FedDyn, SCAFFOLD and MOON against closed forms and the losses as written."""

import math

import torch
from torch import Tensor

from fedsign.objectives.base import Representation
from fedsign.objectives.feddyn import FedDynObjective
from fedsign.objectives.fedprox import FedProxObjective
from fedsign.objectives.moon import MoonObjective, contrastive_loss
from fedsign.objectives.scaffold import ScaffoldObjective
from tests.papers.local import local

SHAPES = {"weight": (5, 7), "bias": (5,)}


def draw(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


def gradient(penalty: Tensor | None, theta: dict[str, Tensor]) -> dict[str, Tensor]:
    assert penalty is not None
    found = dict(zip(theta, torch.autograd.grad(penalty, list(theta.values())), strict=True))
    assert all(tensor.abs().min() > 0 for tensor in found.values())  # not vacuous
    return found


def trained(seed: int) -> dict[str, Tensor]:
    return {name: tensor.requires_grad_() for name, tensor in draw(seed).items()}


def test_fedprox_pulls_by_mu_times_the_distance() -> None:
    theta, received = trained(0), draw(1)
    found = gradient(FedProxObjective(mu=0.3).penalty(theta, local(received)), theta)
    for name in theta:
        torch.testing.assert_close(found[name], 0.3 * (theta[name] - received[name]))


def test_feddyn_tilts_by_its_memory_and_pulls() -> None:
    """d/dtheta [alpha <theta, h> + alpha/2 ||theta - theta_t||^2] = alpha (h + theta - theta_t)."""
    theta, received, h = trained(0), draw(1), draw(2)
    found = gradient(FedDynObjective(alpha=0.4).penalty(theta, local(received, state=h)), theta)
    for name in theta:
        torch.testing.assert_close(found[name], 0.4 * (h[name] + theta[name] - received[name]))


def test_scaffold_corrects_every_step_by_c_minus_c_k() -> None:
    theta, received, control, server = trained(0), draw(1), draw(2), draw(3)
    found = gradient(ScaffoldObjective().penalty(theta, local(received, state=control, shared=server)), theta)
    for name in theta:
        torch.testing.assert_close(found[name], server[name] - control[name])


def test_scaffolds_control_variate_is_the_clients_own_mean_gradient() -> None:
    """Option II by its meaning: with steps y <- y - lr (g_j - c_k + c), c_k+ is the mean of the g_j exactly."""
    received, control, server = draw(1), draw(2), draw(3)
    gradients = [draw(seed) for seed in (4, 5, 6)]
    lr = 0.1
    after = {
        name: received[name] - lr * sum(g[name] - control[name] + server[name] for g in gradients) for name in received
    }
    context = local(received, state=control, shared=server, unit_displacement=lr * len(gradients))
    state = ScaffoldObjective().next_state(after, context)
    for name in received:
        torch.testing.assert_close(state[name], torch.stack([g[name] for g in gradients]).mean(0))
        torch.testing.assert_close(ScaffoldObjective().to_server(state, context)[name], state[name] - control[name])


def test_scaffolds_control_variate_with_momentum_is_a_weighted_mean_of_gradients() -> None:
    """A constant gradient g gives c_k+ = g, whatever the momentum: two steps at 0.5 move by lr (1 + 1.5) g."""
    received, g = draw(1), draw(4)
    zero = {name: torch.zeros_like(tensor) for name, tensor in received.items()}
    after = {name: received[name] - 0.1 * 2.5 * g[name] for name in received}
    state = ScaffoldObjective().next_state(after, local(received, state=zero, shared=zero, unit_displacement=0.1 * 2.5))
    for name in received:
        torch.testing.assert_close(state[name], g[name])


def written_moon(z: Tensor, z_glob: Tensor, z_prev: Tensor, mu: float, tau: float) -> Tensor:
    """Eq. 3 sample by sample, as it stands in the paper."""
    total = z.new_zeros(())
    for one, glob, prev in zip(z, z_glob, z_prev, strict=True):
        cos = lambda a, b: (a @ b) / (a.norm() * b.norm())  # noqa: E731
        near, far = torch.exp(cos(one, glob) / tau), torch.exp(cos(one, prev) / tau)
        total = total - torch.log(near / (near + far))
    return mu * total / len(z)


def test_moon_is_its_equation_and_its_gradient() -> None:
    """z = theta x; the gradient reaches theta through z alone."""
    theta, received, previous = ({"w": torch.randn(4, 6, dtype=torch.float64)} for _ in range(3))
    theta["w"].requires_grad_()
    x = torch.randn(8, 6, dtype=torch.float64)
    z = Representation(present=x @ theta["w"].T, of=lambda parameters: x @ parameters["w"].T)
    found = MoonObjective(mu=2.0, temperature=0.5).contrast(z, local(received, state=previous))
    expected = written_moon(x @ theta["w"].T, x @ received["w"].T, x @ previous["w"].T, 2.0, 0.5)
    assert found is not None
    torch.testing.assert_close(found, expected)
    (gradient,) = torch.autograd.grad(found, theta["w"], retain_graph=True)
    (written,) = torch.autograd.grad(expected, theta["w"])
    assert gradient.abs().max() > 1e-3
    torch.testing.assert_close(gradient, written)


def test_moons_first_round_has_a_constant_term() -> None:
    """The received model stands for the previous one: log 2, without a gradient."""
    z = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    other = torch.randn(4, 3, dtype=torch.float64)
    loss = contrastive_loss(z, other, other, temperature=0.5)
    assert math.isclose(loss.item(), math.log(2))
    (gradient,) = torch.autograd.grad(loss, z)
    assert gradient.abs().max() < 1e-15


def test_objectives_of_strength_zero_add_no_term_at_all() -> None:
    z = Representation(present=torch.ones(1, 1), of=lambda parameters: torch.ones(1, 1))
    assert FedProxObjective(mu=0.0).penalty({}, local({})) is None
    assert MoonObjective(mu=0.0).contrast(z, local({})) is None
