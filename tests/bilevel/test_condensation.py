"""Condensation: tangents equal torch.func's, the network equals torch's, training learns, and images stay images."""

import math

import pytest
import torch
from torch import Tensor, nn

from fedsign.bilevel import chain as chains
from fedsign.bilevel.chain import Chain, conv_net, mlp
from fedsign.bilevel.condensation import IMAGES, LABELS, Training, draws
from fedsign.bilevel.condense import Condensation
from fedsign.bilevel.forward_gradient import fg2u, forward_exact
from fedsign.bilevel.hypergradients import rgu
from fedsign.bilevel.settings import from_dict
from fedsign.bilevel.unroll import Inner, Problem, Tree
from fedsign.errors import DataError

NETWORKS = {
    "conv": (conv_net((1, 8, 8), 10, width=4, num_blocks=2), (1, 8, 8)),
    "odd sizes": (conv_net((2, 13, 9), 10, width=3, num_blocks=2), (2, 13, 9)),
    "mlp": (mlp((1, 8, 8), 10, hidden=(7, 5)), (1, 8, 8)),
}


def training(
    network: Chain, shape: tuple[int, int, int], *, soft: bool, dtype: torch.dtype = torch.float64
) -> tuple[Training, Tree, torch.Generator]:
    generator = torch.Generator().manual_seed(0)
    meta = {IMAGES: torch.rand(10, *shape, generator=generator).to(dtype)}
    if soft:
        meta[LABELS] = torch.randn(10, 10, generator=generator).to(dtype)
    inner = Training(network=network, start=network.begin(generator).to(dtype), labels=torch.arange(10), num_classes=10)
    return inner, meta, generator


