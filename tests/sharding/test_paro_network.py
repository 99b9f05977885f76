"""The benchmark of sharded training over a slow cable: its predictions, and what it calls an inversion."""

import pytest

from benchmarks.alone.paro_competitors import COMPETITORS, LAYERS, PER_GROUP, WIDTH
from benchmarks.alone.paro_network import RANKS, predicted
from benchmarks.alone.paro_rank import alone, batches
from benchmarks.docs_alone import inversions
from fedsign.sharding.strategy import STRATEGIES

BYTES = 4.0 * LAYERS * WIDTH * WIDTH
NETWORK = {"across_bps": 200e6, "within_bps": 1e15, "computing_s": 0.5}


@pytest.mark.parametrize(
    ("competitor", "passes"),
    [  # of the whole model through one direction of the cable, by hand, for 2x2 ranks and 4 micro-batches
        ("NNN", 1.0),  # half of it a rank, in a reduction and a gathering: 2 (g - 1) / g
        ("NNN flat", 1.5),  # 2 (n - 1) / n: one link of the ring crosses
        ("IIG", 1.0),
        ("GGG flat", 4 * (2 + 1) * 0.75),
    ],
)
def test_a_prediction_is_the_traffic_over_the_cable_and_the_computation(competitor: str, passes: float) -> None:
    found = predicted(competitor, **NETWORK)
    assert found is not None
    assert found["seconds"] == pytest.approx(0.5 + passes * 8 * BYTES / 200e6, rel=1e-3)


def test_memory_is_the_formulas() -> None:
    found = predicted("IIG", **NETWORK)
    assert found is not None
    assert found["kept_bytes"] == BYTES / PER_GROUP * 2 + 2 * BYTES / RANKS


def test_what_is_not_of_paro_is_not_predicted_and_all_of_paro_competes() -> None:
    assert predicted("FSDP2 HSDP", **NETWORK) is None
    assert COMPETITORS.keys() >= STRATEGIES.keys()


def test_an_inversion_is_a_clear_plan_that_did_not_come_true() -> None:
    def competitor(planned: float, measured: float) -> dict[str, dict[str, float]]:
        return {"predicted": {"seconds": planned}, "seconds": {"median": measured}}

    competitors = {
        "a": competitor(1.0, 2.0),
        "b": competitor(1.2, 1.5),
        "c": competitor(1.3, 1.9),
        "d": {"seconds": {"median": 0.1}},
    }
    assert inversions(competitors) == ["a 2.00 s, c 1.90 s"]


def test_one_process_takes_the_batches_of_all_ranks() -> None:
    """Its parameters move, and every rank's batches count."""
    moved = alone(2, 1)
    assert any(not one.equal(other) for one, other in zip(moved, alone(1, 1), strict=True))
    assert not batches(0, 1)[0][0].equal(batches(1, 1)[0][0])
