"""FedPAN, arXiv 2203.14666: the encoding in closed form, and the permutation symmetry that it breaks."""

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedsign import plugins
from fedsign.errors import ConfigError
from fedsign.models.features import classifier_of
from fedsign.models.position import Mode, PositionEncoding, attach, encoding
from fedsign.registry import KINDS
from fedsign.seeding import Purpose, global_stream

MODES: list[Mode] = ["add", "mul"]
MODELS = [name for name in KINDS["model"].table if name not in ("gpt", "transformers")]  # which take no images


def build(name: str, shape: tuple[int, ...], **settings: Any) -> nn.Module:
    with global_stream(0, Purpose.MODEL):
        model: nn.Module = plugins.build("model", name, settings, shape, 10)
    return model


def samples(n: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(1), dtype=dtype)


def hooks(model: nn.Module) -> dict[str, PositionEncoding]:
    """The marks of a model by the name of the module that carries them."""
    return {
        name: hook
        for name, module in model.named_modules()
        for hook in module._forward_hooks.values()
        if isinstance(hook, PositionEncoding)
    }


@pytest.mark.parametrize(("period", "num_channels"), [(1.0, 4), (4.0, 128), (0.5, 7), (8.0, 33)])
def test_the_encoding_is_the_sine_of_the_channels_place(period: float, num_channels: int) -> None:
    expected = [math.sin(2 * math.pi * period * j / num_channels) for j in range(num_channels)]
    np.testing.assert_allclose(encoding(num_channels, period).numpy(), expected, rtol=0, atol=1e-13)
    assert encoding(num_channels, period)[0] == 0


def test_one_hidden_layer_in_closed_form() -> None:
    """x = 1 into weights 1 and biases 0: h_j = 1 for four neurons, e = (0, 1, 0, -1); v = (1, 10, 100, 1000).

    add, A = 1/2:  relu(1, 1.5, 1, 0.5) v = 1 + 15 + 100 + 500.   mul gives the same, as h = 1.
    For x = 2: add 2, 2.5, 2, 1.5 -> 2 + 25 + 200 + 1500; mul 2, 3, 2, 1 -> 2 + 30 + 200 + 1000.
    A = 3, x = 1: 1 + 3 e = 1, 4, 1, -2, and the ReLU comes after the mark: 1 + 40 + 100 + 0.
    """
    for mode, amplitude, x, expected in [
        ("add", 0.5, 1.0, 616.0), ("mul", 0.5, 1.0, 616.0), ("add", 0.5, 2.0, 1727.0),
        ("mul", 0.5, 2.0, 1232.0), ("add", 3.0, 1.0, 141.0), ("add", 0.0, 1.0, 1111.0),
    ]:  # fmt: skip
        model = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1, bias=False))
        nn.init.ones_(model[0].weight)
        nn.init.zeros_(model[0].bias)
        model[2].weight.data = torch.tensor([[1.0, 10.0, 100.0, 1000.0]])
        attach(model, mode=mode, amplitude=amplitude, period=1.0)
        assert model(torch.tensor([[x]])).item() == pytest.approx(expected, rel=1e-6), (mode, amplitude, x)


@pytest.mark.parametrize("mode", MODES)
def test_a_convolution_is_marked_by_channel_behind_its_batch_norm(mode: Mode) -> None:
    model = build("cnn", (64,), channels=(4, 6)).double().eval()
    with torch.no_grad():
        model.get_submodule("2").running_mean += samples(4)
    x = samples(3, 64, dtype=torch.float64)
    layers = list(model.children())
    plain = nn.Sequential(*layers[:3])(x)
    e = torch.sin(2 * math.pi * 1.5 * torch.arange(4, dtype=torch.float64) / 4)[None, :, None, None]
    marked = plain + 0.3 * e if mode == "add" else plain * (1 + 0.3 * e)
    attach(model, mode=mode, amplitude=0.3, period=1.5)
    torch.testing.assert_close(nn.Sequential(*layers[:3])(x), marked, rtol=1e-12, atol=1e-12)
    assert sorted(hooks(model)) == ["2", "6"]


@pytest.mark.parametrize("name", MODELS)
def test_amplitude_zero_is_the_plain_network_bit_for_bit(name: str) -> None:
    model, x = build(name, (3, 32, 32)).eval(), samples(2, 3, 32, 32)
    before = model(x)
    for mode in MODES:
        attach(model, mode=mode, amplitude=0.0, period=1.0)
    assert hooks(model) == {}
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "linear"])
def test_every_hidden_layer_of_every_model_is_marked_and_no_name_is_added(name: str, mode: Mode) -> None:
    model, x = build(name, (3, 32, 32)).eval(), samples(2, 3, 32, 32)
    state = list(model.state_dict())
    before = model(x)
    attach(model, mode=mode, amplitude=0.25, period=1.0)
    marked = hooks(model)
    layers = [each for each in model.modules() if isinstance(each, nn.Conv2d | nn.Linear)]
    assert len(marked) == len(layers) - 1
    norms = [key for key, each in model.named_modules() if isinstance(each, nn.BatchNorm2d)]
    assert set(norms) <= set(marked)  # in ours, every BatchNorm follows a convolution
    assert not any(isinstance(model.get_submodule(key), nn.Conv2d) for key in marked if norms)
    assert all(model.get_submodule(key) is not classifier_of(model) for key in marked)
    assert list(model.state_dict()) == state
    assert not torch.equal(model(x), before) and model(x).isfinite().all()


