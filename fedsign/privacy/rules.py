"""Settings to refuse with differential privacy.

These are strategies that see raw replies, weights by samples, buffers (a noisy variance may be negative), and metrics
of unclipped updates.
"""

from typing import Any

from fedsign.compatibility import Chosen, Experiment, only
from fedsign.privacy.section import PrivacyPart
from fedsign.rules import Choice, Rule


def _rule(experiment: Experiment) -> Any:
    """The configured `Central` or `Local`."""
    return PrivacyPart.of(experiment.config).build()


PRIVACY = Choice[Experiment](
    made=Chosen("privacy"),
    given="privacy.name={config.privacy.name} was given, but",
    rules=(
        Rule(
            lambda experiment: not experiment.serves.proposes_update,
            "strategy {config.strategy.name} is Flower's and takes the replies as they are",
            "take a strategy of FedSign's, or one of Flower's flower_dp_... with privacy.name=none",
        ),
        Rule(
            lambda experiment: experiment.serves.own_aggregation,
            "strategy {config.strategy.name} has a method {found} of its own, which takes the replies as they are",
            "override `server_update` instead",
        ),
        Rule(
            lambda experiment: experiment.serves.weights_replies,
            "strategy {config.strategy.name} weights its replies, so that one client could count for more than the "
            "noise covers",
            "use strategy.weighting=uniform, without strategy.weights",
        ),
        only("server.counters", "copied", because="takes counts of clients as they are, and noise hides updates only"),
        Rule(
            lambda experiment: experiment.has_buffers,
            "model.name={config.model.name} has buffers, such as BatchNorm's statistics, which noise would spoil",
            "use a model without BatchNorm",
        ),
        Rule(
            lambda experiment: not _rule(experiment).trusts_server and experiment.workload.is_evaluated_at_clients,
            "the clients evaluate, and would send figures without noise to a server that is not trusted",
            "use server.evaluation=server, or privacy.name=central",
        ),
        Rule(
            lambda experiment: _rule(experiment).trusts_server and experiment.config.get("results.signs", False),
            "results.signs=true counts signs on updates without noise",
            "set results.signs=false",
        ),
        Rule(
            lambda experiment: (
                _rule(experiment).delta * experiment.config.partition.num_clients >= 1
                and f"{_rule(experiment).delta:g}"
            ),
            "privacy.delta={found} was given for {config.partition.num_clients} clients, "
            "where it would be private to publish one of "
            "them at random",
            "expected less than 1 by their number: lower privacy.delta",
        ),
    ),
)
RULES = (PRIVACY,)
