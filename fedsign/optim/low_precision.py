"""Steps of weights below float32: in float32 masters, or rounded stochastically.

A bf16 weight w has 8 significant bits: a step below |w| / 512 rounds to nothing, and fine-tuning takes such steps.
Therefore an optimizer steps in float32.  For the step, a parameter's `data` and gradient are float32 tensors, which
works with every optimizer that reads and writes parameters in `step`; its moments are float32, too.  Then the result is
kept as a master (`Masters`), or rounded up or down at random such that the mean is exact (`StochasticRounding`):

    P(up) = (x - down) / (up - down),    hence    E[rounded x] = x.

A bf16 number is a float32 number whose lower 16 bits are 0.  Adding a uniform 16-bit integer to the bits of x and
clearing the lower ones carries with exactly this probability, also across powers of 2.  Values of bf16 stay.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from fedsign.numerics import is_low

_BLOCK = 2**20  # elements that are rounded at a time, which bounds the memory of random numbers
_PER_WORD = 4  # 16-bit numbers in a 64-bit word


class Updates(Protocol):
    """How the steps of parameters below float32 are taken."""

    def full(self, parameter: nn.Parameter) -> Tensor:
        """A parameter's value in float32, in memory that the step may write."""
        ...

    def put(self, parameter: nn.Parameter, full: Tensor) -> None:
        """Take the value after the step, and write it into the parameter."""
        ...


class Masters:
    """Float32 copies of the parameters that have taken a step, and only of these."""

    def __init__(self, start: Callable[[nn.Parameter], Tensor]) -> None:
        """`start` returns the value that a parameter starts from, in float32; it is copied."""
        self._start = start
        self._masters: dict[nn.Parameter, Tensor] = {}

    def full(self, parameter: nn.Parameter) -> Tensor:
        """The master."""
        master = self._masters.get(parameter)
        return self._start(parameter).to(parameter.device, torch.float32, copy=True) if master is None else master

    def put(self, parameter: nn.Parameter, full: Tensor) -> None:
        """Keep the master, and round it to nearest."""
        self._masters[parameter] = full
        parameter.data.copy_(full)

    def value(self, parameter: nn.Parameter) -> Tensor:
        """The master, or the value that the parameter starts from; not to be written."""
        master = self._masters.get(parameter)
        return self._start(parameter) if master is None else master

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._masters

    def clear(self) -> None:
        """Forget all masters."""
        self._masters.clear()


class StochasticRounding:
    """Rounds every step stochastically."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def full(self, parameter: nn.Parameter) -> Tensor:
        """A float32 copy."""
        return parameter.data.float()

    def put(self, parameter: nn.Parameter, full: Tensor) -> None:
        """Round into the parameter."""
        round_stochastically(full, into=parameter.data, generator=self._generator)


@contextmanager
def float32_step(parameters: Iterable[nn.Parameter], updates: Updates) -> Iterator[None]:
    """A context manager for an optimizer's step: parameters below float32 with gradients, and these, are float32."""
    low: dict[nn.Parameter, Tensor] = {}
    try:
        for parameter in parameters:
            if parameter.grad is None or not is_low(parameter):
                continue
            full, gradient = updates.full(parameter), parameter.grad
            low[parameter] = parameter.data
            parameter.grad = None  # a gradient has to have its parameter's type when the data change
            parameter.data = full
            parameter.grad = gradient.float()
        yield
    finally:
        for parameter, own in low.items():
            full = parameter.data
            parameter.grad = None
            parameter.data = own
            updates.put(parameter, full)


