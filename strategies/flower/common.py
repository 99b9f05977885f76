"""Arguments shared by all of Flower's strategies."""

from typing import Any

from fedsign.flower.parameters_only import NUM_REPLIES_KEY
from fedsign.flower.wire import NUM_EXAMPLES_KEY
from strategies.base import Weighting


def arguments(weighting: Weighting = "examples") -> dict[str, Any]:
    """Use the whole cohort, however small, weighted by samples or uniformly."""
    keys = {"uniform": NUM_REPLIES_KEY, "examples": NUM_EXAMPLES_KEY}
    # Flower's default of 2 would wait for ever with a cohort of one
    return {"min_train_nodes": 1, "min_available_nodes": 1, "weighted_by_key": keys[weighting]}
