"""Every random stream of an experiment, derived from one seed.

A stream belongs to (seed, purpose, round, partition).  Any two engines or workers that train the same client in the
same round draw the same numbers, whatever they did before.  FedSign's own code neither reads nor advances a global
generator.  For the code of others, such as a data set that draws from `numpy.random`, the global generators are seeded
from a stream and given back afterwards (`global_stream`).
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import IntEnum, unique
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


Drawn = Callable[[], list[str]]
"""The libraries whose global generators have drawn since they were seeded: `random`, `numpy.random`, `torch`."""


@unique
class Purpose(IntEnum):
    """What a stream is for.  The numbers are part of every result: never reuse or renumber one."""

    SPLIT = 1  # train/test split of a dataset
    PARTITION = 2  # which client holds which sample
    MODEL = 3  # initial parameters
    SAMPLING = 4  # which clients take part in a round
    BATCHES = 5  # order of a client's samples
    TRAINING = 6  # dropout and the like inside a client
    FOREIGN = 7  # the global generators that foreign strategies use
    DATA = 8  # samples of synthetic data sets
    VALIDATION = 9  # which training samples are held out for validation
    ANALYSIS = 10  # noise around a model, and the samples of an analysis
    FAULTS = 11  # which clients fail on purpose
    ATTACK = 12  # which clients are malicious
    MEASURING = 22  # draws from global generators in an evaluation
    SPLITTING = 23  # the same in a partition
    EVALUATION = 20  # which sites evaluate in a round
    SUBSTITUTES = 21  # which clients replace absent ones
    LAYERS = 30  # which blocks of a model are trained in a period
    CONDENSATION = 42  # networks, batches and directions of a meta step; round: the step
    CONDENSED = 41  # networks that evaluate condensed images; round: index of the network
    LEARNING = 43  # directions of hypergradients; round: the step
    SEARCH = 45  # trials of a hyperparameter search
    ROUNDING = 47  # of weights, after a client's steps
    SERVED_ROUNDING = 48  # of weights, in the server's next model
    ANSWERS = 49  # test examples whose answers are evaluated
    SIGNS = 46  # random signs in place of the received model's
    ADAPTERS = 32  # initial adapters
    MASKS = 40  # positions of nonzero weights in a sparse tensor


def _sequence(seed: int, purpose: Purpose, round: int, partition: int) -> np.random.SeedSequence:
    # A uint32 array takes half the time of a list and gives the same seed, as each number is one word of entropy.
    numbers = [seed, int(purpose), round, partition]
    return np.random.SeedSequence(numbers if max(numbers) >= 2**32 else np.array(numbers, dtype=np.uint32))


def generator(seed: int, purpose: Purpose, *, round: int = 0, partition: int = 0) -> np.random.Generator:
    """A NumPy generator for one purpose.

    >>> generator(0, Purpose.SAMPLING, round=3).integers(1000) == generator(
    ...     0, Purpose.SAMPLING, round=3).integers(1000)
    np.True_
    """
    return np.random.default_rng(_sequence(seed, purpose, round, partition))


def named_generator(seed: int, purpose: Purpose, name: str) -> np.random.Generator:
    """A NumPy generator for one purpose and a name, such as that of a tensor.

    >>> named_generator(0, Purpose.MASKS, "a").integers(1000) == named_generator(0, Purpose.MASKS, "b").integers(1000)
    np.False_
    """
    return np.random.default_rng(_named_sequence(seed, purpose, name))


def named_words(seed: int, purpose: Purpose, name: str, *, num: int) -> NDArray[np.uint32]:
    """`num` uniform 32-bit words for a name, the same under every version of NumPy.

    NumPy guarantees PCG64's raw output for a seed, but not what a Generator derives from it.  Today,
    `named_generator(...).random(num, dtype=np.float32)` uses the upper 24 bits of these words.

    >>> words = named_words(0, Purpose.MASKS, "a", num=3)
    >>> (words >> 8) / 2**24 == named_generator(0, Purpose.MASKS, "a").random(3, dtype=np.float32)
    array([ True,  True,  True])
    """
    raw = np.random.PCG64(_named_sequence(seed, purpose, name)).random_raw((num + 1) // 2)
    return raw.astype("<u8", copy=False).view("<u4")[:num]


def _named_sequence(seed: int, purpose: Purpose, name: str) -> np.random.SeedSequence:
    words = np.frombuffer(hashlib.sha256(name.encode()).digest(), dtype="<u4")
    return np.random.SeedSequence([seed, int(purpose), *map(int, words)])


def child(rng: np.random.Generator, index: int) -> np.random.Generator:
    """Child stream number `index` of a generator, independent of what either has drawn.

    Equals `rng.spawn` of a fresh generator, but by index and without counting up the parent.

    >>> child(np.random.default_rng(0), 2).integers(1000) == np.random.default_rng(0).spawn(3)[2].integers(1000)
    np.True_
    """
    own = cast(np.random.SeedSequence, rng.bit_generator.seed_seq)
    return np.random.default_rng(np.random.SeedSequence(own.entropy, spawn_key=(*own.spawn_key, index)))


def integer(seed: int, purpose: Purpose, *, round: int = 0, partition: int = 0) -> int:
    """A 63-bit integer for one purpose, to seed a generator of another library."""
    state = _sequence(seed, purpose, round, partition).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


def global_stream(seed: int, purpose: Purpose, *, round: int = 0, partition: int = 0) -> AbstractContextManager[Drawn]:
    """A context manager: seed Python's, NumPy's, and torch's global generators, and restore their states on exit.

    torch's initializers and dropout know only its global generator; users' data sets and models may draw from any.
    """
    return globals_seeded(integer(seed, purpose, round=round, partition=partition))


torch_stream = global_stream  # its former name, which users' code may import


@contextmanager
def globals_seeded(stream: int, *, device: "torch.device | None" = None) -> Iterator[Drawn]:
    """`global_stream` for a given `integer`; torch's on the CPU and optionally on a device.

    Yields a function that names the libraries whose generators have drawn since.
    """
    import torch

    generators = [torch.default_generator]  # not torch.manual_seed, which reseeds every device
    if device is not None and device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    before = [each.get_state() for each in generators]
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    random.seed(stream)
    np.random.seed(stream % 2**32)  # noqa: NPY002
    for each in generators:
        each.manual_seed(stream)

    def drawn() -> list[str]:
        _, key, *rest = np.random.RandomState(stream % 2**32).get_state()
        _, key_now, *rest_now = np.random.get_state()  # noqa: NPY002
        seeded = {
            "random": random.Random(stream).getstate() == random.getstate(),
            "numpy.random": rest == rest_now and np.array_equal(key, key_now),
            "torch": all(map(torch.equal, started, [each.get_state() for each in generators])),
        }
        return [name for name, is_fresh in seeded.items() if not is_fresh]

    started = [each.get_state() for each in generators]
    try:
        yield drawn
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        for each, state in zip(generators, before, strict=True):
            each.set_state(state)


def torch_generator(seed: int, purpose: Purpose, *, round: int = 0, partition: int = 0) -> "torch.Generator":
    """A CPU generator that draws the same numbers as the global one inside `global_stream`."""
    import torch

    return torch.Generator().manual_seed(integer(seed, purpose, round=round, partition=partition))


@contextmanager
def lent(stream: "torch.Generator") -> Iterator[None]:
    """A context manager: torch's CPU generator continues `stream`, which is advanced by what the block draws."""
    import torch

    before = torch.get_rng_state()
    torch.set_rng_state(stream.get_state())
    try:
        yield
        stream.set_state(torch.get_rng_state())
    finally:
        torch.set_rng_state(before)
