"""Learn hyperparameters by gradients through the rounds that use them.

The rounds are the engine's, written as a function of the hyperparameters (`fedsign.bilevel.federated`). Each step runs
some rounds from the initial model, differentiates the resulting model's loss on held-out samples of the server, and
updates the hyperparameters by Adam. Each step draws new cohorts and batches.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from clients.batches import Batching
from clients.model_probes import dropouts
from fedsign import plugins
from fedsign.bilevel.estimate import Method
from fedsign.bilevel.federated import LR, WEIGHT_DECAY, WEIGHTS, Client, Federation, Round, raw_of, values_of
from fedsign.bilevel.unroll import Problem, Tree
from fedsign.bilevel.updates import Adam, parameters_of
from fedsign.compatibility import WEIGHTS_FOR_ALL, Experiment, Unless
from fedsign.config import ExperimentConfig
from fedsign.errors import ConfigError, RoundError
from fedsign.models.batch_norm import has_batch_norm
from fedsign.objectives.base import LocalContext, Objective
from fedsign.optim.displacement import is_linear
from fedsign.records import ObjectiveSpec
from fedsign.report.analysis import Analysis
from fedsign.report.chart import Axis, Chart, Series
from fedsign.report.figures import Draw, draw
from fedsign.rules import Rule, check
from fedsign.seeding import Purpose, generator, torch_generator
from fedsign.workload import Workload
from simulations.backends.base import intra_op_threads
from simulations.bilevel.kept_steps import KeptSteps, Step
from simulations.jobs import digest_of
from simulations.progress import display
from strategies.base import Strategy

_STRATEGY = "strategy."
_COLUMNS = 3  # of panels in the figure


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What to learn, and how. `rounds`: rounds per step; 0 for the experiment's."""

    names: tuple[str, ...]
    steps: int = 30
    rounds: int = 0
    lr: float = 0.1
    method: str = "forward_exact"


# A step: its number, the settings before it, and the loss of the rounds with these settings.


