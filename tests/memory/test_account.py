"""The account of a whole run against the live bytes of that run, counted in this process."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from fedsign.config import ExperimentConfig, from_dict
from fedsign.errors import ConfigError
from fedsign.memory.live import LiveBytes
from fedsign.optim.nf4 import nf4_bytes
from fedsign.workload import Workload
from simulations.api import run
from simulations.cli import app
from simulations.memory.account import account
from simulations.memory.measured import measured_peaks
from simulations.memory.phases import GPU, HEAP, PROGRAM, SHARED, TRAIN, Account, Phase
from tests.training import low_models

pytestmark = pytest.mark.needs("language", "partial")
GPT = {"name": "gpt", "width": 64, "depth": 4, "num_heads": 2, "positions": "rotary", "tied": False}


def tree(root: Path, optimizer: str = "adamw", clients: int = 1, **changes: Any) -> dict[str, Any]:
    (root / "text").mkdir(exist_ok=True)
    (root / "text" / "a.txt").write_text("What the hammer? what the chain? " * 30, encoding="utf-8")
    return {
        "task": "language",
        "metrics": [],
        "rounds": 2,
        "callbacks": [],
        "data": {"name": "text_folder", "root": str(root / "text"), "block_length": 16},
        "partition": {"name": "iid", "num_clients": clients},
        "model": GPT,
        "client": {"batch_size": 1, "local_steps": 3, "optimizer": {"name": optimizer}},
        "server": {"cohort_size": clients},
        "strategy": {"name": "fedavg"},
        "results": {"root": str(root / "runs"), "clients": False},
        **changes,
    }


def tensors_of(phase: Phase) -> int:
    return phase.total_bytes - sum(phase.parts[part] for part in (PROGRAM, SHARED, HEAP))


def phases_of(found: Account) -> tuple[Phase, ...]:
    (process,) = found.processes
    return process.phases


LOW = {
    "task": "classification",
    "data": {"name": "digits"},
    "model": {"name": f"{low_models.__name__}:network", "hidden": [512, 512, 512]},
}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("optimizer", "low_precision", "clients", "least", "moments"),
    [
        ("adamw", None, 1, 4 + 4 + 8, 8),  # served, the client's, moments
        ("lisa", None, 2, 6, None),
        pytest.param("adamw", None, 2, 4 + 4 + 8 + 8, 8, marks=SLOW),  # and sums in double size
        pytest.param("sgd", None, 2, 4 + 4 + 8, 4, marks=SLOW),
        pytest.param("galore", None, 1, 11.6, None, marks=SLOW),
        ("adamw", "master", 2, 4 + 4 + 4 + 8 + 8, 8),  # served, masters, the client's and the server's, moments, sums
        # served, reply, the client's and the server's, sum and mean; a float32 scale for each 256 elements
        ("adamw_8bit", "master", 1, 4 + 4 + 4 + 8, 2 * (1 + 4 / 256)),
        pytest.param("adamw", "stochastic", 2, 2 + 2 + 8 + 8, 8, marks=SLOW),  # no masters
        pytest.param("sgd", "plain", 2, 2 + 2 + 2 + 8, 2, marks=SLOW),
        pytest.param("galore", "plain", 2, 2 + 2 + 2 + 8, None, marks=SLOW),  # the peak is in the first step
    ],
)
def test_a_run_holds_the_tensors_that_were_accounted_for(
    optimizer: str,
    low_precision: str | None,
    clients: int,
    least: float,
    moments: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tensors alone, since a process of this size is modules; `least` and `moments` are bytes of each parameter.

    `low_precision` is that of a model in bf16.  Besides come gradients and activations.
    """
    if optimizer == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    client = {"batch_size": 4 if low_precision else 1, "local_steps": 3, "optimizer": {"name": optimizer}}
    client |= {"low_precision": low_precision} if low_precision else {}
    changes = {**(LOW if low_precision else {}), "client": client}
    expected = checked(from_dict(tree(tmp_path, clients=clients, **changes)), monkeypatch)
    assert max(map(tensors_of, phases_of(expected))) >= least * expected.num_parameters
    (train,) = (phase for phase in phases_of(expected) if phase.name == TRAIN)
    if moments is not None:
        assert train.parts["optimizer"] == pytest.approx(moments * expected.num_parameters, rel=0.02)


