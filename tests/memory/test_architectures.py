"""Accounts on the CPU of architectures of `transformers` against the live bytes of their runs and evaluations."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsign.config import ExperimentConfig, from_dict
from fedsign.data.base import Samples
from fedsign.evaluation import batch_size, logits_of
from fedsign.memory.live import LiveBytes
from fedsign.workload import Workload
from simulations.memory.account import account
from simulations.memory.phases import EVALUATE
from tests.memory.test_account import checked, phases_of, tree

pytest.importorskip("transformers")
pytestmark = pytest.mark.needs("language", "partial")
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "vocab_size": 300,
}
QWEN = {**SMALL, "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 32, "tie_word_embeddings": True}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gemma": {**SMALL, "model_type": "gemma", "vocab_size": 4000},
    "gemma2": {**SMALL, "model_type": "gemma2", "vocab_size": 4000},
    "qwen2, tied": QWEN,
    "mixtral": {**SMALL, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
}


def experiment(root: Path, architecture: str, **changes: Any) -> ExperimentConfig:
    config = root / "config.json"
    config.write_text(json.dumps(ARCHITECTURES[architecture]), encoding="utf-8")
    return from_dict(tree(root, **{"model": {"name": "transformers", "config": str(config)}, **changes}))


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=[pytest.mark.slow] if name.startswith("gemma") else []) for name in ARCHITECTURES],
)
def test_a_run_holds_the_tensors_that_were_accounted_for(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked(experiment(tmp_path, architecture), monkeypatch)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_evaluation_holds_the_batch_that_was_accounted_for(architecture: str, tmp_path: Path) -> None:
    """As many samples as the run takes on this device: with 151,936 logits a token one, not a GPU's 441."""
    work = Workload(experiment(tmp_path, architecture))
    (evaluate,) = (phase for phase in phases_of(account(work)) if phase.name == EVALUATE)
    model = work.make_model().eval()
    with LiveBytes() as live:
        work.evaluate(model)
    assert evaluate.parts["activations"] == pytest.approx(live.peak.total_bytes, rel=0.1)


@pytest.mark.parametrize(("device", "most_bytes"), [("cpu", 2**22), ("cuda", 2**28)])
def test_logits_of_a_batch_are_those_of_the_model_not_of_its_tokenizer(
    device: str, most_bytes: int, tmp_path: Path
) -> None:
    work = Workload(experiment(tmp_path, "qwen2, tied"))
    assert work.dataset.text is not None
    with torch.device("meta"):
        model = work.config.model.build(work.dataset.input_shape, work.dataset.num_outputs)
    assert logits_of(model, work.dataset.text) == 151_936 > work.dataset.num_outputs
    samples = Samples(features=torch.zeros(2000, 16), targets=torch.zeros(2000))
    num = batch_size(samples, logits=logits_of(model, work.dataset.text), device=device)
    assert num == max(1, most_bytes // (4 * 151_936 * 16))
    assert batch_size(samples, logits=257, device=device) == min(1024, most_bytes // (4 * 257 * 16))
