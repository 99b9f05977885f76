"""Models: shapes, parameter counts, initial bits, heads, representations, and BatchNorm with a batch of one."""

import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional

from fedsign import plugins
from fedsign.errors import ConfigError
from fedsign.models.batch_norm import freeze_batch_norm, has_batch_norm
from fedsign.models.features import classifier_of, forward_with_features, recorded_features
from fedsign.registry import KINDS
from fedsign.seeding import Purpose, global_stream
from fedsign.torchvision_shim import torchvision

DIGITS, MNIST, CIFAR = (64,), (1, 28, 28), (3, 32, 32)
LANGUAGE = {"gpt", "transformers"}  # test_gpt.py, test_causal_lm.py
MODELS = [name for name in KINDS["model"].table if name not in LANGUAGE]
TOO_SMALL = {("niid_cnn", DIGITS)} | {(name, shape) for name in ("vgg8", "vgg11", "vgg16") for shape in (DIGITS, MNIST)}
WITH_HEAD = [name for name in MODELS if "projection_dim" in plugins.names_of("model", name)]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(name: str, shape: tuple[int, ...] = CIFAR, outputs: int = 10, *, seed: int = 0, **settings: Any) -> nn.Module:
    with global_stream(seed, Purpose.MODEL):
        model: nn.Module = plugins.build("model", name, settings, shape, outputs)
    return model


def samples(n: int, shape: tuple[int, ...], seed: int = 1) -> Tensor:
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed))


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(one) == list(other)
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("shape", [DIGITS, MNIST, CIFAR], ids=["digits", "mnist", "cifar"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_all_its_parameters_or_says_what_to_do(name: str, shape: tuple[int, ...]) -> None:
    if (name, shape) in TOO_SMALL:
        with pytest.raises(ConfigError, match=r"or more, but a sample has the shape .*; use model\.name=mlp"):
            build(name, shape)
        return
    model = build(name, shape, 7)
    outputs = model(samples(2, shape))
    assert outputs.shape == (2, 7)
    with global_stream(0, Purpose.TRAINING):
        functional.cross_entropy(outputs, torch.tensor([0, 6])).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all() and parameter.grad.abs().sum() > 0, key


@pytest.mark.parametrize("name", MODELS)
def test_the_seed_alone_decides_the_initial_bits(name: str) -> None:
    outside, python = torch.get_rng_state(), random.getstate()
    one, again, other = build(name), build(name), build(name, seed=1)
    assert torch.equal(torch.get_rng_state(), outside) and random.getstate() == python
    assert_same_bits(tensors(one), tensors(again))
    assert not torch.equal(classifier_of(one).weight, classifier_of(other).weight)


def conv(k: int, *widths: int, bias: int = 1) -> int:
    """Parameters of k x k convolutions from width to width."""
    return sum(k * k * a * b + bias * b for a, b in pairwise(widths))


def full(*widths: int) -> int:
    """Parameters of linear layers from width to width."""
    return sum(a * b + b for a, b in pairwise(widths))


VGG11 = (3, 64, 128, 256, 256, 512, 512, 512, 512)
VGG16 = (3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
HEAD = full(512, 512, 512, 10)
RESNET20 = (
    conv(3, 3, *[16] * 7, bias=0) + conv(3, 16, *[32] * 6, bias=0) + conv(3, 32, *[64] * 6, bias=0)
    + 2 * (7 * 16 + 6 * 32 + 6 * 64) + full(64, 10)
)  # fmt: skip
RESNET18 = (
    conv(3, 3, *[64] * 5, bias=0) + conv(3, 64, *[128] * 4, bias=0) + conv(3, 128, *[256] * 4, bias=0)
    + conv(3, 256, *[512] * 4, bias=0) + conv(1, 64, 128, bias=0) + conv(1, 128, 256, bias=0)
    + conv(1, 256, 512, bias=0)
    + 2 * (5 * 64 + 5 * 128 + 5 * 256 + 5 * 512) + full(512, 10)
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "shape", "settings", "derived", "number"),
    [
        ("mcmahan_cnn", MNIST, {}, conv(5, 1, 32, 64) + full(7 * 7 * 64, 512, 10), 1_663_370),  # the paper's number
        ("niid_cnn", CIFAR, {}, conv(5, 3, 6, 16) + full(5 * 5 * 16, 120, 84, 10), 62_006),
        ("niid_cnn", MNIST, {}, conv(5, 1, 6, 16) + full(4 * 4 * 16, 120, 84, 10), 44_426),
        ("pfl_cnn", CIFAR, {}, conv(3, 3, 32, 64) + full(14 * 14 * 64, 128, 10), 1_626_442),
        ("vgg8", CIFAR, {}, conv(3, 3, 64, 128, 256, 512, 512) + HEAD, 4_441_226),
        ("vgg8", CIFAR, {"hidden": []}, conv(3, 3, 64, 128, 256, 512, 512) + full(512, 10), 3_915_914),
        ("vgg11", CIFAR, {}, conv(3, *VGG11) + HEAD, 9_220_480 + HEAD),  # torchvision's vgg11().features
        ("vgg16", CIFAR, {}, conv(3, *VGG16) + HEAD, 14_714_688 + HEAD),
        ("vgg8", CIFAR, {"batch_norm": True}, 4_441_226 + 2 * (64 + 128 + 256 + 512 + 512), 4_444_170),
        ("vgg16", CIFAR, {"batch_norm": True}, conv(3, *VGG16) + 2 * sum(VGG16[1:]) + HEAD, 14_723_136 + HEAD),
        ("resnet20", CIFAR, {}, RESNET20, 269_722),  # option A: shortcuts without parameters
        ("resnet18", CIFAR, {}, RESNET18, 11_173_962),  # torchvision's 11,689,512 with another conv1 and fc
        ("mlp", DIGITS, {"hidden": [64, 64]}, full(64, 64, 64, 10), 8_970),
    ],
)
def test_the_number_of_parameters_is_the_papers(
    name: str, shape: tuple[int, ...], settings: dict[str, Any], derived: int, number: int
) -> None:
    assert derived == number
    assert num_parameters(build(name, shape, **settings)) == number


def test_torchvisions_numbers_lead_to_ours() -> None:
    models = torchvision("torchvision.models")
    assert num_parameters(models.vgg11(weights=None).features) == 9_220_480
    imagenet = num_parameters(models.resnet18(weights=None))
    assert imagenet - conv(7, 3, 64, bias=0) - full(512, 1000) + conv(3, 3, 64, bias=0) + full(512, 10) == 11_173_962


def test_cnn_and_mlp_start_with_the_bits_of_their_layers_in_a_row() -> None:
    with global_stream(5, Purpose.MODEL):
        by_hand = nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(128, 10),
        )  # fmt: skip
    assert_same_bits(tensors(build("cnn", DIGITS, seed=5)), tensors(by_hand))
    with global_stream(5, Purpose.MODEL):
        by_hand = nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
        )  # fmt: skip
    assert_same_bits(tensors(build("mlp", DIGITS, seed=5)), tensors(by_hand))


