"""Run a comparison: `compare` in Python, and the implementation of `fedsign compare`.

Every unfinished cell is run, from its last checkpoint if it has one. A failed cell is recorded with its error and
not retried unless asked for; the comparison continues without it.
"""

import dataclasses
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fedsign import config as configs
from fedsign.comparison.folder import PLAN, Comparison, load_comparison
from fedsign.comparison.report import write_comparison
from fedsign.comparison.summary import Cell, Plan
from fedsign.comparison.tuning import validation_value
from fedsign.config import ExperimentConfig
from fedsign.errors import ConfigError, ResultsError, memory_errors
from fedsign.storage.disk import disk_errors
from fedsign.traits import EngineTraits
from fedsign.workload import Workload
from simulations import api
from simulations.comparison import arguments
from simulations.comparison.cells import CellValue, Configs
from simulations.comparison.plan import make_plan
from simulations.comparison.progress_display import ProgressDisplay
from simulations.comparison.request import NUM_SEEDS, STRATEGIES, Request
from simulations.comparison.search import optuna_version
from simulations.jobs import Job, Team, Watcher, digest_of

_log = logging.getLogger("fedsign")
NUM_TUNING_SEEDS = 2
MakePlan = Callable[..., tuple[Plan, Configs]]  # called with value_of, see `make_plan`
_NAMES = 'a list of names, such as ["fedavg", "fedsign"]; an algorithm of your own is named \'module:Name\''


def compare(
    experiment: ExperimentConfig | Mapping[str, Any] | None = None,
    *,
    strategies: Sequence[str] = STRATEGIES,
    seeds: int | Sequence[int] = NUM_SEEDS,
    grid: Mapping[str, Sequence[Any]] | None = None,
    by: Mapping[str, Sequence[Any]] | None = None,
    settings: Mapping[str, Any] | None = None,
    name: str | None = None,
    out: str | Path | None = None,
    reference: str | None = None,
    target: float | None = None,
    validation_fraction: float | None = None,
    tune: int = 0,
    tune_seeds: int | Sequence[int] = NUM_TUNING_SEEDS,
    tune_at: Mapping[str, Any] | None = None,
    search: Mapping[str, str] | None = None,
    workers: int | None = None,
    extend: bool = False,
    retry_failed: bool = False,
) -> Comparison:
    """Compare strategies over seeds and a grid; continue the comparison in `out` if there is one.

    Args:
        experiment: the base experiment: a configuration, or a dictionary of changes to the default one.
        strategies: names of strategies.
        seeds: the number of seeds, counted from the base's seed, or the seeds themselves.
        grid: key -> values.  Keys under strategy, client and server are hyperparameters: each strategy uses its
            best one on the validation samples.  Other keys are compared in all combinations, and so are
            server.cohort_size, client.local_epochs, client.local_steps and client.batch_size.
            "fedprox:strategy.mu" is a hyperparameter of one strategy.
        by: key -> values to compare and never to choose from, whatever the key.
        settings: key -> value, for single strategies as in `grid`.
        name: the comparison's name; by default the experiment's, or the data's.
        out: its folder; by default `comparisons/<name>`.
        reference: the strategy that differences are taken to; by default FedAvg if it is compared, or the first one.
        target: the metric's target for rounds and bytes; by default 95 % of the reference's final value, per condition.
        validation_fraction: fraction of training samples held out in all cells; by default 0.1 if there is a choice.
        tune: number of trials per strategy, over its own settings and the shared ones. The best settings are then
            trained on all training samples.
        tune_seeds: seeds per trial, a number or a list, disjoint from `seeds`.
        tune_at: key -> value in trials; conditions that differ only in these keys are tuned once.
        search: key -> range, such as "0.01..0.3:log", for single strategies as in `grid`.
        workers: number of processes; one per core by default.
        extend: accept a new plan if `out` holds another one; cells in both are not run again.
        retry_failed: run failed cells again.

    Raises:
        FedSignError: the plan cannot be made, or the comparison cannot be run.
    """
    checked = arguments.checked
    target = checked("target", target, arguments.Number | None, "a number, such as 0.5")
    workers = checked("workers", workers, arguments.Whole | None, "a whole number, 1 or more")
    reference = checked("reference", reference, str | None, "the name of one of the strategies")
    out = checked("out", out, Path | None, "the path of a folder")
    given = arguments.settings_of(settings)
    shared = {key: value for key, value in given.items() if is_for_all(key)}
    base = api.config_of(experiment).replace(**shared)
    tune = checked("tune", tune, arguments.Whole, "how many trials each strategy gets, such as 16")
    request = Request(
        trials=tune,
        tuning_seeds=arguments.tuning_seeds_of(tune_seeds, first=base.seed) if tune else (),
        tuning_settings=arguments.settings_of(tune_at),
        search=checked("search", search or {}, dict[str, str], 'key -> range, such as {"client.lr": "0.01..0.3:log"}'),
        strategies=checked("strategies", strategies, arguments.Names, _NAMES),
        seeds=arguments.seeds_of(seeds, first=base.seed),
        grid=arguments.axes_of("grid", grid),
        by=arguments.axes_of("by", by),
        settings={key: value for key, value in given.items() if key not in shared},
        validation_fraction=checked(
            "validation_fraction", validation_fraction, arguments.Number | None, "a number, such as 0.1"
        ),
    )
    chosen_name = (base.replace(name=name) if name is not None else base).project_name
    make = partial(
        make_plan, base, request, name=chosen_name, reference=reference, target=target, environment=environment(tune)
    )
    if tune:  # report a mistake in a condition now, and not after all trials
        whole = dataclasses.replace(request, trials=0, tuning_seeds=(), tuning_settings={}, search={})
        _, untuned = make_plan(base, whole, name=chosen_name, reference=reference, target=target, environment={})
        _check_parts([*untuned.values()])
    comparison = Comparison(Path(out or folder_of(chosen_name)).expanduser())
    return run_plan(comparison, make, workers=workers, extend=extend, retry_failed=retry_failed)


