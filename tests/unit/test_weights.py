"""A model that starts from a file, or from drawn weights that are scaled."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fedsign.config import from_dict
from fedsign.errors import ConfigError
from fedsign.records import tensors_of
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
    with pytest.raises(ConfigError, match="is missing in the file"):
        work(path).make_model()


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