@pytest.mark.needs("images")
def test_in_a_vgg_batch_norm_stands_between_convolution_and_relu() -> None:
    plain, normed = build("vgg11"), build("vgg11", batch_norm=True)
    kinds = [type(layer) for layer in normed.children()]
    assert kinds.count(nn.BatchNorm2d) == 8
    for at, kind in enumerate(kinds):
        if kind is nn.BatchNorm2d:
            assert kinds[at - 1] is nn.Conv2d and kinds[at + 1] is nn.ReLU
    assert [kind for kind in kinds if kind is not nn.BatchNorm2d] == [type(layer) for layer in plain.children()]


@pytest.mark.needs("images")
def test_a_deep_vgg_without_batch_norm_starts_alive() -> None:
    """He normal, Var(w) = 2 / (9 width_out), carries E[h^2] times width_in / width_out through conv and ReLU.

    Hence at least sqrt(3 / 512) in the end, where poolings only add (a half of it, for the zeros at the borders).
    torch's default has Var(w) = 1 / (3 fan_in), a sixth of the power for each of the 13 layers, if biases are 0.
    """
    model = build("vgg16", hidden=[])
    convolutions = [layer for layer in model.children() if isinstance(layer, nn.Conv2d)]
    assert convolutions[-1].weight.std().item() == pytest.approx((2 / (9 * 512)) ** 0.5, rel=0.01)
    assert not any(convolution.bias.any() for convolution in convolutions if convolution.bias is not None)

    def size_of_representation() -> float:
        return forward_with_features(model, {}, samples(4, CIFAR))[1].detach().pow(2).mean().sqrt().item()

    alive = size_of_representation()
    assert 0.5 * (3 / 512) ** 0.5 < alive < 10
    with global_stream(0, Purpose.MODEL):
        for convolution in convolutions:
            convolution.reset_parameters()
            nn.init.zeros_(convolution.get_parameter("bias"))
    assert size_of_representation() < alive / 100


