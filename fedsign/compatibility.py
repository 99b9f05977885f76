"""Compatibility rules: every combination of settings that is refused before the first round.

`RULES` are the core's; capabilities add theirs, in the same form, at the extension point `rules`.  A rule reads an
`Experiment`: its settings, the traits of its components (`fedsign.traits`), and its model, built on demand.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from fedsign import plugins
from fedsign.config import ExperimentConfig
from fedsign.extensions import extensions
from fedsign.models.batch_norm import has_batch_norm
from fedsign.models.features import classifier_of
from fedsign.numerics import is_low
from fedsign.objectives.base import Objective, gradient_fault
from fedsign.optim.base import optimizer_of
from fedsign.optim.displacement import is_linear
from fedsign.records import ObjectiveSpec, Role
from fedsign.rules import Choice, Rule, check
from fedsign.traits import EngineTraits, OptimizerTraits, StrategyTraits
from fedsign.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What a rule may read.  Expensive parts, such as the model, are built once and only on demand."""

    workload: Workload
    spec: ObjectiveSpec
    strategy: Any = None  # None: clients train without a server

    @property
    def config(self) -> ExperimentConfig:
        return self.workload.config

    @property
    def engine(self) -> EngineTraits:
        return EngineTraits.of(self.config.engine.name)

    @property
    def trains(self) -> OptimizerTraits:
        return OptimizerTraits.of(self.config.client.optimizer.name)

    @property
    def serves(self) -> StrategyTraits:
        if self.strategy is None:
            return StrategyTraits(proposes_update=True, takes_parts=True)
        return StrategyTraits.of(self.strategy)

    @cached_property
    def model(self) -> nn.Module:
        """A model in training mode; a separate copy from the one that is trained."""
        return self.workload.make_model().train()

    @cached_property
    def objective(self) -> Objective:
        objective: Objective = plugins.build("objective", self.spec.name, self.spec.settings)
        return objective

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        client = self.config.client
        return optimizer_of(client.optimizer, self.model, client.lr, client.weight_decay)

    @cached_property
    def low_type(self) -> str:
        """The type of the model's weights below float32, such as bfloat16; empty if there are none."""
        low = (parameter for parameter in self.model.parameters() if is_low(parameter))
        return next((str(parameter.dtype).removeprefix("torch.") for parameter in low), "")

    @property
    def has_buffers(self) -> bool:
        return Role.BUFFER in self.workload.roles.values()


@dataclass(frozen=True)
class Unless:
    """`path=value` if the setting has a value that is not allowed; empty if no capability defines the setting."""

    path: str
    allowed: tuple[Any, ...]

    def __call__(self, experiment: Experiment) -> str:
        value = experiment.config.get(self.path, self.allowed[0])  # the key is missing if its capability was deleted
        return "" if value in self.allowed else f"{self.path}={_as_text(value)}"


@dataclass(frozen=True)
class Chosen:
    """`section.name=value` if the section names a component other than its default, which does nothing."""

    section: str

    def __call__(self, experiment: Experiment) -> str:
        if not experiment.config.get(f"{self.section}.is_chosen", False):
            return ""
        return f"{self.section}.name={experiment.config.get(f'{self.section}.name', '')}"


def only(path: str, *allowed: Any, because: str) -> Rule[Experiment]:
    """A rule: the setting must have one of these values."""
    remedy = " or ".join(map(_as_text, allowed)) if allowed[1:] else f"{path}={_as_text(*allowed)}"
    return Rule(Unless(path, allowed), f"{{found}} {because}", f"use {remedy}")


def _as_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_experiment(experiment: Experiment) -> None:
    """Raise ConfigError for the first rule that the experiment violates."""
    for rules in (*extensions("rules"), RULES):
        check(rules, experiment)


def _classifies_data(experiment: Experiment) -> bool:
    model = experiment.model
    return len(list(model.parameters())) == len(list(classifier_of(model).parameters()))


