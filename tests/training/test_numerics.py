"""Layout, precision, compilation: what they may change (rounding), what they must not, and what is refused."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from clients.state.store import ClientStore
from clients.trainer import SequentialTrainer, check_training
from clients.working_model import WorkingModel
from fedsign import plugins
from fedsign.config import from_dict
from fedsign.data.base import Dataset, Samples
from fedsign.errors import ConfigError
from fedsign.models.channels_last import laid_out, prepare
from fedsign.numerics import Numerics
from fedsign.records import ObjectiveSpec, Tensors, TrainReply, tensors_of
from fedsign.seeding import Purpose, global_stream
from fedsign.workload import Workload
from simulations import run
from tests.training.requests import request

CPU = torch.device("cpu")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def images(seed: int) -> Dataset:
    """Noise of CIFAR's shape on a bright or a dark ground, which is the label."""
    targets = torch.arange(60) % 2
    features = (drawn(60, 3, 32, 32) + 0.5 * (2 * targets - 1)[:, None, None, None]).float()
    part = Samples(features=features, targets=targets)
    return Dataset(train=part, test=part, class_names=("dark", "bright"))


def workload(**changes: Any) -> Workload:
    tree = {
        "data": {"name": f"{__name__}:images"},
        "partition": {"name": "iid", "num_clients": 4},
        "server": {"cohort_size": 2},
        "model": {"name": "pfl_cnn", "channels": [4, 8], "hidden": 16},
        "client": {"local_epochs": 1, "batch_size": 6},
    }
    return Workload(from_dict({**tree, **changes}))


def trained(work: Workload, folder: Path, objective: ObjectiveSpec | None = None) -> Tensors:
    asked = request(tensors_of(work.make_model()), 1, objective=objective or ObjectiveSpec())
    (reply,) = SequentialTrainer(work).train_many([asked], ClientStore(folder))
    assert isinstance(reply, TrainReply), reply
    return reply.tensors