class Learning:
    """An experiment as a bilevel problem whose meta-parameters are settings.

    Raises:
        ConfigError: a setting cannot be learned, or a part of the experiment is not differentiable here.
    """

    def __init__(self, config: ExperimentConfig, options: Options, *, dtype: torch.dtype = torch.float32) -> None:
        self.options, self._dtype = options, dtype
        self._workload, self.config = Workload(config), config
        validation = self._workload.dataset.validation
        if validation is None:
            raise ConfigError(
                "data.validation_fraction=0 was given, but what is learned is judged by samples that are held out of "
                "training; set data.validation_fraction=0.2."
            )
        self._held_out = validation
        strategy = config.strategy.build()
        spec = strategy.objective(1) if isinstance(strategy, Strategy) else ObjectiveSpec()
        experiment = Experiment(workload=self._workload, spec=spec, strategy=strategy)
        check(_RULES, experiment)
        self._strategy: Strategy = strategy
        self._objective = experiment.objective
        # float64 in tests, which compare hypergradients with differences
        self._model = experiment.model.to(dtype)
        self._method: Method = plugins.build("hypergradient", options.method, {})
        self.num_rounds = options.rounds or config.rounds

    @cached_property
    def start(self) -> Tree:
        """Return the initial meta-parameters: the experiment's own settings.

        Raises:
            ConfigError: there is no such setting, or it is 0, where its logarithm is undefined.
        """
        return {name: raw_of(name, self._now(name)) for name in self.options.names}

    def problem(self, step: int = 0) -> Problem:
        """Return the rounds of a step and the loss after them. Step 0 has the first rounds of the experiment's run."""
        positions = range(1, self.num_rounds + 1)
        rounds = [self._round(step * self.num_rounds + position, position) for position in positions]
        # all held-out samples at once: one fixed outer loss, so that only the cohorts and batches vary
        features, targets = self._held_out.batch(torch.arange(len(self._held_out)))
        features, task = self._in_dtype(features), self._workload.task

        def outer(state: Tree, _: Tree) -> Tensor:
            return task.loss(self._outputs(state, features), targets)

        return Problem(inner=self._inner, data=rounds, outer=outer)

    def steps(self, others: Sequence["Learning"] = (), *, kept: KeptSteps | None = None) -> Iterator[Step]:
        """Yield the trajectory; the last record evaluates the learned values on the rounds of the first step.

        Args:
            others: the same experiment with other seeds; steps take turns between them.
            kept: the steps of an interrupted call, which are yielded first.

        Raises:
            RoundError: training diverged.
        """
        state, team, taken = Adam().begin(self.start), [self, *others], list[Step]()
        if kept is not None:
            state, taken = kept.state(state), [*kept.steps]
            yield from kept.steps
        for step in range(len(taken), self.options.steps + 1):
            # of the estimator's directions; cohorts and batches have the streams of their rounds
            seed = torch_generator(self.config.seed, Purpose.LEARNING, round=step + 1)
            meta = parameters_of(state)
            # the step after the last has the rounds of step 0 again, so that first and last loss can be compared
            turn, index = step % self.options.steps, step % self.options.steps % len(team)
            # the bits of the rounds depend on the number of threads, as in a run
            with intra_op_threads(self.config.engine.threads):
                estimate = self._method(team[index].problem(turn), meta, generator=seed)
            values = {name: each.tolist() for name, each in values_of(meta).items()}
            if not math.isfinite(estimate.value):
                raise RoundError(
                    f"the training diverged in step {step} with {values}; begin with a lower client.lr, or learn "
                    "with a lower --lr."
                )
            state = Adam().apply(state, estimate.gradient, self.options.lr)
            taken.append({"step": step, "loss": estimate.value, **values})
            if kept is not None:
                kept.write(taken, state)
            yield taken[-1]

    @cached_property
    def _inner(self) -> Federation:
        task, client = self._workload.training_task, self.config.client

        def loss(own: Tree, features: Tensor, targets: Tensor) -> Tensor:
            return task.loss(self._outputs(own, features), targets)

        return Federation(
            # no gradient flows into the initial model, and none of its graph is kept between steps
            start={name: each.detach() for name, each in self._model.named_parameters()},
            loss=loss,
            penalty=partial(_penalty, self._objective),
            settings={name: self._now(name) for name in (LR, WEIGHT_DECAY, WEIGHTS)},
            momentum=float(client.optimizer.settings["momentum"]),
        )

    def _outputs(self, own: Tree, features: Tensor) -> Tensor:
        # no buffers are passed: `_RULES` refuses BatchNorm
        outputs: Tensor = functional_call(self._model, own, (features,))
        return outputs

    def _round(self, number: int, position: int) -> Round:
        """Build round `number` as the engine runs it, at the learning rate of round `position`."""
        config = self.config
        # the engine's own streams: step 0 runs the cohorts and batches of the experiment's first rounds
        rng = generator(config.seed, Purpose.SAMPLING, round=number)
        cohort = self._strategy.sample(number, range(config.partition.num_clients), config.server.cohort_size, rng)
        # by `position`, not `number`: every step begins from the initial model, so its schedule begins anew
        factor = config.client.schedule.build(min(position, config.rounds), config.rounds)
        return Round(clients=[Client(each, self._batches(each, number)) for each in cohort], factor=float(factor))

    def _batches(self, client: int, number: int) -> list[tuple[Tensor, Tensor]]:
        index = self._workload.share_of(client)
        rng = generator(self.config.seed, Purpose.BATCHES, round=number, partition=client)
        plan = Batching.of(self.config.client).schedule(len(index), rng)
        indices = (torch.from_numpy(index[chosen.numpy()]) for epoch in plan for chosen in epoch)
        batches = map(self._workload.training_samples.batch, indices)
        return [(self._in_dtype(features), targets) for features, targets in batches]

    def _in_dtype(self, features: Tensor) -> Tensor:
        # token ids stay integers
        return features.to(self._dtype) if features.is_floating_point() else features

    def _now(self, name: str) -> Tensor:
        """Return a setting's value in the experiment."""
        client = self.config.client
        if name == WEIGHTS:
            return self._weights()
        known = {LR: client.lr, WEIGHT_DECAY: client.weight_decay}
        if name in known:
            return torch.tensor(known[name], dtype=self._dtype)
        value = getattr(self._objective, name.removeprefix(_STRATEGY), None) if name.startswith(_STRATEGY) else None
        # bool is an int in Python, and has no derivative
        if not isinstance(value, float | int) or isinstance(value, bool):
            own = [f"{_STRATEGY}{key}" for key, each in vars(self._objective).items() if isinstance(each, float | int)]
            raise ConfigError(
                f"{name} was given, but what can be learned of this experiment is "
                f"{', '.join([*own, LR, WEIGHT_DECAY, WEIGHTS])}."
            )
        return torch.tensor(float(value), dtype=self._dtype)

    def _weights(self) -> Tensor:
        """Return the weights of all clients, which sum to 1."""
        strategy, clients = self._strategy, range(self.config.partition.num_clients)
        weights_given: Sequence[float] = strategy.weights
        if not weights_given and strategy.weighting == "uniform":
            # a softmax learns them, so that only ratios count
            weights_given = [1.0 for _ in clients]
        weights = torch.tensor(
            weights_given or [len(self._workload.share_of(each)) for each in clients], dtype=self._dtype
        )
        return weights / weights.sum()


