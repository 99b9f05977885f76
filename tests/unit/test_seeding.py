"""Random streams depend on (seed, purpose, round, partition) and on nothing else."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsign.seeding import Purpose, generator, global_stream, integer

KEYS = list(product((0, 1, 2, 2**31, 2**32, 2**40), Purpose, (0, 1, 2, 5, 40), (0, 1, 2, 7, 49)))


def test_a_stream_does_not_depend_on_what_was_drawn_before() -> None:
    forwards = {key: generator(*key[:2], round=key[2], partition=key[3]).random() for key in KEYS}
    np.random.default_rng(0).random(1000)
    backwards = {key: generator(*key[:2], round=key[2], partition=key[3]).random() for key in reversed(KEYS)}
    assert forwards == backwards


def test_no_two_streams_are_the_same() -> None:
    """n = 6 * 5 * 5 = 150 keys per purpose; two random 63-bit integers agree with probability n^2 / 2^64 < 1e-12."""
    assert len(KEYS) == 150 * len(Purpose) < 10_000
    assert len({integer(*key[:2], round=key[2], partition=key[3]) for key in KEYS}) == len(KEYS)
    dense = {integer(0, Purpose.BATCHES, round=r, partition=k) for r, k in product(range(60), range(100))}
    assert len(dense) == 6000


@pytest.mark.parametrize(
    "changed",
    [
        {"seed": 1},
        {"purpose": Purpose.SAMPLING},
        {"round": 4},
        {"partition": 4},
        {"round": 2, "partition": 3},  # swapped
    ],
    ids=str,
)
def test_every_part_of_the_key_changes_the_whole_stream(changed: dict[str, int]) -> None:
    key = {"seed": 0, "purpose": Purpose.BATCHES, "round": 3, "partition": 2}
    first, second = (
        generator(**this).integers(2**62, size=100)  # type: ignore[arg-type]
        for this in (key, key | changed)
    )
    assert not (first == second).any()


@given(st.integers(0, 2**64), st.sampled_from(Purpose), st.integers(0, 2**20), st.integers(0, 2**20))
def test_integers_fit_every_generator_that_takes_a_signed_64_bit_seed(
    seed: int, purpose: Purpose, round: int, partition: int
) -> None:
    assert 0 <= integer(seed, purpose, round=round, partition=partition) < 2**63


def test_torch_stream_reproduces_and_gives_the_global_generator_back() -> None:
    torch.manual_seed(123)
    expected = torch.rand(4)

    torch.manual_seed(123)
    with global_stream(0, Purpose.MODEL):
        first = torch.rand(4)
    assert torch.equal(torch.rand(4), expected)
    with global_stream(0, Purpose.MODEL):
        again = torch.rand(4)
    with global_stream(0, Purpose.MODEL, partition=1):
        other = torch.rand(4)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_torch_stream_gives_the_generator_back_after_an_error() -> None:
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), global_stream(0, Purpose.TRAINING, round=1):
        torch.rand(1)
        raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), before)


def test_torch_stream_makes_dropout_repeatable() -> None:
    def dropped(round: int) -> torch.Tensor:
        with global_stream(0, Purpose.TRAINING, round=round):
            return torch.nn.functional.dropout(torch.ones(200))

    assert torch.equal(dropped(1), dropped(1))
    assert not torch.equal(dropped(1), dropped(2))


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1, 2**32, 2**63])
def test_a_stream_is_numpys_of_the_four_numbers(seed: int) -> None:
    """Written as one array of words or as a list, whatever the numbers' sizes."""
    for partition in (0, 5, 999_999):
        found = generator(seed, Purpose.BATCHES, round=3, partition=partition)
        expected = np.random.default_rng(np.random.SeedSequence([seed, 5, 3, partition]))
        assert found.integers(2**62) == expected.integers(2**62)