@pytest.mark.needs("images")
def test_resnet20s_shortcut_takes_every_second_pixel_and_pads_channels_with_zeros() -> None:
    """With the second BatchNorm at zero a block is relu(shortcut)."""
    block = build("resnet20").get_submodule("6")  # conv, bn, relu, three blocks of 16, and the first of 32
    bn2 = block.get_submodule("bn2")
    assert isinstance(bn2, nn.BatchNorm2d) and bn2.num_features == 32
    nn.init.zeros_(bn2.weight)
    x = samples(2, (16, 6, 6))
    expected = torch.zeros(2, 32, 3, 3)
    expected[:, 8:24] = x[:, :, [0, 2, 4]][:, :, :, [0, 2, 4]].clamp(min=0)
    assert torch.equal(block(x), expected)


@pytest.mark.parametrize("name", WITH_HEAD)
def test_a_projection_head_stands_below_the_classifier(name: str) -> None:
    """h -> Linear(h, h) -> ReLU -> Linear(h, 12) -> classifier, as in MOON's code, and nothing else changes."""
    plain, model = build(name), build(name, projection_dim=12)
    width = classifier_of(plain).in_features
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    shapes = [(each.in_features, each.out_features) for each in linears[-3:]]
    assert shapes == [(width, width), (width, 12), (12, 10)]
    assert linears[-1] is classifier_of(model)
    assert num_parameters(model) - num_parameters(plain) == full(width, width, 12, 10) - full(width, 10)
    assert list(tensors(plain)) == list(tensors(build(name, projection_dim=0)))


def test_every_model_but_the_linear_one_takes_a_head() -> None:
    assert set(MODELS) - set(WITH_HEAD) == {"linear"}


def test_with_a_head_the_representation_is_the_projection() -> None:
    model = build("niid_cnn", projection_dim=12).eval()
    layers = list(model.children())
    h = nn.Sequential(*layers[:-4])(x := samples(3, CIFAR))
    first, second, last = (layers[at] for at in (-4, -2, -1))
    outputs, z = forward_with_features(model, {}, x)
    torch.testing.assert_close(z, second(first(h).relu()))
    torch.testing.assert_close(outputs, last(z))


@pytest.mark.parametrize("name", ["mlp", "linear", "cnn", "niid_cnn", "resnet20", "resnet18"])
def test_the_classifier_of_the_representation_is_the_output(name: str) -> None:
    model = build(name)
    outputs, z = forward_with_features(model, {}, samples(2, CIFAR))
    assert z.shape == (2, classifier_of(model).in_features)
    torch.testing.assert_close(classifier_of(model)(z), outputs)


def test_the_classifier_is_the_linear_layer_of_that_name_or_else_the_last_one() -> None:
    model = nn.Sequential()
    model.classifier, model.auxiliary = nn.Linear(4, 3), nn.Linear(4, 5)
    assert classifier_of(model) is model.classifier
    model.classifier = nn.Identity()
    assert classifier_of(model) is model.auxiliary


def test_a_model_without_a_linear_layer_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"has no nn\.Linear, but expected a linear classifier.*; end the model with"):
        forward_with_features(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()), {}, samples(1, MNIST))


def test_a_model_that_passes_by_its_last_linear_layer_is_a_sentence() -> None:
    model = nn.Sequential(nn.Flatten())
    model[0].unused = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"made no use of its last nn\.Linear"):
        forward_with_features(model, {}, samples(1, DIGITS))


