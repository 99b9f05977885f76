"""A model that starts from a file, or from scaled random weights."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fedsign.config import from_dict
from fedsign.errors import ConfigError
from fedsign.models.weights import load_weights
from fedsign.records import tensors_of
from fedsign.sections import ClientSection, Table, composed
from fedsign.workload import Workload


def work(weights: Path | str = "", *, seed: int = 0, hidden: int = 8) -> Workload:
    return Workload(from_dict({"seed": seed, "model": {"name": "mlp", "hidden": [hidden], "start": str(weights)}}))


def test_the_files_weights_are_the_models(tmp_path: Path) -> None:
    others = tensors_of(work(seed=5).make_model())
    save_file(others, tmp_path / "model.safetensors")
    found, drawn = tensors_of(work(tmp_path / "model.safetensors").make_model()), tensors_of(work().make_model())
    assert all(torch.equal(found[name], tensor) for name, tensor in others.items())
    assert any(not torch.equal(found[name], tensor) for name, tensor in drawn.items())


def test_what_does_not_fit_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(ConfigError, match=r"model\.start=.* cannot be opened"):
        work(path).make_model()
    path.write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match=r"model\.start=.* cannot be read"):
        work(path).make_model()
    save_file(tensors_of(work(hidden=4).make_model()), path)
    with pytest.raises(ConfigError, match=r"'0\.bias' is \[4\] instead of \[8\]"):
        work(path).make_model()
    save_file({"other": torch.zeros(1)}, path)
    with pytest.raises(ConfigError, match=r"'0\.bias' is missing in the file, '0\.weight' .* and 2 more; give"):
        work(path).make_model()
    torch.save({"model": tensors_of(work().make_model()), "arguments": Path("of a script")}, tmp_path / "model.pt")
    with pytest.raises(ConfigError, match="with tensors and plain values alone"):  # what is no plain value is code
        work(tmp_path / "model.pt").make_model()


def within(name: str, model: nn.Module, scale: float = 1) -> dict[str, torch.Tensor]:
    """The tensors of a module that has the model as an attribute of this name."""
    return {f"{name}.{key}": scale * tensor for key, tensor in model.state_dict().items()}


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "DataParallel": lambda model: nn.DataParallel(model).state_dict(),
    "torch.compile of DataParallel": lambda model: torch.compile(nn.DataParallel(model)).state_dict(),
    "a compiled part": lambda model: {
        name.replace("0.", "0._orig_mod."): tensor for name, tensor in model.state_dict().items()
    },
    "Lightning": lambda model: {"epoch": 3, "state_dict": model.state_dict(), "optimizer_states": [{"lr": 0.1}]},
    "a LightningModule": lambda model: {"state_dict": within("model", model) | within("ema", model, scale=2)},
    "a LightningModule of another name": lambda model: {"state_dict": within("net", model) | {"seen": torch.ones(1)}},
    "PyTorch's tutorial": lambda model: {"epoch": 3, "model_state_dict": model.state_dict()},
    "torchvision's references": lambda model: {"model": nn.DataParallel(model).state_dict(), "epoch": 3},
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_wrappers_of_training_scripts_are_taken_off(wrapper: str, tmp_path: Path) -> None:
    others = work(seed=5).make_model()
    saved = WRAPPERS[wrapper](others)
    assert saved.keys() != others.state_dict().keys()
    torch.save(saved, tmp_path / "model.pt")
    found = tensors_of(work(tmp_path / "model.pt").make_model())
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors_of(others).items())


def test_a_model_whose_own_names_begin_with_module_keeps_them(tmp_path: Path) -> None:
    model, other = (nn.Sequential(OrderedDict(module=nn.Linear(2, 3))) for _ in range(2))
    torch.save(other.state_dict(), tmp_path / "model.pt")
    load_weights(model, tmp_path / "model.pt")
    assert torch.equal(model.state_dict()["module.weight"], other.state_dict()["module.weight"])


def test_a_run_starts_from_another_runs_model(tmp_path: Path) -> None:
    from simulations.api import run

    settings = {"callbacks": [], "rounds": 1, "results": {"root": str(tmp_path)}, "client": {"local_epochs": 1}}
    first = run(from_dict(settings))
    weights = first.folder.path / "model.safetensors"
    second = run(from_dict({**settings, "model": {"name": "mlp", "start": str(weights)}, "client": {"lr": 1e-12}}))
    assert second.rounds[-1]["accuracy"] == pytest.approx(first.rounds[-1]["accuracy"], abs=1e-6)


def test_drawn_weights_are_scaled_and_biases_and_norms_are_not() -> None:
    given = {"name": "cnn", "channels": [4, 4]}
    plain, scaled = (
        Workload(from_dict({"data": {"flat": False}, "model": {**given, "init_scale": scale}})).make_model()
        for scale in (1.0, 3.0)
    )
    seen = set()
    for (name, before), after in zip(plain.state_dict().items(), scaled.state_dict().values(), strict=True):
        factor = 3 if before.dim() > 1 else 1
        seen.add(factor)
        assert torch.equal(after, factor * before), name
    assert seen == {1, 3}


def test_weights_from_a_file_are_not_scaled_silently() -> None:
    with pytest.raises(ConfigError, match=r"model\.init_scale=3\.0 was given with model\.start=a"):
        from_dict({"model": {"start": "a", "init_scale": 3.0}})


def test_a_setting_that_changes_nothing_leaves_an_experiments_hash() -> None:
    from simulations.jobs import digest_of

    assert digest_of(from_dict({"model": {"init_scale": 1.0}})) == digest_of(from_dict({}))
    assert digest_of(from_dict({"model": {"init_scale": 2.0}})) != digest_of(from_dict({}))


def test_what_capabilities_add_to_a_table_keeps_the_neutral_values_of_the_others() -> None:
    class Own(Table):
        near: int = 1
        neutral: ClassVar[Mapping[str, Any]] = {"near": 1}

    class Another(Table):
        far: int = 2
        neutral: ClassVar[Mapping[str, Any]] = {"far": 2}

    found = composed(ClientSection, [("", Own), ("", Another)])
    assert found.neutral == {**ClientSection.neutral, "near": 1, "far": 2}
