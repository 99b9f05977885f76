"""Training on a CUDA device: the same algorithm as on the CPU, and the same bits when repeated."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from clients.state.store import ClientStore
from clients.trainer import SequentialTrainer
from fedsign.config import from_dict, merged
from fedsign.optim.lisa import LISA as LISAOptimizer
from fedsign.records import ObjectiveSpec, Tensors, tensors_of
from fedsign.storage.checkpoints import load_tensors
from fedsign.workload import Workload
from simulations.api import run
from tests.training.requests import request

OBJECTIVES = [
    ObjectiveSpec(),
    ObjectiveSpec(name="fedprox", settings={"mu": 0.01}),
    ObjectiveSpec(name="fedsign", settings={"gamma": 0.003}),
    ObjectiveSpec(name="feddyn", settings={"alpha": 0.05}),
]
SIX: dict[str, Any] = {"partition": {"num_clients": 6, "alpha": 1.0}, "server": {"cohort_size": 6}}
from_dict(SIX)  # refused here where there is no GPU, too


def two_rounds(device: str, model: str, objective: ObjectiveSpec, folder: Path) -> Tensors:
    """One client's model after two rounds, the second from the first's result and state.

    Few steps: in two epochs the CNN, on a CPU as well, makes 0.3 of a difference of one bit.
    """
    tree = {"model": {"name": model}, "client": {"local_steps": 5}, "engine": {"device": device}}
    work = Workload(from_dict({**SIX, **tree}))
    trainer, store = SequentialTrainer(work), ClientStore(folder)
    tensors = {name: tensor.cpu() for name, tensor in tensors_of(work.make_model()).items()}
    for round in (1, 2):
        version, needed = round - 1 if objective.name == "feddyn" else 0, frozenset({round - 1})
        asked = request(tensors, round=round, objective=objective, state_version=version, needed_versions=needed)
        tensors = trainer.train(asked, store).tensors
    return tensors


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda spec: spec.name)
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_a_gpu_trains_like_the_cpu_and_repeats_its_bits(model: str, objective: ObjectiveSpec, tmp_path: Path) -> None:
    on_cpu = two_rounds("cpu", model, objective, tmp_path / "cpu")
    on_gpu = two_rounds("cuda", model, objective, tmp_path / "gpu")
    again = two_rounds("cuda", model, objective, tmp_path / "again")
    for name, tensor in on_cpu.items():
        assert on_gpu[name].device.type == "cpu"
        assert torch.equal(on_gpu[name], again[name]), name
        torch.testing.assert_close(on_gpu[name], tensor, rtol=5e-3, atol=5e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_a_gpu_trains_a_cohort_of_cnns_as_one_after_another(tmp_path: Path) -> None:
    tree = {
        "rounds": 1,
        "model": {"name": "cnn"},
        **SIX,
        "engine": {"device": "cuda"},
        "results": {"root": str(tmp_path)},
    }
    cohort, alone = (
        run({**tree, "client": {"local_steps": 5, "path": path}}).rounds[-1] for path in ("cohort", "sequential")
    )
    assert cohort["loss"] == pytest.approx(alone["loss"], rel=1e-3)


LISA: dict[str, Any] = {"name": "lisa", "num_sampled_layers": 1, "period": 2, "blocks": "0,2,4"}


def in_parts(device: str, width: int, **optimizer: Any) -> Workload:
    tree = {
        "model": {"name": "mlp", "hidden": [width] * 3},
        **SIX,
        "client": {"local_steps": 5, "lr": 0.001, "optimizer": optimizer},
        "engine": {"device": device},
    }
    return Workload(from_dict(tree))


def one_round(work: Workload, objective: ObjectiveSpec, folder: Path) -> Tensors:
    tensors = {name: tensor.cpu() for name, tensor in tensors_of(work.make_model()).items()}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    reply = SequentialTrainer(work).train(request(tensors, objective=objective), ClientStore(folder)).tensors
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)
    return reply


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda spec: spec.name)
@pytest.mark.parametrize("moments", ["drop", "offload"])
def test_a_gpu_trains_parts_like_the_cpu_and_repeats_its_bits(
    moments: str, objective: ObjectiveSpec, tmp_path: Path
) -> None:
    on_cpu, on_gpu, again = (
        one_round(in_parts(device, 16, **LISA, moments=moments), objective, tmp_path / str(at))
        for at, device in enumerate(("cpu", "cuda", "cuda"))
    )
    assert on_cpu.keys() == on_gpu.keys()
    for name, tensor in on_cpu.items():
        assert on_gpu[name].device.type == "cpu" and torch.equal(on_gpu[name], again[name]), name
        torch.testing.assert_close(on_gpu[name], tensor, rtol=5e-3, atol=5e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_a_client_fits_where_training_all_of_it_does_not(tmp_path: Path) -> None:
    """A block of 4096 x 4096 float32 is B = 67 MB; the model is 2 B and little more.

    LISA with one block: the model, its gradient, two moments, a temporary of the step: 2 + 1 + 2 + 1 = 6 B = 403 MB.
    FedSign adds the received weights and the penalty's saved and temporary tensors, 6 B at most: 805 MB.  AdamW without
    temporaries: 2 B times model, gradient and moments, 8 B = 537 MB; with FedSign four times 2 B more.  Activations and
    cuBLAS take less than the rest.
    """
    total = torch.cuda.get_device_properties(0).total_memory
    cases = [(ObjectiveSpec(), 500), (OBJECTIVES[2], 900)]
    for objective, megabytes in cases:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(megabytes * 10**6 / total)
        try:
            assert one_round(in_parts("cuda", 4096, **LISA), objective, tmp_path)
            gc.collect()
            torch.cuda.empty_cache()
            with pytest.raises(torch.cuda.OutOfMemoryError):
                one_round(in_parts("cuda", 4096, name="adamw"), objective, tmp_path)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_offloaded_moments_wait_in_pinned_memory_and_not_on_the_gpu() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]).cuda()
    optimizer = LISAOptimizer(
        model, num_sampled_layers=1, period=1, draw=lambda index: [index % 4], moments="offload", blocks="0,1,2,3"
    )
    for step in range(9):
        optimizer.zero_grad()
        model(torch.ones(2, 64, device="cuda")).square().sum().backward()
        optimizer.step()
        assert all(
            moment.is_cuda for state in optimizer.state.values() for key, moment in state.items() if key != "step"
        )
        assert optimizer.state_bytes == 2 * (8 * 64 * 64 // 2 + 8 * 64 // 2 + 4)
        assert optimizer.waiting_bytes == min(step, 3) * 2 * (8 * 64 * 64 // 2 + 8 * 64 // 2 + 4)
    waiting = [moment for state in optimizer._waiting.values() for key, moment in state.items() if key != "step"]
    assert waiting and all(moment.is_pinned() for moment in waiting)


TEXT: dict[str, Any] = {
    "rounds": 2,
    "callbacks": [],
    "task": "language",
    "metrics": [],
    "data": {"name": "text_folder", "block_length": 16},
    "partition": {"name": "iid", "num_clients": 2},
    "server": {"cohort_size": 2},
    "strategy": {"name": "fedavg"},
    "client": {"batch_size": 2, "local_steps": 4, "lr": 1e-3, "clip_norm": 1.0, "optimizer": {"name": "adamw"}},
}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 257,
}
METHODS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "lisa": {"client": {"optimizer": {"name": "lisa", "num_sampled_layers": 1, "period": 2}}},
    "galore": {"client": {"optimizer": {"name": "galore", "rank": 4}}},
    "lora": {"client": {"optimizer": {"name": "lora", "rank": 4}}},
    "flora": {"client": {"optimizer": {"name": "lora", "rank": 4, "aggregation": "flora"}}},
    "qlora": {"client": {"optimizer": {"name": "lora", "rank": 4, "quantization": "nf4"}}},
    "8-bit moments": {"client": {"optimizer": {"name": "adamw_8bit"}}},
    **{
        kind: {"model": {"dtype": "bf16"}, "client": {"low_precision": kind}}
        for kind in ("master", "stochastic", "plain")
    },
}


@pytest.mark.gpu
@pytest.mark.needs("language", "partial")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("method", METHODS)
def test_a_gpu_fine_tunes_like_the_cpu_and_repeats_its_bits(method: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("bitsandbytes")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("What the hammer? what the chain? " * 30, encoding="utf-8")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    given = {"data": {"root": str(tmp_path / "text")}, "model": {"name": "transformers", "config": str(tmp_path)}}

    def trained(device: str, name: str) -> tuple[float, Tensors]:
        changes = {"engine": {"device": device}, "results": {"root": str(tmp_path / name)}}
        done = run(merged(merged(TEXT, given), merged(METHODS[method], changes)))
        return float(done.rounds[-1]["loss"]), load_tensors(done.path / "model.safetensors")

    (on_cpu, _), (on_gpu, once), (_, again) = trained("cpu", "cpu"), trained("cuda", "gpu"), trained("cuda", "again")
    assert on_gpu == pytest.approx(on_cpu, rel=1e-2)
    assert {name for name in once if not torch.equal(once[name], again[name])} == set()