def environment(tune: int) -> dict[str, Any]:
    """Return package versions, with the search library's if there is a search."""
    return api.environment() | ({"optuna": optuna_version()} if tune else {})


def go_on(path: str | Path, *, workers: int | None = None, retry_failed: bool = False) -> Comparison:
    """Continue a comparison as it was planned.

    Raises:
        ResultsError: there is none, or this version of FedSign would plan other cells.
    """
    comparison = load_comparison(path)
    comparison.check_plan()
    recorded = comparison.plan
    command = recorded.request.get("command")
    if command is not None:
        raise ResultsError(f"{comparison.path} was made by 'fedsign {command}'; repeat that command to continue it.")
    make = partial(
        make_plan,
        configs.from_toml(recorded.config_toml),
        Request(**recorded.request),
        name=recorded.name,
        reference=recorded.reference,
        target=recorded.target,
        environment=recorded.environment,
    )
    plan, _ = make(value_of=_values_in(comparison, recorded.metric))
    # trials may have ended after the plan was written last, and the plan made of them is longer
    cells = [cell for cell in plan.cells if cell in recorded.cells] if recorded.tuning else plan.cells
    is_same = tuple(cells) == recorded.cells or (
        recorded.tuning and retry_failed
    )  # the values of trials decide what is planned next
    if not is_same:
        raise ResultsError(
            f"the comparison in {comparison.path} was planned by fedsign "
            f"{recorded.environment.get('fedsign', 'unknown')}, and this version makes other cells of its plan; go "
            "on with that version, or start a new comparison."
        )
    return run_plan(comparison, make, workers=workers, extend=False, retry_failed=retry_failed)


def is_for_all(key: str) -> bool:
    """Whether a setting belongs to the base experiment, and not to strategies."""
    return ":" not in key and key.partition(".")[0] != "strategy"


def folder_of(name: str) -> Path:
    """Return the default folder of a comparison."""
    return Path("comparisons") / name