def test_a_pass_with_other_tensors_changes_neither_the_model_nor_them() -> None:
    model, other = build("cnn", DIGITS), build("cnn", DIGITS, seed=1)
    mine, given = tensors(model), tensors(other)
    before = tensors(other)
    outputs, z = forward_with_features(model, given, samples(5, DIGITS))
    assert_same_bits(tensors(model), mine)
    assert_same_bits(given, before)
    assert all(layer.track_running_stats for layer in model.modules() if isinstance(layer, nn.BatchNorm2d))
    assert all(not module._forward_pre_hooks for module in model.modules())
    torch.testing.assert_close(outputs, other(samples(5, DIGITS)))  # in training mode: by the batch's statistics
    assert not torch.equal(other.state_dict()["2.running_mean"], before["2.running_mean"])  # that pass moved them
    assert z.shape == (5, 128)


def test_a_pass_that_moves_buffers_is_an_ordinary_training_pass() -> None:
    model = build("cnn", DIGITS)
    given = tensors(model)
    outputs, _ = forward_with_features(model, given, samples(5, DIGITS), moves_buffers=True)
    torch.testing.assert_close(outputs, model(samples(5, DIGITS)), rtol=0, atol=0)
    assert_same_bits(given, tensors(model))
    assert given["2.num_batches_tracked"] == 1


