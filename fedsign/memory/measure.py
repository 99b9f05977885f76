"""Measure a real training step, with random weights, to check its estimate.

`fedsign.memory.live.allocated` counts the bytes.  A step whose estimate exceeds the free memory is not attempted.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedsign.memory.estimate import Estimate, Measured, Setting, Work
from fedsign.memory.live import LiveBytes, allocated
from fedsign.memory.machine import available_bytes
from fedsign.memory.methods import Method
from fedsign.memory.step import AdamKind, galore, take_step, warm_up
from fedsign.optim.blocks import find_blocks
from fedsign.optim.lisa import LISA
from fedsign.report.wording import byte_count


def measure(work: Work, method: Method, setting: Setting, estimated: Estimate, device: torch.device) -> Measured:
    """Run the step if its estimate fits into the free memory."""
    free = free_bytes(device)
    if not setting.is_plain:
        return Measured(refused="torch's AdamW keeps gradients and moments in the weights' type; only that is measured")
    if estimated.peak.total_bytes > free:
        needed = byte_count(estimated.peak.total_bytes)
        return Measured(refused=f"it would need {needed}, and {byte_count(free)} are free")
    with allocated(device) as given:
        with device, _weights_in(setting.weights):
            model = work.make().train()
            batch = work.batch(setting.weights)
        method.apply(model)
        optimizer = real_optimizer(model, method, setting.adam)
        warm_up(model, optimizer)
        with sdpa_kernel(SDPBackend.MATH) if setting.attention == "math" else nullcontext():
            # a LiveBytes that is not entered takes the phases and counts nothing
            take_step(model, batch, optimizer, LiveBytes())
    of_batch = sum(tensor.untyped_storage().nbytes() for tensor in (batch.features, batch.targets))
    return Measured(static=given.kept_bytes - of_batch, peak=given.peak_bytes)


def real_optimizer(model: nn.Module, method: Method, adam: AdamKind) -> torch.optim.Optimizer:
    """The optimizer of a method; LISA trains the same blocks as in the estimate."""
    if method.kind == "galore":
        return galore(model, method.rank)
    kind: dict[str, Any] = {"fused": True} if adam == "fused" else {"foreach": adam == "foreach"}
    if method.kind == "lisa":
        # undoes Method.apply: LISA manages only the parameters that it finds trainable
        model.requires_grad_(True)
        depth = len(find_blocks(model))
        drawn = range(depth - method.num_layers, depth)
        return LISA(model, num_sampled_layers=method.num_layers, draw=lambda index: drawn, **kind)
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], **kind)


def free_bytes(device: torch.device) -> int:
    """Free memory of the GPU, or of the host."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()


@contextmanager
def _weights_in(dtype: torch.dtype) -> Iterator[None]:
    """Create models in this dtype directly; a conversion would hold both copies for a moment."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