@memory_errors()
def run_plan(
    comparison: Comparison,
    make: MakePlan,
    *,
    workers: int | None,
    extend: bool = False,
    retry_failed: bool = False,
    allowed: Collection[str] = (),
) -> Comparison:
    """Run the planned cells, plan again with their values, and repeat until nothing is left.

    Args:
        comparison: the folder.
        make: returns the plan, given the cells' values so far.
        workers: number of processes; None for one per core.
        extend: accept the plan if the folder holds another one.
        retry_failed: run failed cells again.
        allowed: names of files that the folder may hold before there is a plan.
    """
    # the plan is made twice: reading the values of trials requires its metric
    metric = make()[0].metric
    plan, cell_configs = make(value_of=_values_in(comparison, metric))
    _check_lengths(cell_configs)
    processes = _workers(cell_configs, workers)
    existing = comparison.plan if (comparison.path / PLAN).is_file() else None
    _check_folder(comparison.path, plan, existing, extend=extend, allowed=allowed)
    # only the first trial of a search: the ends of all ranges were checked with the space
    first = [cell for cell in _pending(comparison, plan, retry_failed) if not cell.trial]
    _check_parts([cell_configs[cell.id] for cell in first])
    if existing is not None and first:
        _check_split(comparison, existing)
    with disk_errors(comparison.path):
        comparison.path.mkdir(parents=True, exist_ok=True)
    # keep the versions that the comparison began with; runs warn about other ones
    recorded_environment = (
        existing.environment if existing is not None and not _difference(plan, existing) else plan.environment
    )
    team = Team("simulations.comparison.worker", workers=processes, logs=comparison.path / "logs")
    with comparison.locked(), team:
        while True:
            # before its cells are run: `go_on` compares what it plans with what was recorded
            comparison.write_plan(dataclasses.replace(plan, environment=recorded_environment))
            pending = _pending(comparison, plan, retry_failed)
            for cell in pending:
                comparison.write_failure(cell, None)
            if pending:
                _run_cells(comparison, plan, pending, cell_configs, team)
            # once: a cell that fails again must not be run for ever
            cells, retry_failed = plan.cells, False
            plan, cell_configs = make(value_of=_values_in(comparison, metric))
            # no search asks for more
            if plan.cells == cells:
                break
        write_comparison(comparison.summary())
    return comparison


def _check_split(comparison: Comparison, plan: Plan) -> None:
    """Check that a cell that was begun would still be split as it was, so that those to come can be paired with it."""
    begun = next((run for cell in plan.cells if (run := comparison.run_of(cell)) is not None), None)
    if begun is not None:
        api.check_split(begun, Workload(configs.from_toml(begun.config_toml)))


def _values_in(comparison: Comparison, metric: str) -> CellValue:
    """Return a function that reads cells' values from the runs in the folder."""
    return lambda cell: validation_value(comparison.result_of(cell), metric)


def _pending(comparison: Comparison, plan: Plan, retry_failed: bool) -> list[Cell]:
    """Return the cells to run, one per distinct configuration."""
    # reversed: of cells with one configuration the first in the plan stays
    first = {cell.digest: cell for cell in reversed(plan.cells)}
    left = [cell for cell in plan.cells if first[cell.digest] is cell and not comparison.is_finished(cell)]
    return left if retry_failed else [cell for cell in left if comparison.failure_of(cell) is None]


def _run_cells(comparison: Comparison, plan: Plan, pending: Sequence[Cell], cell_configs: Configs, team: Team) -> None:
    """Run cells seed by seed, so that there is soon something to compare. Trials come first, in their order."""
    order = {seed: index for index, seed in enumerate(plan.seeds)}
    cells = {
        cell.id: cell for cell in sorted(pending, key=lambda cell: -1 if cell.trial is not None else order[cell.seed])
    }
    jobs = [_job(comparison, cell, cell_configs[id]) for id, cell in cells.items()]

    class Notes(Watcher):
        """Records failures."""

        def on_end(self, worker: int, job: Job, error: str | None) -> None:
            if error is not None:
                comparison.write_failure(cells[job.id], error)

    with ProgressDisplay(plan, pending) as display:
        team.run(jobs, (Notes(), display))