def test_a_base_in_4_bits_is_built_in_full_and_held_in_4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In full, 4 bytes of each weight; then 0.5 and a scale, but for what is not adapted: embedding, head, norms."""
    for module in ("peft", "bitsandbytes"):
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    lora = {"name": "lora", "quantization": "nf4", "rank": 4}
    changes = {"model": {**GPT, "width": 128}, "client": {"batch_size": 1, "local_steps": 1, "optimizer": lora}}
    phases = {phase.name: phase for phase in phases_of(checked(from_dict(tree(tmp_path, **changes)), monkeypatch))}
    adapted = 4 * 12 * 128 * 128  # elements: in each block, four matrices for attention and two of four times the width
    built, held = phases["build"].parts["model"], phases["evaluate"].parts["model"]
    assert built > 4 * adapted > 1.5 * held and held > nf4_bytes(adapted)


def checked(config: ExperimentConfig, monkeypatch: pytest.MonkeyPatch) -> Account:
    """The account, which a run confirms; by the paths of large models."""
    for module in ("clients.working_model", "clients.rehearsal", "simulations.memory.account"):
        monkeypatch.setattr(f"{module}.LARGE_BYTES", 0)
    monkeypatch.setattr("fedsign.federation.aggregation._BLOCK", 2**12)
    expected = account(Workload(config))
    with LiveBytes() as live:
        run(config)
    assert live.peak.total_bytes == pytest.approx(max(map(tensors_of, phases_of(expected))), rel=0.1)
    return expected


def said(*words: Any) -> str:
    done = CliRunner().invoke(app, ["estimate", "memory", *map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_an_experiment_and_its_run_have_the_same_account(tmp_path: Path) -> None:
    """That of the configured optimizer: LoRA trains A [r, in] and B [out, r] of six matrices in each block."""
    if find_spec("peft") is None:
        pytest.skip("peft is not installed")
    lora = {"name": "lora", "rank": 4}
    config = from_dict(tree(tmp_path, client={"batch_size": 1, "local_steps": 1, "optimizer": lora}, rounds=1))
    path = tmp_path / "experiment.toml"
    path.write_text(config.to_toml(), encoding="utf-8")
    of_file = json.loads(said("--config", path, "--json"))
    of_run = json.loads(said("--config", run(config).path, "--json"))
    assert of_file["title"] == of_run["title"] and of_file["num_trained"] == of_run["num_trained"]
    width, ffn = 64, 256
    assert of_file["num_trained"] == 4 * 4 * (4 * 2 * width + 2 * (width + ffn))
    num_matrices = 4 * 6 * 2  # each with the number of its steps
    assert of_file["phases"]["train"]["optimizer"] == 8 * of_file["num_trained"] + 4 * num_matrices


def with_frozen(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 50), nn.Linear(50, num_outputs))
    model[1].requires_grad_(False)
    return model


def mostly_frozen(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    hidden = [nn.Linear(1024 if index else 64, 1024).requires_grad_(False) for index in range(5)]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(1024, num_outputs))


def test_frozen_parameters_are_counted_as_such() -> None:
    digits = ("--set", f"model.name={__name__}:with_frozen", "--set", "client.optimizer.name=adam")
    trained, frozen = 50 * 10 + 10, 64 * 50 + 50
    assert f"{trained:,} trainable parameters and {frozen:,} frozen ones" in said(*digits)
    found = json.loads(said(*digits, "--json"))
    assert (found["num_parameters"], found["num_frozen"]) == (trained + frozen, frozen)
    assert found["num_trained"] == trained


def test_a_frozen_model_is_held_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no client trains is copied by nobody: the server's initial model, and its clients', borrow it."""
    model = {"name": f"{__name__}:mostly_frozen"}
    digits = {"task": "classification", "data": {"name": "digits"}, "model": model}
    found = checked(from_dict(tree(tmp_path, **digits)), monkeypatch)
    assert max(map(tensors_of, phases_of(found))) < 1.3 * 4 * found.num_parameters


