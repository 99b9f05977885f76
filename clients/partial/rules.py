"""Settings to refuse when training a part of the model at a time, or adapters.

For parts, these are strategies that need the same tensors from every client, and differential privacy: its noise is
calibrated for a mean over the whole cohort in every coordinate, and would be too small for a mean over few clients.

For adapters, they are whatever changes or keeps A and B apart from the base that they belong to, where the server
changes that base, and aggregations that give all clients one adapter, where their ranks differ.

`adamw_8bit` takes no weights in channels-last memory.  Only clients convert their models, so without the rule it would
refuse them in round 1.
"""

from fedsign.compatibility import Chosen, Experiment, Unless
from fedsign.models.channels_last import is_channels_last, laid_out
from fedsign.optim.adamw_8bit import adamw_8bit
from fedsign.partial.adapters import LoraSettings
from fedsign.registry import resolve
from fedsign.rules import Choice, Rule

PARTS = Choice[Experiment](
    made=lambda experiment: experiment.trains.trains_part,
    given="client.optimizer.name={config.client.optimizer.name} trains a part of the model at a time, but",
    rules=(
        Rule(
            lambda experiment: not experiment.serves.proposes_update,
            "strategy {config.strategy.name} is Flower's and needs the same tensors from every client",
            "take one of FedSign's, such as strategy.name=fedavg, or an optimizer that trains all, such as adamw",
        ),
        Rule(
            lambda experiment: not experiment.serves.takes_parts,
            "strategy {config.strategy.name} needs to know how far every parameter went",
            "take another strategy, or an optimizer that trains all, such as client.optimizer.name=sgd",
        ),
        Rule(
            Chosen("privacy"),
            "{found} covers all of it with noise",
            "use privacy.name=none, or an optimizer that trains all, such as adamw",
        ),
        Rule(
            Unless("engine.compile", (False,)),
            "{found} would compile the model anew each time that other layers are frozen",
            "use engine.compile=false",
        ),
    ),
)


def _lora(experiment: Experiment) -> LoraSettings | None:
    return LoraSettings.of(experiment.workload)


BASE = Choice[Experiment](
    made=lambda experiment: (settings := _lora(experiment)) and settings.changes_base,
    given="client.optimizer.aggregation={config.client.optimizer.aggregation} changes the base model, but",
    rules=(
        Rule(
            lambda experiment: not experiment.serves.proposes_update,
            "strategy {config.strategy.name} is Flower's and aggregates A and B by itself",
            "take one of FedSign's, such as strategy.name=fedavg",
        ),
        Rule(
            lambda experiment: experiment.serves.own_aggregation or experiment.serves.own_update,
            "strategy {config.strategy.name} has a method {found} of its own, which changes A and B alone",
            "take one that serves the mean, such as strategy.name=fedavg",
        ),
        Rule(
            lambda experiment: experiment.config.server.optimizer.is_chosen,
            "server.optimizer.name={config.server.optimizer.name} would take steps of A and B alone",
            "use server.optimizer.name=none",
        ),
        Rule(
            lambda experiment: experiment.objective.has_state,
            "objective '{spec.name}' keeps tensors of adapters to an earlier base",
            "use a strategy without client state, such as strategy.name=fedavg",
        ),
        Rule(
            Chosen("privacy"),
            "{found} adds noise to A and B alone",
            "use client.optimizer.aggregation=ffa",
        ),
    ),
)
RANKS = Choice[Experiment](
    made=lambda experiment: (settings := _lora(experiment)) and settings.ranks,
    given="client.optimizer.ranks was given, but",
    rules=(
        Rule(
            lambda experiment: (
                len(_ranks(experiment)) != experiment.config.partition.num_clients and len(_ranks(experiment))
            ),
            "holds {found} ranks for {config.partition.num_clients} clients",
            "expected one rank for each",
        ),
        Rule(
            lambda experiment: (
                max(_ranks(experiment)) > experiment.config.client.optimizer.settings["rank"]
                and max(_ranks(experiment))
            ),
            "{found} in it is above client.optimizer.rank={config.client.optimizer.rank}",
            "raise client.optimizer.rank to the largest",
        ),
        Rule(
            Unless("client.optimizer.aggregation", ("average", "flora")),
            "{found} gives all clients one adapter",
            "use aggregation=flora, which stacks them, or aggregation=average, which pads them with zeros",
        ),
        Rule(
            Chosen("privacy"),
            "{found} bounds an update, and cutting the adapters to a client's rank would move them after that",
            "leave out the ranks",
        ),
    ),
)


def _ranks(experiment: Experiment) -> tuple[int, ...]:
    return tuple(experiment.config.client.optimizer.settings["ranks"])


def _has_channels_last_weights(experiment: Experiment) -> bool:
    model = experiment.model
    return experiment.workload.numerics.takes_channels_last(model) and any(
        is_channels_last(laid_out(parameter)) for parameter in model.parameters()
    )


EIGHT_BITS = Rule[Experiment](
    lambda experiment: (
        resolve("optimizer", experiment.config.client.optimizer.name) is adamw_8bit
        and _has_channels_last_weights(experiment)
    ),
    "client.optimizer.name={config.client.optimizer.name} was given, but the weights of model.name={config.model.name} "
    "are in channels-last memory",
    "set engine.channels_last=off",
)
RULES = (PARTS, BASE, RANKS, EIGHT_BITS)