def normal(like: Tree, count: int, generator: torch.Generator) -> Tree:
    return {key: torch.randn(count, *each.shape, generator=generator, dtype=each.dtype) for key, each in like.items()}


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("cache_bytes", [1, 2**20])
def test_tangents_written_out_are_those_of_torch_func(
    name: str, soft: bool, cache_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer by layer, with directions one at a time and all at once."""
    monkeypatch.setattr(chains, "_CACHE_BYTES", cache_bytes)
    network, shape = NETWORKS[name]
    inner, meta, generator = training(network, shape, soft=soft)
    state = inner.initial(meta)
    tangents, directions = normal(state, 3, generator), normal(meta, 3, generator)
    (data,) = draws(10, depth=1, batch_size=6, rate=0.1, generator=generator)
    expected = Inner.push(inner, state, tangents, meta, directions, data)
    assert expected[1]["parameters/0"].abs().max() > 0.1
    for found, known in zip(inner.push(state, tangents, meta, directions, data), expected, strict=True):
        for key, each in known.items():
            torch.testing.assert_close(found[key], each, atol=1e-12, rtol=1e-10)


def test_the_conv_net_is_torchs() -> None:
    """The same logits from torch's modules with the same weights."""
    network, shape = NETWORKS["odd sizes"]
    generator = torch.Generator().manual_seed(0)
    theta, images = network.begin(generator), torch.rand(5, *shape, generator=generator)
    modules: list[nn.Module] = []
    channels = shape[0]
    for _ in range(2):
        norm = nn.InstanceNorm2d(3, affine=True)
        modules += [nn.Conv2d(channels, 3, 3, padding=1), nn.ReLU(), norm, nn.AvgPool2d(2)]
        channels = 3
    head = nn.Linear(3 * 3 * 2, 10)
    model = nn.Sequential(*modules, nn.Flatten(), head)
    with torch.no_grad():
        weighted = [module for module in modules if not isinstance(module, nn.ReLU | nn.AvgPool2d)]
        parts = [part for part in network.parts(theta) if part]
        for module, part in zip([*weighted, head], parts, strict=True):
            weight = part[0]
            if isinstance(module, nn.Conv2d):
                weight = weight.reshape(3, 3, -1, 3).permute(3, 2, 0, 1)
            if isinstance(module, nn.Linear):  # ours lie with the channels last
                weight = weight.T.reshape(10, 3, 2, 3).permute(0, 3, 1, 2).flatten(1)
            module.weight.copy_(weight)  # type: ignore[operator, union-attr]
            module.bias.copy_(part[1])  # type: ignore[operator, union-attr]
        torch.testing.assert_close(network.outputs(theta, images), model(images))
        assert network.size == sum(each.numel() for each in model.parameters())


def cross_entropy_on(inner: Training, images: Tensor, labels: Tensor) -> Problem:
    data = draws(10, depth=5, batch_size=10, rate=0.05, generator=torch.Generator().manual_seed(5))
    return Problem(
        inner=inner,
        data=data,
        outer=lambda state, meta: nn.functional.cross_entropy(
            inner.network.outputs(state["parameters"], images), labels
        ),
    )


@pytest.mark.parametrize("soft", [False, True])
def test_forward_and_reverse_give_one_hypergradient(soft: bool) -> None:
    inner, meta, generator = training(*NETWORKS["mlp"], soft=soft)
    problem = cross_entropy_on(inner, torch.rand(20, 1, 8, 8, generator=generator).double(), torch.arange(20) % 10)
    reverse = rgu()(problem, meta, generator=generator)
    forward = forward_exact(memory_bytes=2**22)(problem, meta, generator=generator)
    assert reverse.value == pytest.approx(forward.value, rel=1e-12)
    for key in meta:
        torch.testing.assert_close(forward.gradient[key], reverse.gradient[key], atol=1e-12, rtol=1e-9)


def test_directions_in_chunks_give_what_all_at_once_give() -> None:
    inner, meta, generator = training(*NETWORKS["conv"], soft=False)
    problem = cross_entropy_on(inner, torch.rand(20, 1, 8, 8, generator=generator).double(), torch.arange(20) % 10)
    each, together = (
        fg2u(num_directions=7, memory_bytes=memory)(problem, meta, generator=torch.Generator().manual_seed(2))
        for memory in (1, 2**30)
    )
    torch.testing.assert_close(each.gradient[IMAGES], together.gradient[IMAGES], atol=1e-12, rtol=1e-9)


def test_digits_are_embedded_and_a_conv_net_sees_them() -> None:
    """In the middle of zeros; the hypergradient by their pixels is above rounding, also with three blocks."""
    tree = {"network": {"kind": "conv", "width": 4}, "inner": {"depth": 3, "lr": 0.01}, "image_size": 16}
    made = Condensation(from_dict({**tree, "method": {"name": "rgu"}}))
    images = made.begin().meta[IMAGES]
    assert images.shape == (10, 1, 16, 16)
    assert images[..., 4:12, 4:12].sum() == images.sum() > 0
    problem = made.problem({IMAGES: images}, torch.Generator().manual_seed(0))
    found = rgu()(problem, {IMAGES: images}, generator=torch.Generator())
    assert found.gradient[IMAGES].norm() > 1e-4


@pytest.mark.parametrize(("tree", "said"), [({}, "image_size=16"), ({"image_size": 7}, "image_size=7 was given")])
def test_images_too_small_for_the_network_are_refused(tree: dict[str, int], said: str) -> None:
    with pytest.raises(DataError, match=said):
        Condensation(from_dict({"network": {"kind": "conv"}, **tree})).network  # noqa: B018


def test_batches_are_drawn_with_replacement_and_the_rate_falls_along_half_a_cosine() -> None:
    found = draws(10, depth=4, batch_size=50, rate=0.2, generator=torch.Generator().manual_seed(0))
    assert [each.rate for each in found] == pytest.approx([0.1 * (1 + math.cos(math.pi * t / 4)) for t in range(4)])
    assert all(int(each.chosen.max()) < 10 and len(each.chosen.unique()) <= 10 < len(each.chosen) for each in found)


def test_a_step_that_is_not_differentiated_is_the_step() -> None:
    inner, meta, generator = training(*NETWORKS["conv"], soft=True)
    (data,) = draws(10, depth=1, batch_size=6, rate=0.1, generator=generator)
    state = inner.initial(meta)
    for key, each in inner.step(state, meta, data).items():
        torch.testing.assert_close(inner.advance(state, meta, data)[key], each, atol=1e-14, rtol=1e-10)