@pytest.mark.parametrize("name", ["mlp", "cnn", "mcmahan_cnn", "resnet20"])
def test_representations_of_many_models_in_one_pass_are_those_of_each(name: str) -> None:
    """vmap over parameters; the buffers are mapped in one case and shared by all models in the other."""
    settings: dict[str, Any] = {"projection_dim": 6} if name == "mlp" else {}
    models = [build(name, DIGITS, seed=seed, **settings) for seed in range(3)]
    parameters, buffers = stack_module_state(models)
    shared = dict(models[0].named_buffers())
    x = samples(4, DIGITS)

    def features(own: dict[str, Tensor], other: dict[str, Tensor]) -> Tensor:
        return forward_with_features(models[0], {**own, **other}, x)[1]

    expected = torch.stack([forward_with_features(model, {}, x)[1] for model in models])
    torch.testing.assert_close(vmap(features)(parameters, buffers), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(vmap(features, (0, None))(parameters, shared), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_gradients_of_a_representation_are_autograds_also_under_vmap(name: str) -> None:
    model = build(name, DIGITS)
    x = samples(6, DIGITS)
    own = {key: parameter.detach() for key, parameter in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], batch: Tensor) -> Tensor:
        return forward_with_features(model, parameters, batch)[1].pow(2).mean()

    with recorded_features(model) as features:
        model(x)
        features().pow(2).mean().backward()
    transformed = grad(loss)(own, x)
    both = vmap(grad(loss), (None, 0))(own, x.view(2, 3, 64))
    halves = [grad(loss)(own, half) for half in x.split(3)]
    for key, parameter in model.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(transformed[key], expected, msg=key)
        torch.testing.assert_close(both[key], torch.stack([half[key] for half in halves]), rtol=1e-4, atol=1e-6)
    assert max(value.abs().max() for value in transformed.values()) > 0


def test_which_models_have_batch_norm() -> None:
    assert {name for name in MODELS if has_batch_norm(build(name))} == {"cnn", "resnet20", "resnet18"} & {*MODELS}
    assert all(has_batch_norm(build(name, batch_norm=True)) for name in MODELS if name.startswith("vgg"))
    assert has_batch_norm(nn.Sequential(nn.BatchNorm1d(2)))


@pytest.mark.needs("images")
def test_where_a_batch_of_one_cannot_train() -> None:
    """BatchNorm needs two values per channel: among ours, only where an image shrinks to 1x1 before it.

    ResNet-18 halves 8x8 three times; VGG's last convolutions see 2x2, since the last maxpool comes after them.
    """
    raising = set()
    for name in MODELS:
        for shape in (DIGITS, MNIST, CIFAR):
            for settings in ({"batch_norm": True}, {}) if name.startswith("vgg") else ({},):
                if (name, shape) in TOO_SMALL:
                    continue
                model = build(name, shape, **settings)
                assert model.training and model(samples(2, shape)).isfinite().all()
                try:
                    model(samples(1, shape))
                except ValueError as error:
                    assert "more than 1 value per channel" in str(error) and has_batch_norm(model)
                    raising.add((name, shape))
                assert model.eval()(samples(1, shape)).isfinite().all()
    assert raising == {("resnet18", DIGITS)}


def test_batch_norm_over_vectors_cannot_train_on_one_sample_either() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    assert has_batch_norm(model)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(samples(1, (3,)))
    assert model(samples(2, (3,))).shape == (2, 2)


@pytest.mark.needs("images")
def test_frozen_batch_norm_trains_on_a_batch_of_one_and_keeps_its_statistics() -> None:
    model = build("resnet18", DIGITS)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(samples(1, DIGITS))
    freeze_batch_norm(model)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for outputs in (model(samples(1, DIGITS)), forward_with_features(model, {}, samples(1, DIGITS))[0]):
        model.zero_grad()
        functional.cross_entropy(outputs, torch.tensor([3])).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        assert_same_bits(dict(model.named_buffers()), before)
    assert model.training


@pytest.mark.needs("images")
@pytest.mark.parametrize("file", ["net.safetensors", "net.pt"])
def test_resnet18_takes_torchvisions_weights_from_a_file(tmp_path: Path, file: str) -> None:
    path = tmp_path / file
    with global_stream(3, Purpose.MODEL):
        imagenet = tensors(torchvision("torchvision.models").resnet18(weights=None))
    if file.endswith("safetensors"):
        save_file(imagenet, path)
    else:
        torch.save(imagenet, path)
    own, loaded = tensors(build("resnet18")), tensors(build("resnet18", weights=str(path)))
    different = {name for name in own if not torch.equal(own[name], loaded[name])}
    assert "layer1.0.conv1.weight" in different
    kept = {"conv1.weight", "fc.weight", "fc.bias"}
    assert not different & kept  # of ImageNet's shape in the file
    assert_same_bits(
        {name: loaded[name] for name in own if name not in kept}, {n: imagenet[n] for n in own if n not in kept}
    )


@pytest.mark.needs("images")
def test_weights_that_do_not_fit_are_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.weights='/no/such\.pt' cannot be opened"):
        build("resnet18", weights="/no/such.pt")
    with pytest.raises(ConfigError, match=r"cannot be opened"):
        build("resnet18", weights=str(tmp_path / "none.safetensors"))
    garbage = [tmp_path / "garbage.pt", tmp_path / "garbage.safetensors"]
    for path in garbage:
        path.write_bytes(b"no tensors at all")
        with pytest.raises(ConfigError, match=r"cannot be read; expected a \.safetensors file"):
            build("resnet18", weights=str(path))
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ConfigError, match=r"holds no state_dict; save model\.state_dict\(\) alone"):
        build("resnet18", weights=str(tmp_path / "list.pt"))
    save_file(tensors(build("linear")), tmp_path / "linear.safetensors")
    with pytest.raises(
        ConfigError, match=r"does not fit the model: '1\.bias' is unknown to the model, .* and \d+ more; give"
    ):
        build("resnet18", weights=str(tmp_path / "linear.safetensors"))
    right = tensors(build("resnet18"))
    save_file(right | {"layer1.0.bn1.weight": torch.ones(3)}, tmp_path / "shape.safetensors")
    with pytest.raises(ConfigError, match=r"'layer1\.0\.bn1\.weight' is \[3\] instead of \[64\]; give"):
        build("resnet18", weights=str(tmp_path / "shape.safetensors"))
    del right["layer4.1.bn2.bias"]
    save_file(right, tmp_path / "missing.safetensors")
    with pytest.raises(ConfigError, match=r"'layer4\.1\.bn2\.bias' is missing in the file; give"):
        build("resnet18", weights=str(tmp_path / "missing.safetensors"))


@pytest.mark.needs("images")
def test_dropout_comes_from_the_stream_that_is_lent_and_zero_is_none() -> None:
    model = build("vgg8", CIFAR, dropout=0.5)
    assert sum(isinstance(layer, nn.Dropout) for layer in model.children()) == 2
    assert not any(isinstance(layer, nn.Dropout) for layer in build("vgg8", CIFAR, dropout=0.0).children())
    passes = []
    for seed in (0, 0, 1):
        with global_stream(seed, Purpose.TRAINING):
            passes.append(functional_call(model, {}, (samples(2, CIFAR),)))
    assert torch.equal(passes[0], passes[1]) and not torch.equal(passes[0], passes[2])
