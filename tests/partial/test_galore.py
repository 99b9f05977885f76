"""GaLore against its definition: a manual step, Adam in the rotated basis, the authors' loop, bytes by the formula."""

import pytest
import torch
from torch import Tensor, nn

from fedsign import plugins
from fedsign.errors import ConfigError
from fedsign.optim.galore import GaLore, projector_of
from tests.partial.lisa_models import Tower, tower, train


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("shape", "side"), [((4, 2), "right"), ((2, 4), "left")])
def test_one_step_by_hand(shape: tuple[int, int], side: str) -> None:
    """G = 3 u v^T has one singular value, so with rank 1 R = +-3 u (or 3 v^T), and m_hat = R, v_hat = R^2 after one
    step.

    N = R / (|R| + eps): each element is the sign, shrunk by eps; then lr 0.1, scale 0.25, and decay 0.1 * 0.5
    afterwards.
    """
    u, v = (nn.functional.normalize(torch.arange(1.0, size + 1), dim=0) for size in shape)
    start = torch.ones(shape)
    weight = nn.Parameter(start.clone())
    weight.grad = 3 * torch.outer(u, v)
    GaLore([weight], lr=0.1, rank=1, scale=0.25, eps=1e-2, weight_decay=0.5).step()
    r = {"right": 3 * u, "left": 3 * v}[side]
    n = r / (r + 1e-2)
    moved = torch.outer(n, v) if side == "right" else torch.outer(u, n)
    torch.testing.assert_close(weight.detach(), (start - 0.1 * 0.25 * moved) * (1 - 0.1 * 0.5))


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_with_full_rank_and_scale_one_it_is_adam_in_the_rotated_basis(shape: tuple[int, int]) -> None:
    """With P orthogonal, the gradient of f(W' P^T) in W' is G P: Adam on W', rotated back, equals GaLore (left:
    alike).
    """
    target, start = draw(*shape, seed=1), draw(*shape, seed=2)

    def loss(weight: Tensor) -> Tensor:
        return ((weight - target) @ draw(shape[1], 3, seed=3)).pow(4).sum() + weight.square().sum()

    weight = nn.Parameter(start.clone())
    optimizer = GaLore([weight], lr=0.01, rank=min(shape), scale=1.0, update_proj_gap=1000)
    loss(weight).backward()
    assert weight.grad is not None
    is_right = shape[0] >= shape[1]
    turn = projector_of(weight.grad, min(shape))
    rotated = nn.Parameter(start @ turn if is_right else turn.T @ start)
    adam = torch.optim.Adam([rotated], lr=0.01, eps=1e-6)
    for _ in range(30):
        optimizer.zero_grad()
        loss(weight).backward()
        optimizer.step()
        adam.zero_grad()
        loss(rotated @ turn.T if is_right else turn @ rotated).backward()
        adam.step()
    assert (weight - start).norm() > 0.1
    torch.testing.assert_close(weight, rotated @ turn.T if is_right else turn @ rotated, rtol=1e-5, atol=1e-6)


def reference(weight: Tensor, gradients: list[Tensor], *, rank: int, gap: int, lr: float, decay: float) -> Tensor:
    """The algorithm once more, as short as it can be said."""
    weight, is_right = weight.clone(), weight.shape[0] >= weight.shape[1]
    m = v = 0.0
    for t, g in enumerate(gradients):
        if t % gap == 0:
            u, _, vt = torch.linalg.svd(g, full_matrices=False)
            p = (vt[:rank].T if is_right else u[:, :rank]).to(g.dtype)
        r = g @ p if is_right else p.T @ g
        m, v = 0.8 * m + 0.2 * r, 0.95 * v + 0.05 * r**2
        n = m / (1 - 0.8 ** (t + 1)) / ((v / (1 - 0.95 ** (t + 1))).sqrt() + 1e-6)
        weight -= lr * 0.3 * (n @ p.T if is_right else p @ n)
        weight -= lr * decay * weight
    return weight


