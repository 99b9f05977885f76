"""What Flower's own strategies do not go with: what would hang, fail in the first round, or promise what it does not keep."""

import inspect
from typing import Any

from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy

from fedsign.compatibility import Experiment
from fedsign.flower.foreign import layers
from fedsign.flower.foreign_rules import num_asked, num_replies_needed
from fedsign.registry import resolve
from fedsign.rules import Rule

_PRIVATE = (
    flower.DifferentialPrivacyServerSideFixedClipping,
    flower.DifferentialPrivacyClientSideFixedClipping,
    flower.DifferentialPrivacyServerSideAdaptiveClipping,
    flower.DifferentialPrivacyClientSideAdaptiveClipping,
)

# Settings of Flower's that nobody would read here, and the remedy.
_IDLE = {
    "fraction_evaluate": "the server evaluates centrally in every round, so nobody would be asked; leave it out",
    "min_evaluate_nodes": "the server evaluates centrally in every round, so nobody would be asked; leave it out",
    "eta_l": "Flower only prints it; set client.lr",
}
Found = dict[str, Any] | None


def _layers(experiment: Experiment) -> list[Strategy]:
    strategy = experiment.strategy
    return layers(strategy) if isinstance(strategy, Strategy) else []


def _fraction(experiment: Experiment) -> str:
    fractions = [getattr(layer, "fraction_train", 1.0) for layer in _layers(experiment)]
    return next((f"{each:g}" for each in fractions if not 0 < each <= 1), "")


def _too_many(experiment: Experiment) -> Found:
    """A number of nodes that no cohort reaches."""
    for layer in _layers(experiment):
        for key in ("min_train_nodes", "min_available_nodes"):
            if getattr(layer, key, 0) > experiment.config.server.cohort_size:
                return {"key": key, "num": getattr(layer, key)}
    return None


def _too_few(experiment: Experiment) -> Found:
    """Fewer clients asked than replies needed."""
    *_, inner = _layers(experiment)
    asked, (needed, rule) = num_asked(inner, experiment.config.server.cohort_size), num_replies_needed(inner)
    return {"kind": type(inner).__name__, "needed": needed, "rule": rule, "asked": asked} if needed > asked else None


def _private(experiment: Experiment) -> list[Any]:
    return [layer for layer in _layers(experiment) if isinstance(layer, _PRIVATE)]


def _other_noise(experiment: Experiment) -> Found:
    """Noise for another number of clients than are asked."""
    for layer in _private(experiment):
        asked = num_asked(layer, experiment.config.server.cohort_size)
        if layer.num_sampled_clients != asked:
            return {"num": layer.num_sampled_clients, "asked": asked}
    return None


def _idle(experiment: Experiment) -> Found:
    """A setting that Flower would not read."""
    *_, inner = _layers(experiment)
    part = experiment.config.strategy
    parameters = inspect.signature(resolve("strategy", part.name)).parameters
    for key, why in _IDLE.items() if isinstance(inner, flower.FedAvg) else ():
        default = getattr(parameters.get(key), "default", None)
        value = part.settings.get(key, default)
        if value not in (default, 0 if key != "eta_l" else default):  # 0: nobody is to be asked
            return {"key": key, "value": value, "why": why}
    return None


RULES: tuple[Rule[Experiment], ...] = (
    Rule(_idle, "strategy.{found[key]}={found[value]} was given, but {found[why]}"),
    Rule(
        _fraction,
        "strategy.fraction_train={found} was given, but expected is a fraction above 0 and at most 1",
        "leave it out and set server.cohort_size",
    ),
    Rule(
        _too_many,
        "strategy.{found[key]}={found[num]} exceeds server.cohort_size={config.server.cohort_size}: the strategy would wait for ever",
        "lower strategy.{found[key]} or raise server.cohort_size",
    ),
    Rule(
        _too_few,
        "{found[kind]} needs {found[needed]} replies ({found[rule]}), but asks {found[asked]} clients a round",
        "raise server.cohort_size or lower that setting",
    ),
    Rule(
        _other_noise,
        "num_sampled_clients={found[num]} was given, but {found[asked]} clients are asked a round and the noise has to fit them",
        "make the two equal",
    ),
    Rule(
        lambda its: _private(its) and its.has_buffers,
        "the model has buffers (BatchNorm's statistics), which differential privacy would pass on without clipping and noise",
        "choose a model without, such as model.name=mlp",
    ),
)
