"""The losses of `transformers`: of classifiers over named columns, of next tokens, and with auxiliary terms."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedsign.config import from_dict
from fedsign.data.text import libraries as llm
from fedsign.errors import ConfigError
from fedsign.tasks.base import IGNORED, ModelLoss
from fedsign.tasks.documents import split
from fedsign.workload import Workload
from simulations import run
from simulations.api import check
from tests.language.language_samples import sums, write_lines

pytest.importorskip("transformers")
transformers = llm.transformers("this test")

HERE = "tests.language.test_model_loss"
TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
MODEL: dict[str, Any] = {"loss": "model"}
LR = 0.5


class Items(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows as `datasets` gives them."""

    def __init__(self, num: int) -> None:
        self.tokens = torch.randint(20, (num, 8), generator=torch.Generator().manual_seed(num))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.tokens[index], "labels": int(self.tokens[index, 0] > 9)}


def items(seed: int) -> tuple[Items, Items]:
    return Items(64), Items(16)


def classifier(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    config = transformers.BertConfig(vocab_size=20, num_labels=num_outputs, **TINY)
    return transformers.AutoModelForSequenceClassification.from_config(config)  # type: ignore[no-any-return]


def decoder(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    config = transformers.LlamaConfig(vocab_size=num_outputs, **TINY)
    return transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]


class Shifting(nn.Module):
    """A language model that shifts `labels` and reads nothing else, as older ones do."""

    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        self.table = nn.Embedding(num_outputs, num_outputs)

    def forward(self, tokens: Tensor, labels: Tensor | None = None, **others: Any) -> Any:
        logits = self.table(tokens)
        if labels is None:
            return logits
        return {"loss": functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


def shifting(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return Shifting(num_outputs)


def experiment(client: dict[str, Any], **changes: Any) -> dict[str, Any]:
    alone = {"partition": {"num_clients": 1, "name": "iid"}, "server": {"cohort_size": 1}}
    given = {"local_steps": 1, "lr": LR, "batch_size": 2000, "optimizer": {"name": "sgd", "momentum": 0.0}, **client}
    return {"rounds": 1, "callbacks": [], "metrics": [], "client": given, **alone, **changes}


def trained(root: Path, client: dict[str, Any], **changes: Any) -> dict[str, Tensor]:
    tensors = run(experiment(client, results={"root": str(root)}, **changes)).model().state_dict()
    return {name: tensor.clone() for name, tensor in tensors.items()}


def text(root: Path, model: dict[str, Any]) -> dict[str, Any]:
    data = {"name": "jsonl", "path": write_lines(root / "lines.jsonl", sums(20)), "prompt": "short", "block_length": 48}
    return {"data": data, "task": "language", "model": model}


def test_a_classifiers_cross_entropy_is_the_tasks_bit_for_bit(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "model": {"name": f"{HERE}:classifier", "output": "logits"},
        "data": {"name": f"{HERE}:items", "normalize": "none"},
    }
    task, own = (trained(tmp_path, client, **given) for client in ({}, MODEL))
    assert all(torch.equal(own[name], tensor) for name, tensor in task.items())


@pytest.mark.parametrize("name", ["transformers", f"{HERE}:decoder"])
def test_next_tokens_are_not_shifted_again(name: str, tmp_path: Path) -> None:
    """A decoder's own loss is the task's: the mean over scored tokens."""
    model: dict[str, Any] = {"name": name, "output": "logits"}
    if name == "transformers":
        transformers.LlamaConfig(vocab_size=300, **TINY).save_pretrained(tmp_path)
        model = {"name": name, "config": str(tmp_path / "config.json")}
    data = text(tmp_path, model)
    data["data"]["packing"] = name == "transformers"  # a bare network takes no positions of packed examples
    task, own = (trained(tmp_path, client, **data) for client in ({}, MODEL))
    for key, tensor in task.items():
        assert torch.allclose(own[key], tensor, rtol=0, atol=1e-6), key


def test_a_model_that_shifts_labels_by_itself_is_refused(tmp_path: Path) -> None:
    data = text(tmp_path, {"name": f"{HERE}:shifting"})
    data["data"]["packing"] = False
    with pytest.raises(ConfigError, match=r"gives nan as the loss of a batch; .*compare `shift_labels`"):
        check(from_dict(experiment(MODEL, **data)))


def test_a_mixture_of_experts_trains_with_its_balancing_loss(tmp_path: Path) -> None:
    """One client's step on all its samples is a plain step of torch on cross-entropy + 0.5 auxiliary loss."""
    weight = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    transformers.MixtralConfig(
        vocab_size=300, num_key_value_heads=2, num_local_experts=4, router_jitter_noise=0.0, **TINY, **weight
    ).save_pretrained(tmp_path)
    given = text(tmp_path, {"name": "transformers", "config": str(tmp_path / "config.json")})
    own, task = (trained(tmp_path, client, **given) for client in (MODEL, {}))
    workload = Workload(from_dict(experiment(MODEL, **given)))
    model: Any = workload.make_model().train()
    rows, targets = workload.training_samples.batch(torch.arange(len(workload.training_samples)))
    tokens, positions = split(rows)
    outputs = model.network(
        input_ids=tokens, use_cache=False, **({} if positions is None else {"position_ids": positions})
    )
    (functional.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten()) + 0.5 * outputs.aux_loss).backward()
    gate = "network.model.layers.0.mlp.gate.weight"
    assert not torch.allclose(task[gate], own[gate], rtol=0, atol=1e-4)
    for name, parameter in model.named_parameters():
        assert torch.allclose(own[name], parameter - LR * parameter.grad, rtol=0, atol=1e-6), name


def test_a_batch_without_scored_tokens_moves_nothing() -> None:
    """A block that holds a part of a long prompt alone."""
    model, targets = decoder((4,), 20), torch.full((2, 4), IGNORED)
    own = model(input_ids=torch.ones(2, 4, dtype=torch.int64), labels=targets, shift_labels=targets).loss
    loss = ModelLoss().loss(own, targets)
    loss.backward()
    assert own.isnan() and loss == 0
    assert not any(parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)
