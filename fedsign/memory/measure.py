"""A real step of a method, beside its estimate: real tensors of random weights, and the bytes that the allocator gives out.

On CUDA the allocator keeps the account; on the CPU torch's profiler is told of every allocation (`fedsign.memory.live`).
What would not fit into what is free is not begun.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedsign.memory.estimate import Estimate, Setting, Work
from fedsign.memory.live import allocated
from fedsign.memory.methods import Method
from fedsign.memory.step import AdamKind, galore, take_step, warm_up
from fedsign.optim.blocks import find_blocks
from fedsign.optim.lisa import LISA
from fedsign.report.wording import byte_count


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Bytes of a real step: `static` is what is there when it is done but for the batch: weights, gradients, moments."""

    static: int = 0
    peak: int = 0
    refused: str = ""  # why there is none

    def as_json(self) -> dict[str, Any]:
        """All of it, for programs."""
        return (
            {"not_measured": self.refused} if self.refused else {"static_bytes": self.static, "peak_bytes": self.peak}
        )


def measure(work: Work, method: Method, setting: Setting, estimated: Estimate, device: torch.device) -> Measured:
    """Play the step, if it fits into what is free."""
    free = free_bytes(device)
    precision = setting.precision
    if {precision.gradients, precision.states} != {precision.weights} or precision.masters:
        return Measured(refused="torch's AdamW keeps gradients and moments in the weights' type; only that is measured")
    if estimated.peak.total_bytes > free:
        needed = byte_count(estimated.peak.total_bytes)
        return Measured(refused=f"it would need {needed}, and {byte_count(free)} are free")
    with allocated(device) as given:
        with device, _weights_in(precision.weights):
            model = work.make().train()
            batch = work.batch(precision.weights)
        method.apply(model)
        optimizer = real_optimizer(model, method, setting.adam)
        warm_up(model, optimizer)
        with sdpa_kernel(SDPBackend.MATH) if setting.attention == "math" else nullcontext():
            take_step(model, batch, optimizer)
    return Measured(static=given.kept_bytes - batch.num_bytes, peak=given.peak_bytes)


def real_optimizer(model: nn.Module, method: Method, adam: AdamKind) -> torch.optim.Optimizer:
    """What trains a model to which the method was applied; LISA draws the blocks that the estimate takes."""
    if method.kind == "galore":
        return galore(model, method.rank)
    kind: dict[str, Any] = {"fused": True} if adam == "fused" else {"foreach": adam == "foreach"}
    if method.kind == "lisa":
        model.requires_grad_(True)
        depth = len(find_blocks(model))
        drawn = range(depth - method.num_layers, depth)
        return LISA(model, num_sampled_layers=method.num_layers, draw=lambda index: drawn, **kind)
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], **kind)


def free_bytes(device: torch.device) -> int:
    """What can be had: of a GPU, of the machine, or of the container that the process is in."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else min(_limits())


def _limits() -> Iterator[int]:
    yield os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machine = Path("/proc/meminfo")
    available = re.search(r"MemAvailable:\s+(\d+)", machine.read_text(encoding="utf-8")) if machine.exists() else None
    if available is not None:
        yield 1024 * int(available[1])
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.exists() and used.exists() and limit.read_text(encoding="utf-8").strip() != "max":
        yield max(0, int(limit.read_text(encoding="utf-8")) - int(used.read_text(encoding="utf-8")))


@contextmanager
def _weights_in(dtype: torch.dtype) -> Iterator[None]:
    """Models are made in this type at once: made in another and turned, they would need both for a while."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
