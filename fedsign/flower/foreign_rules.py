"""Requirements of Flower's own strategies, checked before a run starts or a rule is applied."""

import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy

from fedsign.config import ExperimentConfig
from fedsign.errors import FedSignError, RoundError
from fedsign.flower import wire
from fedsign.flower.foreign import layers
from fedsign.flower.shims import cheap_collections, quiet_flower
from fedsign.registry import error_in

_log = logging.getLogger("fedsign")

# Flower's functions that divide by the norm of an update.
_CLIPPING = ("clip_inputs_inplace", "adaptive_clip_inputs_inplace")


@dataclass(frozen=True, kw_only=True, slots=True)
class Deferred:
    """A strategy that depends on the experiment, e.g. on the number of clients for its noise."""

    make: Callable[[ExperimentConfig], Strategy]

    def strategy_for(self, name: str, config: ExperimentConfig) -> Strategy:
        """The strategy for an experiment; `name` is the name that the user gave.

        Raises:
            ConfigError: Flower rejected the settings.
        """
        try:
            return self.make(config)
        except FedSignError:
            raise
        except Exception as error:
            raise error_in("strategy", name, error) from error


def weighted_by(strategy: Strategy) -> str:
    """The metric by which replies are weighted."""
    return str(getattr(layers(strategy)[-1], "weighted_by_key", wire.NUM_EXAMPLES_KEY))


def num_sampled(strategy: Strategy, cohort_size: int) -> int:
    """How many clients the strategy samples from a cohort of this size, by Flower's rule."""
    inner = layers(strategy)[-1]
    if not isinstance(inner, flower.FedAvg):
        return cohort_size
    return max(int(cohort_size * inner.fraction_train), inner.min_train_nodes)


def num_replies_needed(strategy: Strategy) -> tuple[int, str]:
    """The smallest number of replies that the rule needs, and its formula."""
    inner = layers(strategy)[-1]
    if isinstance(inner, flower.Bulyan):
        return 4 * inner.num_malicious_nodes + 3, "4 x num_malicious_nodes + 3"
    if isinstance(inner, flower.MultiKrum):  # includes Krum
        closest = 2 * inner.num_malicious_nodes + 3  # Blanchard et al. 2017: 2f + 2 < n
        if inner.num_nodes_to_select > closest:
            return inner.num_nodes_to_select, "num_nodes_to_select"
        return closest, "2 x num_malicious_nodes + 3"
    return 1, "one"


def check_num_replies(strategy: Strategy, num_replies: int, round: int) -> None:
    """Check that a round has enough replies for the strategy's rule.

    Raises:
        RoundError: too many clients failed.
    """
    needed, rule = num_replies_needed(strategy)
    if num_replies < needed:
        raise RoundError(
            f"round {round} ended with {num_replies} usable replies, but {type(layers(strategy)[-1]).__name__} needs "
            f"{needed} ({rule}); raise server.cohort_size, so that some may fail."
        )


@contextmanager
def calling(name: str, round: int) -> Iterator[None]:
    """A context manager for calls of a foreign strategy: exceptions become RoundErrors, Flower's log is muted.

    Raises:
        RoundError: the strategy raised an exception.
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
            f"round {round}: a client's model is exactly the one it was sent, and Flower's clipping at the server "
            f"divides by the update's norm, 0; let strategy '{name}' clip at the clients (flower_dp_client_...), or "
            "see whether client.lr is too small to move the model."
        ) from error
    except Exception as error:
        raise RoundError(f"round {round}: {error_in('strategy', name, error)}") from error


def warn_of_trimming(strategy: Strategy, cohort_size: int) -> None:
    """Warn if a trimmed mean trims nothing, and so equals the plain mean."""
    inner, num_clients = layers(strategy)[-1], num_sampled(strategy, cohort_size)
    if isinstance(inner, flower.FedTrimmedAvg) and inner.beta > 0 and int(inner.beta * num_clients) == 0:
        _log.warning(
            "strategy.beta=%g of %d replies is less than one: nothing is trimmed and the plain mean is left; raise "
            "it to %.2g or more",
            *(inner.beta, num_clients, 1 / num_clients),
        )