def _penalty(objective: Objective, own: Tree, received: Tree, values: Mapping[str, Tensor]) -> Tensor | None:
    """Evaluate the objective's penalty with the learned settings in place of its own."""
    learned = {name.removeprefix(_STRATEGY): each for name, each in values.items() if name.startswith(_STRATEGY)}
    if learned:
        # shallow, as all clients share the objective: only the copy's settings become tensors of the graph
        objective = copy.copy(objective)
        vars(objective).update(learned)
    sizes = {name: tensor.numel() for name, tensor in received.items()}
    # no client state: `_is_plain` refuses objectives that have one
    context = LocalContext(received=received, state={}, shared={}, unit_displacement=None, sizes=sizes)
    return objective.penalty(own, context)


def _is_plain(experiment: Experiment) -> bool:
    """Whether the next model is the mean of the clients' models, with no other state kept or sent."""
    kind, objective = type(experiment.strategy), experiment.objective
    answers = ("server_update", "evaluated", "shared", "weight")
    # identity of the class attribute: any override may serve something else than the mean
    if not issubclass(kind, Strategy) or any(getattr(kind, name) is not getattr(Strategy, name) for name in answers):
        return False
    return not (objective.has_state or objective.contrasts or objective.needs_unit_displacement)


def _takes_linear_steps(experiment: Experiment) -> bool:
    """Whether each local step is SGD with the configured momentum."""
    settings = experiment.config.client.optimizer.settings
    return is_linear(experiment.optimizer) and "momentum" in settings and not settings.get("nesterov")


def _only(path: str, value: Any) -> Rule[Experiment]:
    return Rule(Unless(path, (value,)), f"{{found}}{_LEARNED}{path}={value}")