def step_one_by_one(optimizer: torch.optim.Optimizer, low: Iterable[nn.Parameter], updates: Updates) -> None:
    """Step these parameters one after another, so that one float32 copy is in memory at a time; then all others."""
    groups = optimizer.param_groups
    group_of = {parameter: group for group in groups for parameter in group["params"]}
    try:
        for parameter in (each for each in low if each in group_of):  # others are frozen
            optimizer.param_groups = [{**group_of.pop(parameter), "params": [parameter]}]
            with float32_step([parameter], updates):
                optimizer.step()  # skips parameters without a gradient
        optimizer.param_groups = [{**group, "params": [each]} for each, group in group_of.items()]
        optimizer.step()
    finally:
        optimizer.param_groups = groups


def round_stochastically(
    values: Tensor, *, into: Tensor, generator: torch.Generator, start: int = 0, numel: int | None = None
) -> None:
    """Round float32 values into a bf16 tensor of the same shape; infinities and NaN stay.

    With `numel`, they are the elements from `start` on of a flattened tensor of that size, and what is drawn is what
    the whole would draw.

    >>> rounded = torch.empty(3, dtype=torch.bfloat16)
    >>> values = torch.tensor([1.0, 1.0 + 2**-8, float("inf")])  # the second lies halfway between 1 and 1 + 2^-7
    >>> round_stochastically(values, into=rounded, generator=torch.Generator().manual_seed(0))
    >>> rounded[0].item(), rounded[1].item() in (1.0, 1.0 + 2**-7), rounded[2].item()
    (1.0, True, inf)
    """
    if values.dtype != torch.float32 or into.dtype != torch.bfloat16:
        raise TypeError(f"{values.dtype} was to be rounded to {into.dtype}; expected float32 and bfloat16.")
    # in the order of the shape, whatever the memory format
    flat = values.contiguous().view(-1)
    rounded = into if into.is_contiguous() else torch.empty_like(into, memory_format=torch.contiguous_format)
    stop = start + len(flat)
    for first in range(0, stop if numel is None else numel, _BLOCK):
        last = min(first + _BLOCK, stop if numel is None else numel)
        words = torch.empty(-(-(last - first) // _PER_WORD), dtype=torch.int64, device=flat.device)
        # None: up to and including 2^63 - 1; an explicit upper bound would be exclusive
        words.random_(-(2**63), None, generator=generator)
        begin, end = max(first, start), min(last, stop)
        if begin >= end:
            continue
        source, target = flat[begin - start : end - start], rounded.view(-1)[begin - start : end - start]
        drawn = words.view(torch.int16)[begin - first : end - first].int().bitwise_and_(0xFFFF)
        bits = drawn.add_(source.view(torch.int32)).bitwise_and_(-(2**16))
        # the carry would turn some NaN into numbers
        target.copy_(torch.where(source.isnan(), source, bits.view(torch.float32)))
    if rounded is not into:
        into.copy_(rounded)


def lost_share(parameters: Iterable[nn.Parameter], step: Callable[[], None]) -> float | None:
    """Take a step, and return the share of elements with a gradient that it left as they were.

    A few thousand elements of each parameter below float32 are looked at; None if there are none with values.
    """
    lost, num = lost_updates([(parameter, 0, parameter.numel()) for parameter in parameters], step)
    return lost / num if num else None


@torch.no_grad()
def lost_updates(
    parts: Iterable[tuple[nn.Parameter, int, int]], step: Callable[[], None], *, most: int = 2**12
) -> tuple[int, int]:
    """Take a step; of elements with a gradient, return how many it left as they were, and how many were looked at.

    A part has its first element's index in a flattened parameter, and the size of that, of which at most `most`
    elements are looked at.
    """
    before = []
    for part, start, numel in parts:
        if part.grad is not None and is_low(part) and not part.is_meta:
            every = max(1, -(-numel // most))
            at = slice(-start % every, None, every)
            before.append((part, at, part.grad.flatten()[at] != 0, part.detach().flatten()[at].clone()))
    step()
    num = sum(int(has_gradient.sum()) for _, _, has_gradient, _ in before)
    lost = sum(
        int((has_gradient & (part.detach().flatten()[at] == values)).sum()) for part, at, has_gradient, values in before
    )
    return lost, num
