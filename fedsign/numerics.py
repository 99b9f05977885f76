"""How numbers are computed: device, precision, layout, and what makes it repeatable.  Part of the experiment: [engine].

Parameters, optimizers, penalties and aggregation are float32 always; bf16 is the precision of the layers' products
in a model's passes (torch's autocast), and of what flows between them.
"""

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fedsign.errors import ConfigError
from fedsign.models.channels_last import laid_out

Precision = Literal["float32", "bf16"]
ChannelsLast = Literal["auto", "on", "off"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Numerics:
    """What [engine] says, on a device that is there."""

    device: torch.device
    precision: Precision = "float32"
    channels_last: ChannelsLast = "auto"
    tf32: bool = False
    compile: bool = False

    def takes_channels_last(self, model: nn.Module) -> bool:
        """Whether a model is given its images with the channels last: `auto` is for models with 2-D convolutions."""
        if self.channels_last == "auto":
            return any(isinstance(module, nn.Conv2d) for module in model.modules())
        return self.channels_last == "on"

    def outputs(self, model: nn.Module, features: Tensor, *, channels_last: bool) -> Tensor:
        """One pass, whose outputs are float32 in any precision."""
        if channels_last:
            features = laid_out(features)
        with self.reduced():
            return in_full(model(features))

    def reduced(self) -> AbstractContextManager[object]:
        """The precision of a model's passes, inside the block."""
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def repeatable(self) -> AbstractContextManager[None]:
        """On a GPU: inside the block cuDNN takes algorithms that give the same bits again, and TF32 is as it was said."""
        return _cuda_flags(self.tf32) if self.device.type == "cuda" else nullcontext()

    def check_compiler(self) -> None:
        """Raise ConfigError if `compile` was asked for and torch finds no compiler for this device."""
        if not self.compile:
            return
        if self.device.type == "cuda":
            needed, is_there = "Triton", importlib.util.find_spec("triton") is not None
        else:
            compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # as torch looks for it
            needed, is_there = f"the C++ compiler '{compiler}'", shutil.which(compiler) is not None
        if not is_there:
            raise ConfigError(
                f"engine.compile=true was given, but torch.compile needs {needed}, which is not here; install it, or "
                "use engine.compile=false."
            )


def in_full(values: Tensor) -> Tensor:
    """bf16 as float32; everything else as it is."""
    return values.float() if values.dtype == torch.bfloat16 else values


@contextmanager
def _cuda_flags(tf32: bool) -> Iterator[None]:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32
    cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = True, False, tf32, tf32
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = before


def device_of(name: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:i` as a device that is there.

    Raises:
        ConfigError: it is not.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"engine.device='{name}' was given; expected is auto, cpu, cuda or cuda:0.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"engine.device='{name}' was given, but torch sees no CUDA device here; use cpu or auto.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"engine.device='{name}' was given, but torch sees {torch.cuda.device_count()} CUDA devices here, "
            "numbered from 0; use one of them."
        )
    return device