STEPS_IN_FULL: Rule[Experiment] = Rule(
    lambda experiment: experiment.config.client.low_precision != "plain" and experiment.low_type,
    "client.low_precision={config.client.low_precision} steps in float32, but the model's weights are {found}, and "
    "here steps are taken in the weights' own type",
    "use float32 weights, such as model.dtype=float32, or client.low_precision=plain",
)
WEIGHTS_FOR_ALL: Rule[Experiment] = Rule(
    lambda experiment: (
        len(experiment.serves.weights) not in (0, experiment.config.partition.num_clients)
        and len(experiment.serves.weights)
    ),
    "strategy.weights with {found} numbers was given for {config.partition.num_clients} clients",
    "expected one for each",
)
RULES: tuple[Rule[Experiment] | Choice[Experiment], ...] = (
    WEIGHTS_FOR_ALL,
    Rule(
        lambda experiment: experiment.config.client.low_precision != "master" and not experiment.low_type,
        "client.low_precision={config.client.low_precision} was given, but model.name={config.model.name} has no "
        "weights below float32",
        "leave it out, or set model.dtype=bf16 where the model has it",
    ),
    Rule(
        lambda experiment: (
            experiment.config.client.low_precision == "stochastic"
            and experiment.low_type != "bfloat16"
            and experiment.low_type
        ),
        "client.low_precision=stochastic was given, but the model's weights are {found}, and only bfloat16 is rounded",
        "use client.low_precision=master",
    ),
    Rule(
        lambda experiment: (
            experiment.config.server.evaluate_clients and not experiment.workload.is_evaluated_at_clients
        ),
        "server.evaluate_clients={config.server.evaluate_clients} was given, but the server evaluates",
        "set it to 0, or let the clients evaluate: server.evaluation=clients",
    ),
    Rule(
        lambda experiment: experiment.objective.contrasts and _classifies_data(experiment),
        "model.name={config.model.name} was given, but objective '{spec.name}' contrasts what enters the classifier, "
        "and here that is the data itself",
        "use a model with a hidden layer",
    ),
    Rule(
        lambda experiment: not experiment.serves.proposes_update and experiment.config.server.optimizer.is_chosen,
        "server.optimizer.name={config.server.optimizer.name} was given, but strategy {config.strategy.name} is "
        "Flower's and updates the model by itself",
        "set server.optimizer.name=none, or take a strategy of FedSign's",
    ),
    Rule(
        lambda experiment: gradient_fault(experiment.objective, [*experiment.workload.roles]),
        "penalty_gradient of objective '{spec.name}' {found}",
        "correct it, or leave it out",
    ),
    Rule(
        lambda experiment: experiment.objective.needs_unit_displacement and not is_linear(experiment.optimizer),
        "client.optimizer.name={config.client.optimizer.name} was given, but objective '{spec.name}' needs an "
        "optimizer that does not rescale gradients",
        "use client.optimizer.name=sgd",
    ),
    Rule(
        lambda experiment: (
            experiment.objective.needs_unit_displacement and experiment.config.client.schedule.per == "step"
        ),
        "client.schedule.per=step was given, but objective '{spec.name}' needs one learning rate for all steps of a "
        "round",
        "use client.schedule.per=round",
    ),
    Rule(
        lambda experiment: experiment.config.client.micro_batch and has_batch_norm(experiment.model),
        "client.micro_batch={config.client.micro_batch} was given, but model.name={config.model.name} has BatchNorm, "
        "whose statistics would be those of pieces of a batch",
        "set it to 0 and lower client.batch_size instead",
    ),
    Rule(
        lambda experiment: (
            experiment.config.client.micro_batch
            and experiment.objective.contrasts
            and not experiment.objective.contrast_is_mean
        ),
        "client.micro_batch={config.client.micro_batch} was given, but objective '{spec.name}' does not say that its "
        "contrast is a mean over samples (contrast_is_mean)",
        "set it to 0",
    ),
    Choice(
        made=lambda experiment: experiment.config.client.loss == "model",
        given="client.loss=model was given, but",
        rules=(
            only("client.label_smoothing", 0.0, because="changes the task's loss"),
            only("client.temperature", 1.0, because="changes the task's loss"),
            only("client.micro_batch", 0, because="cuts the batch whose loss the model computes"),
        ),
    ),
    Choice(made=lambda experiment: not experiment.serves.proposes_update, rules="strategies.flower.rules:RULES"),
)