# Refused here: what is not a smooth function of the settings, and what the differentiable rounds do not implement.
_LEARNED = " was given, but settings are learned only with "
_RULES: tuple[Rule[Experiment], ...] = (
    Rule(
        lambda experiment: not _is_plain(experiment),
        (
            f"strategy.name={{config.strategy.name}}{_LEARNED}strategies that serve the clients' mean and keep "
            "nothing (fedavg, fedprox, fedsign)"
        ),
    ),
    WEIGHTS_FOR_ALL,
    _only("client.clip_norm", 0.0),
    _only("client.loss", "task"),
    _only("client.schedule.per", "round"),
    _only("data.augment", "none"),
    _only("parameterization.name", "none"),
    _only("server.optimizer.name", "none"),
    _only("privacy.name", "none"),
    _only("attack.name", "none"),
    _only("server.over_sampling", 0.0),
    _only("engine.precision", "float32"),
    Rule(
        lambda experiment: experiment.config.get("faults.any", False),
        f"[faults]{_LEARNED}clients that do not fail on purpose",
    ),
    Rule(
        lambda experiment: not _takes_linear_steps(experiment),
        f"client.optimizer.name={{config.client.optimizer.name}}{_LEARNED}client.optimizer.name=sgd, without nesterov",
    ),
    Rule(
        lambda experiment: has_batch_norm(experiment.model) or dropouts(experiment.model),
        f"model.name={{config.model.name}}{_LEARNED}models without BatchNorm and dropout",
    ),
)


def kept_steps(folder: Path, learning: Learning, others: Sequence[Learning] = ()) -> KeptSteps:
    """The steps that an interrupted learning has left in a folder."""
    seeds = [each.config.seed for each in (learning, *others)]
    return KeptSteps(folder, digest_of(learning.config, seeds=seeds, **asdict(learning.options)))


def shown_steps(
    learning: Learning, others: Sequence[Learning] = (), *, kept: KeptSteps | None = None
) -> Iterator[Step]:
    """Take the steps, and show each."""
    start = 0 if kept is None else max(0, len(kept.steps) - 1)
    with display(learning.options.steps, start=start, unit="step") as shown:
        for step in learning.steps(others, kept=kept):
            yield step
            shown.show(step["step"], {"loss": step["loss"]})


def learn(config: ExperimentConfig, options: Options, *, keep: Path | None = None) -> Analysis:
    """Learn the settings and return the whole trajectory.

    Args:
        config: the experiment.
        options: what to learn, and how.
        keep: folder for the steps so far, with which the same call goes on after an interruption.
    """
    learning = Learning(config, options)
    kept = None if keep is None else kept_steps(keep, learning)
    trajectory = [*shown_steps(learning, kept=kept)]
    if kept is not None:
        kept.remove()
    first, last = trajectory[0], trajectory[-1]
    summary = [{"setting": name, "before": first[name], "learned": last[name]} for name in options.names]
    return Analysis(
        kind="learned",
        name=config.run_name,
        facts={
            "names": list(options.names),
            "rounds": learning.num_rounds,
            "steps": options.steps,
            "method": options.method,
            "loss_before": first["loss"],
            "loss": last["loss"],
        },
        rows=trajectory,
        summary=summary,
        arrays={name: np.array([step[name] for step in trajectory]) for name in ("loss", *options.names)},
        drawn_by=learning_figures,
    )


def learned_config(config: ExperimentConfig, analysis: Analysis) -> ExperimentConfig:
    """Return the experiment with the learned settings."""
    changes = {row["setting"]: row["learned"] for row in analysis.summary}
    if WEIGHTS in changes:
        changes["strategy.weights"] = changes.pop(WEIGHTS)
    return config.replace(**changes)


def learning_figures(analysis: Analysis) -> dict[str, Draw]:
    """Return the plots by name: a panel for the loss and one per setting, with a line for each of its numbers."""
    charts = []
    for name in ("loss", *analysis.facts["names"]):
        lines = analysis.arrays[name].reshape(len(analysis.arrays[name]), -1).T.tolist()
        series = [Series(name=name, x=range(len(line)), y=line, color=color) for color, line in enumerate(lines)]
        charts.append(Chart(title=name, series=series, x=Axis(label="step"), y=Axis()))
    return {"trajectory": partial(draw, *charts, height=1.7, columns=min(_COLUMNS, len(charts)))}
