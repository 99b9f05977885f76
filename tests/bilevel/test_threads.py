"""Work on threads: all of it is done, each piece single-threaded, errors propagate, and torch's thread count is
kept.
"""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fedsign.bilevel import threads
from fedsign.bilevel.chain import Chain, conv_net
from fedsign.memory.live import LiveBytes


@pytest.fixture
def three_threads() -> Iterator[None]:
    """As torch's setting, for one test."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_all_pieces_are_done_on_several_threads_whose_operations_are_not_divided() -> None:
    found = torch.zeros(12)
    seen: dict[int, set[int]] = {}

    def work(index: int) -> None:
        found[index] += index
        seen.setdefault(threading.get_ident(), set()).add(torch.get_num_threads())
        all_at_once.wait()

    all_at_once = threading.Barrier(3, timeout=30)  # it would break if fewer worked at the same time
    threads.each(work, range(12))
    assert found.tolist() == list(range(12))
    assert len(seen) == 3
    assert set.union(*seen.values()) == {1}
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_what_goes_wrong_in_a_piece_is_raised() -> None:
    def work(index: int) -> None:
        if index == 2:
            raise ValueError("the third")

    with pytest.raises(ValueError, match="the third"):
        threads.each(work, range(6))


@pytest.mark.usefixtures("three_threads")
def test_what_is_watched_stays_where_it_is_seen() -> None:
    def work(_: int) -> None:
        assert threading.current_thread() is threading.main_thread()
        torch.zeros(1000)

    with LiveBytes() as live:
        threads.each(work, range(4))
    assert live.peak.total_bytes >= 4000


def _tangents(network: Chain, count: int) -> Tensor:
    draws = torch.Generator().manual_seed(0)
    theta = network.begin(draws).double()
    images = torch.randn(4, 1, 8, 8, generator=draws, dtype=torch.float64)
    targets = torch.eye(10, dtype=torch.float64)[:4]
    theta_t = torch.randn(count, network.size, generator=draws, dtype=torch.float64)
    images_t = torch.randn(count, 4, 1, 8, 8, generator=draws, dtype=torch.float64)
    _, passes = network.gradient(theta, images, targets)
    into = torch.zeros_like(theta_t)
    network.add_tangents(passes, theta_t, images_t, targets.new_zeros(count, *targets.shape), into=into)
    return into


@pytest.mark.parametrize("inference", [False, True])
def test_tangents_are_those_of_one_thread(monkeypatch: pytest.MonkeyPatch, inference: bool) -> None:
    """Seven directions in groups of few, so that threads have several and the last one is smaller."""
    network = conv_net((1, 8, 8), 10, width=4, num_blocks=2)
    monkeypatch.setattr("fedsign.bilevel.chain._CACHE_BYTES", 3 * 4 * 8 * 8 * 4 * 8)
    before = torch.get_num_threads()
    found = []
    with torch.inference_mode(inference):
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(_tangents(network, 7))
    torch.set_num_threads(before)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-12, atol=1e-14)
