"""Settings to refuse with Flower's own strategies: those that would hang, fail in round 1, or have no effect."""

import inspect
from collections.abc import Iterator
from typing import Any

from flwr.serverapp import strategy as flower

from fedsign.compatibility import Experiment
from fedsign.flower.foreign import layers
from fedsign.flower.foreign_rules import num_replies_needed, num_sampled
from fedsign.registry import resolve
from fedsign.rules import Rule

_PRIVATE = (
    flower.DifferentialPrivacyServerSideFixedClipping,
    flower.DifferentialPrivacyClientSideFixedClipping,
    flower.DifferentialPrivacyServerSideAdaptiveClipping,
    flower.DifferentialPrivacyClientSideAdaptiveClipping,
)

# Flower settings without effect here, and the remedy.
_IDLE = {
    "fraction_evaluate": "the server evaluates centrally in every round, so nobody would be asked; leave it out",
    "min_evaluate_nodes": "the server evaluates centrally in every round, so nobody would be asked; leave it out",
    "eta_l": "Flower only prints it; set client.lr",
}


def _values(experiment: Experiment, *keys: str) -> Iterator[tuple[str, Any]]:
    """Values of these settings in the strategy and the strategies that it wraps."""
    for layer in layers(experiment.strategy):
        yield from ((key, getattr(layer, key)) for key in keys if hasattr(layer, key))


def _num_sampled(experiment: Experiment) -> int:
    return num_sampled(experiment.strategy, experiment.config.server.cohort_size)


def _idle(experiment: Experiment) -> str:
    """A setting that Flower would ignore."""
    part = experiment.config.strategy
    parameters = inspect.signature(resolve("strategy", part.name)).parameters
    for key, why in _IDLE.items() if isinstance(layers(experiment.strategy)[-1], flower.FedAvg) else ():
        default = getattr(parameters.get(key), "default", None)
        value = part.settings.get(key, default)
        if value not in (default, 0 if key != "eta_l" else default):  # 0 turns the feature off
            return f"strategy.{key}={value} was given, but {why}"
    return ""


def _too_few(experiment: Experiment) -> str:
    """The strategy asks fewer clients than it needs replies."""
    num_clients, (needed, rule) = _num_sampled(experiment), num_replies_needed(experiment.strategy)
    name = type(layers(experiment.strategy)[-1]).__name__
    return (
        f"{name} needs {needed} replies ({rule}), but asks {num_clients} clients a round"
        if needed > num_clients
        else ""
    )


RULES: tuple[Rule[Experiment], ...] = (
    Rule(_idle, "{found}"),
    Rule(
        lambda experiment: next(
            (f"{given:g}" for _, given in _values(experiment, "fraction_train") if not 0 < given <= 1), ""
        ),
        "strategy.fraction_train={found} was given, but expected a fraction above 0 and at most 1",
        "leave it out and set server.cohort_size",
    ),
    Rule(
        lambda experiment: next(
            (
                f"strategy.{key}={num}"
                for key, num in _values(experiment, "min_train_nodes", "min_available_nodes")
                if num > experiment.config.server.cohort_size
            ),
            "",
        ),
        "{found} exceeds server.cohort_size={config.server.cohort_size}: the strategy would wait for ever",
        "lower it or raise server.cohort_size",
    ),
    Rule(_too_few, "{found}", "raise server.cohort_size or lower that setting"),
    Rule(
        lambda experiment: (
            any(num != _num_sampled(experiment) for _, num in _values(experiment, "num_sampled_clients"))
            and _num_sampled(experiment)
        ),
        "num_sampled_clients={strategy.num_sampled_clients} was given, "
        "but {found} clients are asked a round and the noise has to fit them",
        "make the two equal",
    ),
    Rule(
        lambda experiment: (
            experiment.has_buffers and any(isinstance(each, _PRIVATE) for each in layers(experiment.strategy))
        ),
        "the model has buffers (BatchNorm's statistics), "
        "which differential privacy would pass on without clipping and noise",
        "choose a model without, such as model.name=mlp",
    ),
)