class OfItsOwn(nn.Module):
    """A user's model that calls functions, and reads what comes before the pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.classifier = nn.Linear(4 * 15 * 15 + 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        before = self.features[1](self.features[0](x))
        flat = torch.flatten(self.features[2](before), 1)
        outputs: Tensor = self.classifier(torch.cat([flat, before.mean((2, 3))], dim=1))
        return outputs


def of_its_own(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return OfItsOwn()


MODELS: list[tuple[str, dict[str, Any]]] = [
    ("pfl_cnn", {"channels": (4, 8), "hidden": 16}),
    ("mcmahan_cnn", {"channels": (4, 8), "hidden": 16}),
    ("niid_cnn", {}),
    ("cnn", {"channels": (4, 8)}),
    ("resnet20", {}),
    (f"{__name__}:of_its_own", {}),
]


def three_steps(name: str, settings: dict[str, Any], layout: Any, *, contrasts: bool = False) -> Tensors:
    """In float64, of one client with a stream of its own, for the dropout."""
    with global_stream(0, Purpose.MODEL):
        module: nn.Module = plugins.build("model", name, settings, (3, 32, 32), 2)
    model = WorkingModel(module.double().train(), Numerics(device=CPU, channels_last=layout))
    start = {key: parameter.detach().clone() for key, parameter in model.parameters.items()}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    with global_stream(0, Purpose.TRAINING):
        for step in range(3):
            features, targets = drawn(5, 3, 32, 32, seed=step), torch.arange(5) % 2
            optimizer.zero_grad()
            if contrasts:
                outputs, z = model.outputs_and_features(features)
                loss = (
                    nn.functional.cross_entropy(outputs, targets)
                    + (z - model.features_of(start, features)).square().mean()
                )
            else:
                loss = nn.functional.cross_entropy(model.outputs(features), targets)
            loss.backward()
            optimizer.step()
    return model.copies()


@pytest.mark.parametrize("contrasts", [False, True], ids=["plain", "contrast"])
@pytest.mark.parametrize(("name", "settings"), MODELS, ids=[name.rpartition(":")[2] for name, _ in MODELS])
def test_the_layout_changes_nothing_but_rounding(name: str, settings: dict[str, Any], contrasts: bool) -> None:
    """Dropout included: the same values fall out."""
    usual, last = (three_steps(name, settings, layout, contrasts=contrasts) for layout in ("off", "on"))
    assert list(usual) == list(last)
    for key, tensor in usual.items():
        assert last[key].is_contiguous()
        torch.testing.assert_close(last[key], tensor, rtol=1e-10, atol=1e-12)


def test_pooling_before_relu_gives_the_same_bits_also_where_values_are_tied() -> None:
    """Whole numbers make ties; the gradient has to go to the same one of them."""

    def layers() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(2, 3, 3, bias=False), nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)), nn.Flatten())

    plain, prepared = layers(), layers()
    weight = drawn(3, 2, 3, 3).sign().float()
    features = laid_out(drawn(4, 2, 10, 10, seed=1).round().float())
    prepare(prepared)
    assert [type(layer) for layer in prepared[1]] == [nn.MaxPool2d, nn.ReLU]  # type: ignore[union-attr]
    gradients, outputs = [], []
    for model in (plain, prepared):
        model.load_state_dict({"0.weight": weight})
        found = model(features)
        (found * torch.arange(found.numel()).view_as(found)).sum().backward()
        outputs.append(found)
        gradients.append(next(model.parameters()).grad)
    assert (outputs[0] == 0).float().mean() > 0.1
    assert torch.equal(*outputs)
    assert torch.equal(*gradients)  # type: ignore[arg-type]


def test_layers_change_places_only_where_nobody_reads_between_them() -> None:
    own = OfItsOwn()
    prepare(own)
    assert [type(layer) for layer in own.features] == [nn.Conv2d, nn.ReLU, nn.MaxPool2d]
    hooked = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2))
    hooked[0].register_forward_hook(lambda module, inputs, output: None)
    prepare(hooked)
    assert [type(layer) for layer in hooked] == [nn.ReLU, nn.MaxPool2d]


@pytest.mark.parametrize(("layout", "is_last"), [("auto", True), ("on", True), ("off", False)])
def test_the_layout_reaches_the_convolutions_and_gradients_come_back_in_it(layout: Any, is_last: bool) -> None:
    module = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.5), nn.Flatten(), nn.Linear(900, 2)
    )
    model = WorkingModel(module.train(), Numerics(device=CPU, channels_last=layout))
    seen: list[bool] = []

    def look(images: Tensor) -> None:
        seen.append(images.is_contiguous(memory_format=torch.channels_last))

    def hook(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        look(output)
        output.register_hook(look)

    for layer in module[:3]:
        layer.register_forward_hook(hook)
    model.outputs(drawn(2, 3, 32, 32).float()).sum().backward()
    assert seen == [is_last] * 6


def test_models_without_convolutions_keep_their_bits_in_any_layout(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"model": {"name": "mlp", "hidden": [8]}}
    results = [
        trained(workload(**changes, engine={"channels_last": layout}), tmp_path) for layout in ("auto", "off", "on")
    ]
    for name, tensor in results[0].items():
        assert all(torch.equal(tensor, other[name]) for other in results[1:])


def test_a_clients_training_and_the_evaluation_are_the_same_in_both_layouts(tmp_path: Path) -> None:
    last, usual = (workload(engine={"channels_last": layout}) for layout in ("auto", "off"))
    one, other = trained(last, tmp_path), trained(usual, tmp_path)
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-4, atol=1e-6)
    model = last.make_model()
    model.load_state_dict(one)
    assert last.evaluate(model) == pytest.approx(usual.evaluate(model), rel=1e-5)


class Probe(nn.Module):
    """Notes the type of what its layer puts out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(64, 10), set[torch.dtype]()

    def forward(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.layer(features)
        self.seen.add(outputs.dtype)
        return outputs


@pytest.mark.parametrize(("precision", "dtype"), [("float32", torch.float32), ("bf16", torch.bfloat16)])
def test_bf16_is_the_precision_of_passes_and_float32_that_of_all_else(precision: Any, dtype: torch.dtype) -> None:
    probe = Probe()
    model = WorkingModel(probe.train(), Numerics(device=CPU, precision=precision))
    outputs, z = model.outputs_and_features(drawn(4, 64).float())
    outputs.sum().backward()
    z_of_others = model.features_of(tensors_of(probe), drawn(4, 64).float())
    work = Workload(from_dict({"engine": {"precision": precision}}))
    assert work.evaluate(probe)["loss"] > 0
    assert probe.seen == {dtype}
    assert {outputs.dtype, z.dtype, z_of_others.dtype, probe.layer.weight.dtype} == {torch.float32}
    assert probe.layer.weight.grad is not None and probe.layer.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("objective", ["plain", "fedsign", "moon", "scaffold"])
def test_a_step_in_bf16_is_one_in_float32_to_three_digits(tmp_path: Path, objective: str) -> None:
    changes: dict[str, Any] = {"model": {"name": "mcmahan_cnn", "channels": [4, 8], "hidden": 16}}
    spec = ObjectiveSpec(name=objective)
    whole, reduced = (
        trained(workload(**changes, engine={"precision": precision}), tmp_path / precision, spec)
        for precision in ("float32", "bf16")
    )
    start = tensors_of(workload(**changes).make_model())
    moved = torch.cat([(whole[name] - start[name]).flatten() for name in start])
    error = torch.cat([(whole[name] - reduced[name]).flatten() for name in start])
    assert {tensor.dtype for tensor in reduced.values()} == {torch.float32}
    assert 0 < error.norm() < 0.1 * moved.norm()


def test_a_network_learns_the_digits_in_bf16_as_in_float32_and_repeats_its_bits(tiny: dict[str, Any]) -> None:
    tiny |= {"rounds": 4, "model": {"name": "cnn"}, "client": {"local_epochs": 2, "lr": 0.1}}
    whole, reduced, again = (run({**tiny, "engine": {"precision": name}}) for name in ("float32", "bf16", "bf16"))
    assert whole.rounds[-1]["accuracy"] > 0.9
    assert reduced.rounds[-1]["accuracy"] == pytest.approx(whole.rounds[-1]["accuracy"], abs=0.03)
    assert reduced.rounds == again.rounds != whole.rounds
    assert reduced.config.engine.precision == "bf16"


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"precision": "fp16"}, r"engine.precision='fp16' was given, but expected 'float32' or 'bf16'"),
        ({"channels_last": True}, r"engine.channels_last=true was given, but expected 'auto', 'on' or 'off'"),
        ({"tf32": "maybe"}, r"engine.tf32='maybe' was given, but expected true or false"),
        ({"presicion": "bf16"}, r"unknown key 'engine.presicion'. Did you mean 'precision'"),
    ],
)
def test_what_engine_does_not_know_is_refused(engine: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        from_dict({"engine": engine})


@pytest.mark.needs("cohort")
@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (
            {"precision": "bf16"},
            r"client.path=cohort was given, but engine.precision=bf16 is for one client after another",
        ),
        ({"compile": True}, r"client.path=cohort was given, but engine.compile=true is for one client after another"),
    ],
)
def test_stacks_refuse_what_they_do_not_do_and_auto_goes_one_after_another(engine: dict[str, Any], said: str) -> None:
    from clients.cohort.paths import on_path

    def work(path: str) -> Workload:
        return Workload(from_dict({"engine": engine, "client": {"path": path}, "model": {"hidden": [8]}}))

    with pytest.raises(ConfigError, match=said):
        check_training(work("cohort"), ObjectiveSpec())
    assert on_path(work("auto"), ObjectiveSpec()).config.client.path == "sequential"


