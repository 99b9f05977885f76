"""What Flower's own strategies need to know of an experiment, and what cannot work: said before the run starts."""

import inspect
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy

from fedsign.config import ExperimentConfig
from fedsign.errors import ConfigError, FedSignError, RoundError
from fedsign.flower import wire
from fedsign.flower.foreign import layers
from fedsign.flower.shims import cheap_collections, quiet_flower
from fedsign.registry import error_in

_log = logging.getLogger("fedsign")

_PRIVATE = (
    flower.DifferentialPrivacyServerSideFixedClipping,
    flower.DifferentialPrivacyClientSideFixedClipping,
    flower.DifferentialPrivacyServerSideAdaptiveClipping,
    flower.DifferentialPrivacyClientSideAdaptiveClipping,
)

# Flower's functions that divide by an update's norm.
_CLIPPING = ("clip_inputs_inplace", "adaptive_clip_inputs_inplace")

# Settings of Flower's that nobody would read here, and the sentence's remedy.
_IDLE = {
    "fraction_evaluate": "the server evaluates centrally in every round, so nobody would be asked; leave it out",
    "min_evaluate_nodes": "the server evaluates centrally in every round, so nobody would be asked; leave it out",
    "eta_l": "Flower only prints it; set client.lr",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Deferred:
    """A strategy that has to know the experiment, such as the number of clients that its noise is for."""

    make: Callable[[ExperimentConfig], Strategy]

    def strategy_for(self, name: str, config: ExperimentConfig) -> Strategy:
        """The strategy for an experiment; `name` is what the user calls it.

        Raises:
            ConfigError: Flower refused the settings.
        """
        try:
            return self.make(config)
        except FedSignError:
            raise
        except Exception as error:
            raise error_in("strategy", name, error) from error


def weighted_by(strategy: Strategy) -> str:
    """The metric that replies are weighted by."""
    return str(getattr(layers(strategy)[-1], "weighted_by_key", wire.NUM_EXAMPLES_KEY))


def num_asked(strategy: Strategy, cohort_size: int) -> int:
    """How many clients it asks when it is shown a cohort of this size, by Flower's rule."""
    inner = layers(strategy)[-1]
    if not isinstance(inner, flower.FedAvg):
        return cohort_size
    return max(int(cohort_size * inner.fraction_train), inner.min_train_nodes)


def num_replies_needed(strategy: Strategy) -> tuple[int, str]:
    """The least number of replies, and where it comes from."""
    inner = layers(strategy)[-1]
    if isinstance(inner, flower.Bulyan):
        return 4 * inner.num_malicious_nodes + 3, "4 x num_malicious_nodes + 3"
    if isinstance(inner, flower.MultiKrum):  # Krum is one
        closest = 2 * inner.num_malicious_nodes + 3  # Blanchard et al. 2017: 2f + 2 < n
        if inner.num_nodes_to_select > closest:
            return inner.num_nodes_to_select, "num_nodes_to_select"
        return closest, "2 x num_malicious_nodes + 3"
    return 1, "one"


def check_num_replies(strategy: Strategy, num_replies: int, round: int) -> None:
    """Whether a round's replies are enough for the rule.

    Raises:
        RoundError: too many clients failed.
    """
    needed, rule = num_replies_needed(strategy)
    if num_replies < needed:
        raise RoundError(
            f"round {round} ended with {num_replies} usable replies, but {type(layers(strategy)[-1]).__name__} needs {needed} "
            f"({rule}); raise server.cohort_size, so that some may fail."
        )


@contextmanager
def calling(name: str, round: int) -> Iterator[None]:
    """What a foreign strategy raises, as a sentence; its log kept off the terminal.

    Raises:
        RoundError: it raised something.
    """
    try:
        with quiet_flower(), cheap_collections():
            yield
    except FedSignError:
        raise
    except ZeroDivisionError as error:
        if traceback.extract_tb(error.__traceback__)[-1].name not in _CLIPPING:
            raise RoundError(f"round {round}: {error_in('strategy', name, error)}") from error
        raise RoundError(
            f"round {round}: a client's model is exactly the one it was sent, and Flower's clipping at the server divides by "
            f"the update's norm, 0; let strategy '{name}' clip at the clients (flower_dp_client_...), or see whether "
            "client.lr is too small to move the model."
        ) from error
    except Exception as error:
        raise RoundError(f"round {round}: {error_in('strategy', name, error)}") from error


def check(strategy: Strategy, *, cohort_size: int, has_buffers: bool) -> None:
    """What would hang, fail in the first round, or promise what it does not keep.

    Raises:
        ConfigError: one sentence on the first of these.
    """
    for layer in layers(strategy):
        fraction = getattr(layer, "fraction_train", 1.0)
        if not 0 < fraction <= 1:
            raise ConfigError(
                f"strategy.fraction_train={fraction:g} was given, but expected is a fraction above 0 and at most 1; "
                "leave it out and set server.cohort_size."
            )
        for key in ("min_train_nodes", "min_available_nodes"):
            if getattr(layer, key, 0) > cohort_size:
                raise ConfigError(
                    f"strategy.{key}={getattr(layer, key)} exceeds server.cohort_size={cohort_size}: the strategy would "
                    f"wait for ever; lower strategy.{key} or raise server.cohort_size."
                )
    asked, (needed, rule) = num_asked(strategy, cohort_size), num_replies_needed(strategy)
    inner = layers(strategy)[-1]
    if needed > asked:
        raise ConfigError(
            f"{type(inner).__name__} needs {needed} replies ({rule}), but asks {asked} clients a round; raise "
            "server.cohort_size or lower that setting."
        )
    if isinstance(inner, flower.FedTrimmedAvg) and inner.beta > 0 and int(inner.beta * asked) == 0:
        _log.warning(
            "strategy.beta=%g of %d replies is less than one: nothing is trimmed and the plain mean is left; raise it to "
            "%.2g or more",
            *(inner.beta, asked, 1 / asked),
        )
    for layer in layers(strategy):
        if isinstance(layer, _PRIVATE):
            _check_privacy(layer.num_sampled_clients, asked, has_buffers)


def _check_privacy(num_sampled_clients: int, asked: int, has_buffers: bool) -> None:
    if num_sampled_clients != asked:
        raise ConfigError(
            f"num_sampled_clients={num_sampled_clients} was given, but {asked} clients are asked a round and the noise "
            "has to fit them; make the two equal."
        )
    if has_buffers:
        raise ConfigError(
            "the model has buffers (BatchNorm's statistics), which differential privacy would pass on without "
            "clipping and noise; choose a model without, such as model.name=mlp."
        )


def check_settings(strategy: Strategy, settings: Mapping[str, Any], factory: Callable[..., Any]) -> None:
    """Settings of Flower's that would be ignored.

    Raises:
        ConfigError: one of them was given.
    """
    if not isinstance(layers(strategy)[-1], flower.FedAvg):
        return
    parameters = inspect.signature(factory).parameters
    for key, why in _IDLE.items():
        default = getattr(parameters.get(key), "default", None)
        if settings.get(key, default) not in (default, 0 if key != "eta_l" else default):  # 0: nobody is to be asked
            raise ConfigError(f"strategy.{key}={settings[key]} was given, but {why}.")
