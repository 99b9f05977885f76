"""What an operation made is made again from memory; the account is the one that runs every operation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedsign.memory.live import LiveBytes
from fedsign.memory.methods import methods_of
from fedsign.memory.shapes import ShapesOnly, Unfilled
from fedsign.memory.step import AttentionKind, Moments, next_tokens, take_step, under_kernels
from fedsign.models.gpt import gpt


def events_of_step(live: LiveBytes, method: str, attention: AttentionKind, **settings: Any) -> list[tuple[int, int]]:
    """What a step of a small language model of like blocks makes and lets go."""
    (asked,) = methods_of([method], rank=4, dropout=0.1)
    with torch.device("meta"):
        model = gpt((24,), 50, depth=4, width=32, tied=False, **settings).train()
        asked.apply(model)
        batch = next_tokens(2, 24, 50)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = Moments(trained, dtype=torch.float32, projected=asked.projected(model), rank=4)
    under_kernels(model, "cuda", attention)
    live.name("weights", model.parameters())
    with live:
        take_step(model, batch, optimizer, live)
        return [*live._events]


@pytest.mark.parametrize("attention", ["fused", "math"])
@pytest.mark.parametrize("method", ["full", "lora", "galore", "E+H+2L"])
@pytest.mark.parametrize(
    "of_llama", [{}, {"norm": "rms_norm", "activation": "swiglu", "positions": "rotary", "num_kv_heads": 2}]
)
def test_a_step_from_memory_makes_and_lets_go_the_same_bytes_in_the_same_order(
    method: str, attention: AttentionKind, of_llama: dict[str, Any]
) -> None:
    all_run = events_of_step(LiveBytes(), method, attention, **of_llama)
    assert events_of_step(ShapesOnly(), method, attention, **of_llama) == all_run
    assert len(all_run) > 100


OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "product": lambda x: x @ x.T,
    "of halves": lambda x: x.bfloat16() * 2,
    "not contiguous": lambda x: x.T * x.T,
    "view": lambda x: x.view(-1),
    "view that is not said to be one": lambda x: torch.ops.aten._unsafe_view(x, [-1]),
    "part": lambda x: x[1:],
    "several parts": lambda x: x.split(2),
    "in place": lambda x: x.add_(1),
    "two outcomes": lambda x: x.max(dim=0),
    "a sum": lambda x: x.sum(),
    "nothing": lambda x: x[:0] * 2,
    "mask": lambda x: x > 0,
    "a type": lambda x: x.to(torch.float64),
    "statistics": lambda x: functional.batch_norm(
        x, torch.zeros(6, device=x.device), torch.ones(6, device=x.device), training=True
    ),
    "joined": lambda x: torch.cat([x, x]),
    "expanded": lambda x: x.sum(0).expand(3, 6),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_an_operation_made_is_made_again(name: str) -> None:
    """With the same shapes, strides and types, and with a storage of its own exactly where it has one."""
    operation = OPERATIONS[name]
    first, second = (torch.empty(4, 6, device="meta") for _ in range(2))
    live, truth = ShapesOnly(), LiveBytes()
    for each in (live, truth):
        each.name("given", [first, second])
    with live:
        once, again = flat(operation(first)), flat(operation(second))
    with truth:
        expected = flat(operation(first)), flat(operation(second))
    assert live._events == truth._events
    for found, right in zip((*once, *again), (*expected[0], *expected[1]), strict=True):
        assert (found.shape, found.stride(), found.dtype) == (right.shape, right.stride(), right.dtype)
    shares = [tensor.untyped_storage()._cdata == second.untyped_storage()._cdata for tensor in again]
    assert shares == [tensor.untyped_storage()._cdata == second.untyped_storage()._cdata for tensor in expected[1]]


def flat(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)


def test_numbers_of_another_type_are_another_question() -> None:
    counts = torch.empty(3, dtype=torch.int64, device="meta")
    with ShapesOnly():
        made = [counts * number for number in (1, 1.0, True, 1)]
    assert [each.dtype for each in made] == [torch.int64, torch.float32, torch.int64, torch.int64]


def test_tensors_with_values_are_not_answered_from_memory() -> None:
    with ShapesOnly():
        sums = [(torch.ones(3) * factor).sum().item() for factor in (1.0, 2.0, 1.0)]
    assert sums == [3.0, 6.0, 3.0]


def test_weights_without_values_are_not_drawn_and_others_are() -> None:
    with Unfilled():
        drawn = nn.Linear(3, 4)
        with torch.device("meta"):
            empty = nn.Linear(3, 4)
    assert drawn.weight.abs().sum() > 0
    assert empty.weight.shape == (4, 3) and empty.weight.device.type == "meta"
