"""The memory of generated answers against what a model allocates while it answers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsign.config import from_dict
from fedsign.memory.live import LiveBytes
from fedsign.metrics.base import Evaluated
from fedsign.metrics.generated import GENERATED
from fedsign.workload import Workload
from simulations.memory.account import account
from simulations.memory.phases import EVALUATE

pytestmark = pytest.mark.needs("language", "partial")
LLAMA = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}


@pytest.mark.parametrize("has_cache", [True, False])
def test_the_largest_batch_of_answers_is_accounted_for(has_cache: bool, tmp_path: Path) -> None:
    """In many thin layers, whose cache exceeds all else; a model without a cache is run over all tokens."""
    pytest.importorskip("transformers")
    lines = [{"instruction": "x" * (150 + index), "output": "y"} for index in range(8)]
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    config = {**LLAMA, "num_hidden_layers": 12, "vocab_size": 257, "max_position_embeddings": 256}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    llama: dict[str, Any] = {"name": "transformers", "config": str(tmp_path)}
    experiment = {
        "task": "language",
        "metrics": ["exact_match"],
        "data": {"name": "jsonl", "path": str(path), "test_path": str(path), "prompt": "short", "block_length": 256},
        "model": llama if has_cache else {"name": "gpt", "width": 64, "depth": 1, "num_heads": 2},
        "partition": {"name": "iid", "num_clients": 2},
        "client": {"batch_size": 1, "local_steps": 1},
        "server": {"cohort_size": 2, "max_new_tokens": 8},
        "strategy": {"name": "fedavg"},
    }
    work = Workload(from_dict(experiment))
    given = {"text": work.dataset.text, "config": work.config, "numerics": work.numerics}
    asked = Evaluated(model=work.make_model().eval(), samples=work.dataset.test, **given)
    with torch.no_grad(), LiveBytes() as live:
        GENERATED.of(asked)
    (server,) = account(work).processes
    (evaluate,) = (phase for phase in server.phases if phase.name == EVALUATE)
    assert evaluate.parts["activations"] == pytest.approx(live.peak.total_bytes, rel=0.1)