def test_the_linear_model_has_nothing_to_mark() -> None:
    with pytest.raises(
        ConfigError, match=r"no convolution and no hidden linear layer.*choose a model with hidden layers"
    ):
        attach(build("linear", (64,)), mode="add", amplitude=0.1, period=1.0)


def permuted_mlp(model: nn.Module, order: Tensor) -> nn.Module:
    """The first hidden layer's neurons in another order: rows of layer 0, columns of layer 2."""
    other = copy.deepcopy(model)
    first, second = other.get_submodule("0"), other.get_submodule("2")
    first.weight.data, first.bias.data = first.weight.data[order], first.bias.data[order]
    second.weight.data = second.weight.data[:, order]
    return other


@pytest.mark.parametrize("mode", MODES)
def test_permuting_hidden_neurons_changes_the_function_only_if_they_know_their_place(mode: Mode) -> None:
    """Swapping neurons a and b of mode add, with all ReLUs active, changes the pre-activations of the next layer by

        A (e_b - e_a) (w_a - w_b),      w_j the column of layer 2 that reads neuron j:

    each keeps its weights but carries the other's mark.
    """
    model = build("mlp", (64,), hidden=(8, 6)).double()
    first = model.get_submodule("0")
    assert isinstance(first, nn.Linear)
    with torch.no_grad():
        first.bias += 50  # every ReLU of the first layer is active
    x = samples(5, 64, dtype=torch.float64)
    a, b = 1, 6
    order = torch.arange(8)
    order[[a, b]] = order[[b, a]]
    other = permuted_mlp(model, order)
    torch.testing.assert_close(other(x), model(x), rtol=1e-12, atol=1e-12)
    for each in (model, other):
        attach(each, mode=mode, amplitude=0.1, period=1.0)
    difference = (model(x) - other(x)).abs().max()
    assert difference > 1e-3
    if mode == "add":
        reads = model.get_submodule("2")
        assert isinstance(reads, nn.Linear)
        e = encoding(8, 1.0)
        assert (e[a] - e[b]).abs() > 1  # sin(pi/4) and -1
        until = [nn.Sequential(*list(each.children())[:2]) for each in (model, other)]
        assert (until[0](x) > 0).all()
        plain = [reads(until[0](x)), other.get_submodule("2")(until[1](x))]
        w = reads.weight
        torch.testing.assert_close(
            plain[1] - plain[0], (0.1 * (e[b] - e[a]) * (w[:, a] - w[:, b])).expand(5, 6), rtol=1e-9, atol=1e-10
        )


@pytest.mark.parametrize("mode", MODES)
def test_permuting_channels_with_their_batch_norm_does_so_too(mode: Mode) -> None:
    model = build("cnn", (64,), channels=(6, 4)).double()
    model(samples(32, 64, dtype=torch.float64))  # running statistics that differ by channel
    model.eval()
    order = torch.tensor([3, 0, 5, 1, 2, 4])
    other = copy.deepcopy(model)
    conv, norm, reads = (other.get_submodule(name) for name in ("1", "2", "5"))
    conv.weight.data = conv.weight.data[order]
    for key, value in norm.state_dict(keep_vars=True).items():
        if key != "num_batches_tracked":
            value.data = value.data[order]
    reads.weight.data = reads.weight.data[:, order]
    x = samples(5, 64, dtype=torch.float64)
    assert not torch.equal(other.state_dict()["2.running_var"], model.state_dict()["2.running_var"])
    torch.testing.assert_close(other(x), model(x), rtol=1e-12, atol=1e-12)
    for each in (model, other):
        attach(each, mode=mode, amplitude=0.25, period=1.0)
    assert (model(x) - other(x)).abs().max() > 1e-3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet20"])
def test_marked_networks_can_be_copied_pickled_and_run_as_tensor_programs(name: str, mode: Mode) -> None:
    model = build(name, (64,)).eval()
    plain = copy.deepcopy(model)
    attach(model, mode=mode, amplitude=0.25, period=1.0)
    x = samples(4, 64)
    outputs = model(x)
    assert not torch.equal(outputs, plain(x))
    assert torch.equal(copy.deepcopy(model)(x), outputs)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), outputs)
    own = {key: parameter.detach() for key, parameter in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], batch: Tensor) -> Tensor:
        return functional_call(model, parameters, (batch,)).pow(2).mean()

    stacked = {key: torch.stack([tensor, 0.5 * tensor]) for key, tensor in own.items()}
    gradients = vmap(grad(loss), (0, None))(stacked, x)
    for at, scale in enumerate((1.0, 0.5)):
        single = grad(loss)({key: scale * tensor for key, tensor in own.items()}, x)
        for key in own:
            torch.testing.assert_close(gradients[key][at], single[key], rtol=1e-3, atol=1e-5, msg=key)
    loss_of_copy = model(x).pow(2).mean()
    loss_of_copy.backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, grad(loss)(own, x)[key], rtol=1e-4, atol=1e-6, msg=key)


def test_a_block_whose_order_cannot_be_told_is_a_sentence() -> None:
    block = nn.Sequential()
    block.conv1, block.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)
    block.bn1, block.bn2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
    model = nn.Sequential(block, nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(ConfigError, match=r"registers '0\.bn2' apart from its convolution.*directly after its Conv2d"):
        attach(model, mode="add", amplitude=0.1, period=1.0)
    assert hooks(model) == {}


def test_a_mode_that_is_neither_is_a_sentence() -> None:
    model = build("mlp", (64,))
    attach(model, mode="times", amplitude=0.1, period=1.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="mode='times' was given; expected add or mul"):
        model(samples(1, 64))
