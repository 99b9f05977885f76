"""Run an ablation: a comparison whose rows are a regularizer and its matched controls."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fedsign.ablation.controls import FEDAVG, AblatedMethod, Control, controls_of
from fedsign.ablation.page import write_page
from fedsign.comparison.folder import Comparison
from fedsign.comparison.summary import Cell, Plan, strategy_label
from fedsign.config import ExperimentConfig
from fedsign.errors import ConfigError
from fedsign.federation.aggregation import norm_of
from fedsign.metrics import is_higher_better
from fedsign.registry import one_of
from fedsign.workload import Workload
from simulations import api
from simulations.comparison import arguments
from simulations.comparison.cells import CellValue, Configs, cell_of, metric_of
from simulations.comparison.checks import check_seeds
from simulations.comparison.execution import run_plan
from simulations.comparison.plan import VALIDATION_FRACTION
from simulations.comparison.request import NUM_SEEDS
from simulations.rounds import make_strategy
from strategies.base import Strategy

COMMAND = "ablate"
_RECORDED = {"weight_norms": "weight_norm", "update_norms": "update_norm"}


def ablate(
    strategy: str,
    experiment: ExperimentConfig | Mapping[str, Any] | None = None,
    *,
    seeds: int | Sequence[int] = NUM_SEEDS,
    controls: Sequence[str] = (),
    out: str | Path | None = None,
    workers: int | None = None,
    extend: bool = False,
    retry_failed: bool = False,
) -> Comparison:
    """Run a regularizer, FedAvg and the matched controls, and write `ablation.html`; continue what is in `out`.

    Args:
        strategy: the regularizer.
        experiment: a configuration, or a dictionary of changes to the default one. Its strategy settings apply to
            `strategy`.
        seeds: the number of seeds, counted from the experiment's seed, or the seeds themselves.
        controls: keys of the controls to run; all if empty.
        out: the output folder; `ablations/NAME` by default.
        workers: number of processes; one per core by default.
        extend: accept new seeds and controls if `out` holds other ones. Existing runs are kept.
        retry_failed: repeat failed runs.

    Raises:
        FedSignError: the strategy is not a regularizer, a control is unknown, or nothing can be run.
    """
    config = prepared(strategy, api.config_of(experiment))
    rows = chosen(controls_of(method_of(config)), controls, strategy)
    folder = Path(out or Path("ablations") / f"{config.project_name}-{strategy.replace(':', '-')}").expanduser()
    comparison = Comparison(folder)
    chosen_seeds = arguments.seeds_of(seeds, first=config.seed)
    check_seeds(chosen_seeds)
    make = partial(make_plan, config, rows, comparison, seeds=chosen_seeds)
    run_plan(comparison, make, workers=workers, extend=extend, retry_failed=retry_failed)
    write_page(comparison)
    return comparison


def prepared(strategy: str, config: ExperimentConfig) -> ExperimentConfig:
    """Return the experiment with this strategy, validation samples and sign recording."""
    if strategy == FEDAVG:
        raise ConfigError(
            "fedavg was given, which is what a regularizer is compared with; name one, such as fedsign or fedprox."
        )
    changes: dict[str, Any] = {"results.signs": True}
    if config.strategy.name != strategy:
        changes["strategy.name"] = strategy
    if not config.data.validation_fraction:
        changes["data.validation_fraction"] = VALIDATION_FRACTION
    return config.replace(**changes)


def method_of(config: ExperimentConfig) -> AblatedMethod:
    """Return the regularizer that the controls are matched to."""
    workload = Workload(config)
    strategy = make_strategy(workload)
    if not isinstance(strategy, Strategy):
        raise ConfigError(
            f"strategy {config.strategy.name} is Flower's own, whose clients minimize the task's loss; name a "
            "strategy whose clients have a regularizer, such as fedsign."
        )
    model = workload.make_model()
    weights = dict(model.named_parameters())
    spec = strategy.objective(1)
    averages = type(strategy).server_update is Strategy.server_update and type(strategy).evaluated is Strategy.evaluated
    return AblatedMethod(
        strategy=config.strategy.name,
        label=strategy_label(config.strategy.name),
        settings=config.strategy.settings,
        objective={"objective": spec.name, "settings": dict(spec.settings)} if averages else {},
        lr=config.client.lr,
        momentum=config.client.optimizer.settings.get("momentum"),
        rms=norm_of(weights, weights) / math.sqrt(sum(each.numel() for each in weights.values())),
    )


def chosen(rows: Sequence[Control], keys: Sequence[str], strategy: str) -> list[Control]:
    """Return FedAvg, the regularizer and the controls with these keys, or all controls if there are no keys."""
    known = [row.key for row in rows[2:]]
    for key in keys:
        if key not in known:
            raise ConfigError(f"control '{key}' of {strategy} is not known.{one_of(key, known)}.")
    return [*rows[:2], *(row for row in rows[2:] if not keys or row.key in keys)]


def make_plan(
    config: ExperimentConfig,
    rows: Sequence[Control],
    comparison: Comparison,
    *,
    seeds: Sequence[int],
    value_of: CellValue = lambda cell: None,
) -> tuple[Plan, Configs]:
    """Plan all cells. A control that follows the norms of a run is added once that run has ended."""
    metric = metric_of(config)
    cells: dict[tuple[str, int], Cell] = {}
    configs: dict[str, ExperimentConfig] = {}
    for row in rows:
        for seed in seeds:
            changes = dict(row.changes)
            if row.norms is not None:
                # the rows are in order: the run that is followed comes before its followers
                norms = _norms(comparison, cells.get((row.like, seed)), _RECORDED[row.norms])
                if norms is None:
                    continue
                changes[f"strategy.{row.norms}"] = norms
            own = config.replace(seed=seed, **changes)
            cell = cell_of(own, {}, {}, name=row.key)
            cells[row.key, seed], configs[cell.id] = cell, own
    present = {key for key, _ in cells}
    request = {"command": COMMAND, "seeds": list(seeds), "controls": [row.key for row in rows[2:]]}
    return Plan(
        name=f"{config.project_name}, {config.strategy.name} ablated",
        metric=metric,
        higher_is_better=is_higher_better(metric),
        reference=FEDAVG,
        target=None,
        labels={row.key: row.label for row in rows if row.key in present},
        seeds=tuple(seeds),
        cells=tuple(cells.values()),
        config_toml=config.to_toml(),
        request=request,
        environment=api.environment(),
        rows=tuple(dataclasses.asdict(row) for row in rows),
    ), configs


def _norms(comparison: Comparison, cell: Cell | None, key: str) -> list[float] | None:
    """Return the norms of a run, one per round, or None if the run has not finished with finite values."""
    if cell is None or not comparison.is_finished(cell):
        return None
    norms = [record.get(key) for record in comparison.result_of(cell).records]
    # None: diverged; 0 is no norm to rescale to
    return None if not all(norms) else [float(each) for each in norms if each is not None]
