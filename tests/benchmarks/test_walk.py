"""A round runs through no more functions than before; lower the numbers here when it gets shorter."""

import pytest

from benchmarks.walk import walk_ours

MOST = {"in process": (36, 182), "over messages": (46, 225)}  # files, functions; observers included


@pytest.mark.parametrize("way", MOST)
def test_a_round_walks_through_no_more_files_and_functions_than_before(way: str) -> None:
    walk = walk_ours(messages=way == "over messages")
    files, functions = MOST[way]
    assert "RoundLoop._run_round (simulations/rounds.py)" in list(walk.tree.lines())  # the round was seen
    assert len(walk.functions) <= files
    assert walk.num_functions <= functions
