"""Training on a CUDA device: the same algorithm as on the CPU, and the same bits when repeated."""

from pathlib import Path

import pytest
import torch

from clients.state import ClientStore
from clients.trainer import SequentialTrainer
from fedsign.config import EnginePart, ExperimentConfig, ModelPart, PartitionPart
from fedsign.records import ObjectiveSpec, Tensors, TrainRequest, tensors_of
from fedsign.workload import Workload

OBJECTIVES = [
    ObjectiveSpec(),
    ObjectiveSpec(name="fedprox", settings={"mu": 0.01}),
    ObjectiveSpec(name="fedsign", settings={"gamma": 0.003}),
    ObjectiveSpec(name="feddyn", settings={"alpha": 0.05}),
]


def two_rounds(device: str, model: str, objective: ObjectiveSpec, folder: Path) -> Tensors:
    """One client's model after two rounds, the second from the first's result and state."""
    config = ExperimentConfig(
        model=ModelPart(name=model),
        partition=PartitionPart(num_clients=6, alpha=1.0),
        engine=EnginePart(device=device),
    )
    work = Workload(config)
    trainer, store = SequentialTrainer(work), ClientStore(folder)
    tensors = {name: tensor.cpu() for name, tensor in tensors_of(work.make_model()).items()}
    for round in (1, 2):
        request = TrainRequest(
            round=round,
            partition=2,
            tensors=tensors,
            objective=objective,
            state_version=round - 1 if objective.name == "feddyn" else 0,
            needed_versions=frozenset({round - 1}),
        )
        tensors = trainer.train(request, store).tensors
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
