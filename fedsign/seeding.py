"""Every random stream of an experiment, derived from one seed.

A stream belongs to (seed, purpose, round, partition): two engines, or two workers, that train the same
client in the same round draw the same numbers, whatever else they did before.  No global generator is
read or advanced.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


class Purpose(IntEnum):
    """What a stream is for.  The numbers are part of every result: never reuse or renumber one."""

    SPLIT = 1  # train/test split of a dataset
    PARTITION = 2  # which client holds which sample
    MODEL = 3  # initial parameters
    SAMPLING = 4  # which clients take part in a round
    BATCHES = 5  # order of a client's samples
    TRAINING = 6  # dropout and the like inside a client
    FOREIGN = 7  # the global generators that foreign strategies use
    DATA = 8  # samples of synthetic datasets
    VALIDATION = 9  # which training samples are held out for validation


def _sequence(seed: int, purpose: Purpose, round: int, partition: int) -> np.random.SeedSequence:
    """Numbers below 2^32 are one word of entropy each, so that an array of words is the same seed, in half the time."""
    numbers = [seed, int(purpose), round, partition]
    return np.random.SeedSequence(numbers if max(numbers) >= 2**32 else np.array(numbers, dtype=np.uint32))


def generator(seed: int, purpose: Purpose, *, round: int = 0, partition: int = 0) -> np.random.Generator:
    """A NumPy generator for one purpose.

    >>> generator(0, Purpose.SAMPLING, round=3).integers(1000) == generator(
    ...     0, Purpose.SAMPLING, round=3).integers(1000)
    np.True_
    """
    return np.random.default_rng(_sequence(seed, purpose, round, partition))


def generators(seed: int, purpose: Purpose, *, round: int, partitions: Sequence[int]) -> Iterator[np.random.Generator]:
    """`generator` for one partition after another, in less time."""
    if max(seed, round, *partitions) >= 2**32:
        for partition in partitions:
            yield generator(seed, purpose, round=round, partition=partition)
        return
    # Numbers below 2^32 are one word of entropy each, so that an array of words is the same seed.
    for words in np.array([[seed, int(purpose), round, partition] for partition in partitions], dtype=np.uint32):
        yield np.random.default_rng(np.random.SeedSequence(words))


def integer(seed: int, purpose: Purpose, *, round: int = 0, partition: int = 0) -> int:
    """A 63-bit integer for one purpose, to seed a generator of another library."""
    state = _sequence(seed, purpose, round, partition).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


@contextmanager
def torch_stream(
    seed: int,
    purpose: Purpose,
    *,
    round: int = 0,
    partition: int = 0,
    device: "torch.device | None" = None,
) -> Iterator[None]:
    """Seed torch's generators inside the block and give them back as they were.

    torch's initialisers and dropout know only the global generator, so it is lent, not used.
    """
    import torch

    generators = [torch.default_generator]  # torch.manual_seed would reseed every device
    if device is not None and device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    before = [each.get_state() for each in generators]
    stream = integer(seed, purpose, round=round, partition=partition)
    try:
        for each in generators:
            each.manual_seed(stream)
        yield
    finally:
        for each, state in zip(generators, before, strict=True):
            each.set_state(state)