def _job(comparison: Comparison, cell: Cell, config: ExperimentConfig) -> Job:
    """Return the job that runs a cell in its folder, without a progress bar of its own."""
    run = comparison.run_of(cell)
    callbacks = [name for name in config.callbacks if name != "progress"]
    here = config.replace(name=cell.id, callbacks=callbacks, **{"results.root": str(comparison.cells)})
    return Job(id=cell.id, message={"config": here.to_toml(), "resume": None if run is None else str(run.path)})


def _workers(cell_configs: Configs, given: int | None) -> int:
    """Return the number of processes; 1 for engines that start processes themselves."""
    if given is not None and given < 1:
        raise ConfigError(f"workers={given} was given, but expected 1 or more.")
    named = {config.engine.name for config in cell_configs.values()}
    engines = {name for name in named if not EngineTraits.of(name).trains_here}
    if engines:
        if given not in (None, 1):
            raise ConfigError(
                f"workers={given} was given with engine.name={', '.join(sorted(engines))}, which starts processes of "
                "its own; expected 1."
            )
        return 1
    # of the most demanding cell: the same workers run all
    cores = max(config.engine.threads * config.engine.settings["workers"] for config in cell_configs.values())
    # affinity, not cpu_count: a container or a scheduler may have lent fewer cores
    return given or max(1, len(os.sched_getaffinity(0)) // cores)


def _check_lengths(cell_configs: Configs) -> None:
    """Refuse early stopping: curves are averaged over seeds round by round."""
    if patience := max((config.get("results.patience", 0) for config in cell_configs.values()), default=0):
        raise ConfigError(
            f"results.patience={patience} was given, but the runs of a comparison have the same number of rounds; set "
            "it to 0, and results.keep_best=true to keep the best model of each run."
        )


def _check_folder(path: Path, plan: Plan, existing: Plan | None, *, extend: bool, allowed: Collection[str]) -> None:
    """Raise ResultsError if the folder holds something else."""
    if existing is not None:
        difference = _difference(plan, existing)
        if difference and not extend:
            raise ResultsError(
                f"{path} holds another plan: {difference}; give another --out, or --extend to take the new plan and "
                "keep the cells that both have."
            )
    else:
        check_is_free(path, allowed)


def check_is_free(path: Path, allowed: Collection[str] = ()) -> None:
    """Raise ResultsError if a folder without a comparison holds files other than `allowed`."""
    if (path / PLAN).is_file() or not path.exists():
        return
    if not path.is_dir() or any(file.name not in allowed for file in path.iterdir()):
        raise ResultsError(f"{path} is there and is no comparison; give another folder with --out.")


def _difference(plan: Plan, existing: Plan) -> str:
    """Summarize what the user changed; empty if the cells are the same."""
    is_same = (plan.request, plan.config_toml) == (existing.request, existing.config_toml)
    if plan.cells == existing.cells or (plan.grows and is_same):
        return ""
    # plans of older versions lack newer options, which then had their defaults
    recorded = dict.fromkeys(plan.request) | dataclasses.asdict(Request()) | dict(existing.request)
    for key, new in plan.request.items():
        if new != recorded[key]:
            return f"{key} were {recorded[key]} there and are {new} now"
    return "the experiment's configuration differs"


def _check_parts(cell_configs: Sequence[ExperimentConfig]) -> None:
    """Build every component of every configuration, so that a mistake is one error now and not one per cell.

    Seeds do not affect components. Consecutive cells mostly share their data, which are loaded once, and checked once.
    """
    last: Workload | None = None
    split, warnings = None, set[str]()
    for config in {digest_of(config.replace(seed=0)): config for config in cell_configs}.values():
        last = api.check(config, like=last)
        if last.split is not split:
            split = last.split
            warnings |= {f"{record['message']}; {record['remedy']}." for record in last.check_data()}
    for warning in sorted(warnings):
        _log.warning("%s", warning)
