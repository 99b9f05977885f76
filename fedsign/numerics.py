"""Numerics of an experiment: device, precision, memory layout, determinism.  Configured by [engine] and
client.low_precision.

Parameters, optimizer states, penalties and aggregation are always float32.  bf16 is autocast's precision for the
matrix products of a forward and backward pass, and for the activations between them.

The exceptions are models whose weights are stored below float32, such as `transformers` with model.dtype=bf16.  How
they take their steps is client.low_precision (`fedsign.optim.low_precision`):

    master       a client steps in float32 masters, which are the federated model: sent, averaged, served, saved
    stochastic   weights are bf16 everywhere; after each step, and when the server has its next model in float32, they
                 are rounded stochastically
    plain        the optimizer steps in bf16, and the server rounds to nearest: small updates are lost
"""

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fedsign.errors import ConfigError, nearest
from fedsign.models.channels_last import laid_out

Precision = Literal["float32", "bf16"]
ChannelsLast = Literal["auto", "on", "off"]
LowPrecision = Literal["master", "stochastic", "plain"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Numerics:
    """The numerics that [engine] and client.low_precision select, on an available device."""

    device: torch.device
    precision: Precision = "float32"
    channels_last: ChannelsLast = "auto"
    tf32: bool = False
    compile: bool = False
    low_precision: LowPrecision = "master"

    def takes_channels_last(self, model: nn.Module) -> bool:
        """Whether a model gets channels-last images; `auto` selects them for models with 2-D convolutions."""
        if self.channels_last == "auto":
            return any(isinstance(module, nn.Conv2d) for module in model.modules())
        return self.channels_last == "on"

    def outputs(self, model: nn.Module, features: Tensor, *, channels_last: bool, **labels: Tensor) -> Tensor:
        """One forward pass; outputs, or the model's own loss for `labels`, are float32 at any precision."""
        if channels_last:
            features = laid_out(features)
        with self.reduced():
            return in_full(model(features, **labels))

    def reduced(self) -> AbstractContextManager[object]:
        """A context manager: autocast to the configured precision."""
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def repeatable(self) -> AbstractContextManager[None]:
        """A context manager: on CUDA, deterministic cuDNN algorithms, and TF32 as configured."""
        return _cuda_flags(self.tf32) if self.device.type == "cuda" else nullcontext()

    def check_compiler(self) -> None:
        """Raise ConfigError if `compile` is set but torch.compile has no compiler for this device."""
        if not self.compile:
            return
        if self.device.type == "cuda":
            needed, is_installed = "Triton", importlib.util.find_spec("triton") is not None
        else:
            compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # torch's own default
            needed, is_installed = f"the C++ compiler '{compiler}'", shutil.which(compiler) is not None
        if not is_installed:
            raise ConfigError(
                f"engine.compile=true was given, but torch.compile needs {needed}, which is not here; install it, or "
                "use engine.compile=false."
            )


def in_full(values: Tensor) -> Tensor:
    """Cast what is below float32 to float32; return everything else unchanged."""
    return values.float() if is_low(values) else values


def is_low(tensor: Tensor) -> bool:
    """Whether a tensor holds floating-point numbers below float32."""
    return tensor.is_floating_point() and tensor.itemsize < 4


def is_inexact(tensor: Tensor) -> bool:
    """Whether a tensor holds floating-point or complex numbers, which are averaged; others count or mark something."""
    return tensor.is_floating_point() or tensor.is_complex()


def as_real(tensor: Tensor) -> Tensor:
    """A complex tensor [...] as its parts [..., 2], as torch's optimizers see it; any other unchanged."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def as_kind_of(like: Tensor, values: Tensor) -> Tensor:
    """The inverse of `as_real` for values that belong to `like`."""
    return torch.view_as_complex(values.contiguous()) if like.is_complex() else values


def widened(dtype: torch.dtype) -> torch.dtype:
    """The dtype itself, but at least float32 or complex64 for a floating-point or complex one."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point or dtype.is_complex else dtype


@contextmanager
def _cuda_flags(tf32: bool) -> Iterator[None]:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    # benchmark chooses algorithms by timing, so two runs could round differently
    before = cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32
    cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = True, False, tf32, tf32
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = before


def device_of(name: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:i` as an available device.

    Raises:
        ConfigError: the device is not available.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # torch knows other kinds, which it may have no code for, and takes cuda:1000 for a negative index
    if not re.fullmatch(r"cpu(:0)?|cuda(:[0-9]+)?", name):
        raise ConfigError(
            f"engine.device='{name}' was given, but FedSign computes on CPUs and CUDA devices; expected auto, cpu, "
            f"cuda or cuda:0.{nearest(name, ('auto', 'cpu', 'cuda'))}"
        )
    kind, _, index = name.partition(":")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"engine.device='{name}' was given, but torch sees no CUDA device here; use cpu or auto.")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"engine.device='{name}' was given, but torch sees {torch.cuda.device_count()} CUDA devices here, "
            "numbered from 0; use one of them."
        )
    return torch.device(name)