def test_the_table_names_the_phase_of_the_peak_and_what_fits(tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text(from_dict(tree(tmp_path, "lisa")).to_toml(), encoding="utf-8")
    text = said("--config", path, "--set", "client.optimizer.num_sampled_layers=1", "--card", "100MB")
    assert "aggregate" in text and "in train" in text and "does not fit" in text


@pytest.mark.slow
def test_the_measured_peak_stands_beside_the_estimate(tmp_path: Path) -> None:
    """In a process of its own: this one has imported more than a run does."""
    path = tmp_path / "experiment.toml"
    path.write_text(from_dict(tree(tmp_path, "adamw")).to_toml(), encoding="utf-8")
    command = [sys.executable, "-m", "simulations.cli", "estimate", "memory", "--config", path, "--measure", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["measured_bytes"] == pytest.approx(found["peak_bytes"], rel=0.3)


@pytest.mark.slow
def test_a_run_that_is_not_accounted_for_can_be_measured(tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    sparse = from_dict(tree(tmp_path, parameterization={"name": "smupar", "density": 0.5}))
    path.write_text(sparse.to_toml(), encoding="utf-8")
    found = json.loads(said("--config", path, "--measure", "--json", "--card", "100MB"))
    assert "cannot be built and trained without values" in found["reason"] and not found["fits"]
    assert found["measured_bytes"]["server"] > 1e8  # torch alone


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"engine": {"precision": "bf16"}}, "set engine.precision=float32 here"),
        ({"client": {"path": "cohort"}}, "accounted for in process"),
        ({"parameterization": {"name": "smupar", "density": 0.5}}, "can only be measured"),
    ],
)
def test_what_is_not_accounted_for_is_refused_in_a_sentence(
    changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=expected):
        account(Workload(from_dict(tree(tmp_path, **changes))))


def test_a_run_that_cannot_fit_is_refused_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = from_dict(tree(tmp_path))
    model_bytes = Workload(config).model_bytes
    for has, is_refused in ((9 * model_bytes, False), (5 * model_bytes, True)):
        monkeypatch.setattr("simulations.memory.check.machine_bytes", lambda has=has: has)
        if is_refused:
            with pytest.raises(ConfigError, match=r"needs about .* and this machine has .*lisa or lora"):
                run(config)
        else:
            run(config)
    assert len(list((tmp_path / "runs").glob("*/*"))) == 1


def test_a_gpu_need_not_be_here_and_holds_one_model_at_a_time(tmp_path: Path) -> None:
    """Weights, gradients, two moments, and the roots of one moment, in blocks of 512 bytes; one model to evaluate."""
    changes = {"task": "classification", "data": {"name": "digits"}, "model": {"name": "mlp", "hidden": [999, 999]}}
    work = Workload(from_dict(tree(tmp_path, **changes, engine={"device": "cuda"})))
    train, evaluate = phases_of(account(work))
    block = sum(-(-4 * size // 512) * 512 for size in (64 * 999, 999, 999 * 999, 999, 999 * 10, 10))
    assert tensors_of(train) == pytest.approx(5 * block, rel=1e-3)
    assert evaluate.parts["model"] == evaluate.parts["copy"] == block  # a small model stays, between clients
    assert train.parts[PROGRAM] == evaluate.parts[PROGRAM] > work.dataset.train.features.nbytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("optimizer", ["adamw", "lisa"])
def test_a_gpu_takes_what_was_accounted_for(optimizer: str, tmp_path: Path) -> None:
    large = {"model": {**GPT, "width": 512, "depth": 8, "num_heads": 8}, "engine": {"device": "cuda"}}
    config = from_dict(tree(tmp_path, optimizer, **large))
    (found,) = account(Workload(config)).processes
    assert found.peak.total_bytes == pytest.approx(measured_peaks(config, has_several=False)[GPU], rel=0.1)