def test_a_missing_compiler_is_a_sentence_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        ConfigError, match=r"engine.compile=true was given, but .* compiler 'no-such-compiler', which is not"
    ):
        check_training(Workload(from_dict({"engine": {"compile": True}})), ObjectiveSpec())
    check_training(Workload(from_dict({"engine": {"compile": False}})), ObjectiveSpec())


def test_flags_of_cuda_are_lent_and_given_back() -> None:
    def flags() -> list[bool]:
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        return [cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32]

    before = flags()
    for tf32 in (False, True):
        with Numerics(device=torch.device("cuda"), tf32=tf32).repeatable():
            assert flags() == [True, False, tf32, tf32]
        assert flags() == before
    with Numerics(device=CPU).repeatable():
        assert flags() == before


SMALL_CNN: dict[str, Any] = {"model": {"name": "mcmahan_cnn", "channels": [4, 8], "hidden": 16}}
COMPILED = """
import sys
from pathlib import Path
from safetensors.torch import save_file
from tests.training.test_numerics import SMALL_CNN, trained, workload
folder = Path(sys.argv[1])
save_file(trained(workload(**SMALL_CNN, engine={"compile": True}), folder), folder / "compiled.safetensors")
"""


@pytest.mark.slow
def test_a_compiled_model_trains_as_the_plain_one(tmp_path: Path) -> None:
    """In a process of its own: the compiler leaves threads and a variable of the environment behind."""
    subprocess.run([sys.executable, "-c", COMPILED, str(tmp_path)], check=True, cwd=Path(__file__).parents[2])
    compiled = load_file(tmp_path / "compiled.safetensors")
    for name, tensor in trained(workload(**SMALL_CNN), tmp_path).items():
        torch.testing.assert_close(compiled[name], tensor, rtol=1e-4, atol=1e-5)