@pytest.mark.parametrize("shape", [(7, 4), (4, 7)])
def test_many_steps_over_several_projections_are_the_references(shape: tuple[int, int]) -> None:
    """The moments are carried over to a new projection as they are."""
    start, gradients = draw(*shape), [draw(*shape, seed=seed) for seed in range(1, 14)]
    weight = nn.Parameter(start.clone())
    optimizer = GaLore([weight], lr=0.05, rank=2, update_proj_gap=4, scale=0.3, betas=(0.8, 0.95), weight_decay=0.1)
    for gradient in gradients:
        weight.grad = gradient
        optimizer.step()
    expected = reference(start, gradients, rank=2, gap=4, lr=0.05, decay=0.1)
    torch.testing.assert_close(weight.detach(), expected)
    never = reference(start, gradients, rank=2, gap=1000, lr=0.05, decay=0.1)
    assert not torch.allclose(expected, never)  # the new projections matter


def of_tower(model: Tower, **settings: object) -> GaLore:
    found = plugins.build("optimizer", "galore", settings, model, 0.01, 0.1)
    assert isinstance(found, GaLore)
    return found


@pytest.mark.parametrize("projected", ["blocks", "linear"])
@pytest.mark.parametrize("rank", [2, 100])
def test_bytes_of_the_state_equal_the_formula(projected: str, rank: int) -> None:
    """A matrix [m, n] with r = min(rank, m, n) has two moments of r max(m, n) and a projector of r min(m, n).

    Other tensors have two moments of their own size.
    """
    model = tower()
    optimizer = of_tower(model, rank=rank, projected=projected)
    train(model, optimizer, range(2))
    expected = 0
    for name, parameter in model.named_parameters():
        expected += 4  # the count of steps
        in_question = name.startswith("blocks.") or (projected == "linear" and name.startswith("head."))
        if parameter.dim() == 2 and in_question:
            r = min(rank, *parameter.shape)
            expected += 4 * (2 * r * max(parameter.shape) + r * min(parameter.shape))
        else:
            expected += 4 * 2 * parameter.numel()
    found = [value for state in optimizer.state.values() for value in state.values()]
    assert sum(value.untyped_storage().nbytes() for value in found) == expected


def test_what_is_not_projected_is_adamw_bit_for_bit() -> None:
    ours, torchs = tower(), tower()
    mine = of_tower(ours, rank=2, beta1=0.8)
    its = torch.optim.AdamW(torchs.parameters(), lr=0.01, betas=(0.8, 0.999), eps=1e-6, weight_decay=0.1)
    for seed in range(5):
        for one, two in zip(ours.parameters(), torchs.parameters(), strict=True):
            one.grad = two.grad = draw(*one.shape, seed=seed).float()
        mine.step()
        its.step()
    same = {
        name: torch.equal(one, two)
        for (name, one), two in zip(ours.named_parameters(), torchs.parameters(), strict=True)
    }
    assert same == {
        name: not (name.startswith("blocks.") and name.endswith(("up.weight", "down.weight"))) for name in same
    }


def test_a_state_that_was_saved_goes_on_with_the_same_bits() -> None:
    model, other = tower(), tower(seed=1)
    optimizer, again = (of_tower(each, rank=2, update_proj_gap=5) for each in (model, other))
    train(model, optimizer, range(7))
    other.load_state_dict(model.state_dict())
    state = optimizer.state_dict()
    again.load_state_dict(
        {**state, "state": {key: {k: v.clone() for k, v in each.items()} for key, each in state["state"].items()}}
    )
    for each, of in ((model, optimizer), (other, again)):
        train(each, of, range(7, 20))
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))


def test_it_trains_a_model_and_the_learning_rate_scales_both_kinds_of_parameters() -> None:
    model = tower()
    optimizer = of_tower(model, rank=2)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    train(model, optimizer, range(1))
    assert all(not torch.equal(one, two) for one, two in zip(model.parameters(), before, strict=True))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), before, strict=True))


def test_half_precision_gradients_are_decomposed_in_full() -> None:
    gradient = draw(6, 3).bfloat16()
    found = projector_of(gradient, 2)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float().T @ found.float(), torch.eye(2), atol=0.02, rtol=0)


def test_a_model_without_matrices_to_project_is_told_so() -> None:
    with pytest.raises(ConfigError, match="no matrices to project"):
        GaLore([])
    with pytest.raises(ConfigError, match="no matrices to project"):
        GaLore([nn.Parameter(torch.zeros(3))])
