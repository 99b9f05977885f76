"""Python API: `run` an experiment, `load_run` its results.

>>> import tempfile
>>> done = run({"rounds": 1, "callbacks": [], "results": {"root": tempfile.mkdtemp()}})
>>> done.rounds[0]["round"], load_run(done.path).outcome["status"]
(1, 'finished')
"""

import importlib.metadata
import logging
import platform
import subprocess
from collections import ChainMap
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from clients.local_trainers import decided
from clients.rehearsal import rehearse
from clients.state.cache import StateCache
from clients.trainer import check_training
from fedsign import config as configs
from fedsign import plugins
from fedsign._version import __version__
from fedsign.config import ExperimentConfig
from fedsign.data.partition.lazy import counted_clients
from fedsign.errors import ConfigError, DataError, FedSignError, ResultsError, memory_errors, shortage_of
from fedsign.extensions import extensions
from fedsign.former_names import current_tree
from fedsign.models.transform import whole_state
from fedsign.records import ObjectiveSpec
from fedsign.sections import tables
from fedsign.seeding import Purpose, global_stream
from fedsign.storage import checkpoints, finding, results
from fedsign.storage.checkpoints import Checkpoint
from fedsign.storage.results import Record, RunFolder
from fedsign.workload import Workload
from simulations.backends.base import Engine
from simulations.callbacks.base import Callback
from simulations.frames import to_frame
from simulations.resumed_split import check_same_split, with_named_cut
from simulations.rounds import make_strategy
from strategies.base import Strategy

if TYPE_CHECKING:
    import pandas as pd

_log = logging.getLogger("fedsign")
_CHANGEABLE_ON_RESUME = frozenset({"rounds", "callbacks", "results"})
_WAITING_KEYS = ("engine.start_timeout_s", "server.min_replies", "server.round_timeout_s")  # may change, too


@dataclass(frozen=True)
class Run:
    """A run on disk."""

    folder: RunFolder

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self.folder.path

    @property
    def outcome(self) -> Record:
        """How the run ended: `{"status": "finished" | "failed" | "unfinished", ...}`."""
        return self.folder.outcome

    @property
    def rounds(self) -> list[Record]:
        """One record per round: loss, metrics, clients, failures, bytes."""
        return self.folder.rounds()

    @cached_property
    def config(self) -> ExperimentConfig:
        """The complete configuration."""
        return configs.from_toml(self.folder.config_toml)

    def model(self, *, best: bool = False) -> nn.Module:
        """Load the evaluated model, of the newest checkpoint until the run has finished, or the best one by validation.

        Raises:
            ResultsError: the run ended before its first checkpoint, or did not keep its best model.
        """
        if best:
            self.folder.check_model(self.folder.best.name)
            if not self.folder.best.exists():
                raise ResultsError(
                    f"{self.path} has no best model; run with results.keep_best=true and data.validation_fraction=0.1."
                )
        tensors = checkpoints.load_model(self.folder.best) if best else checkpoints.last_model(self.folder)
        model = Workload(self.config).make_model()
        model.load_state_dict(whole_state(model, tensors))
        return model.eval()

    def final(self, metric: str, *, last: int = 5) -> float | None:
        """Return the mean of a metric over the last rounds."""
        return results.final_value(self.rounds, metric, last=last)

    def frame(self, *, timings: bool = False) -> "pd.DataFrame":
        """Return the rounds as a DataFrame indexed by round. Clients and failures are counts, diverged values are NaN.

        Args:
            timings: also include the seconds of each round.

        Raises:
            ConfigError: pandas is not installed.
        """
        return to_frame(self.rounds, self.folder.timings() if timings else ())

    def _repr_html_(self) -> str:
        """Show the main metrics and the learning curve in a notebook."""
        from fedsign.report.page import render_card  # used by notebooks only; importing it would delay every run

        return render_card(self.folder)


def load_run(path: str | Path) -> Run:
    """Load a run from disk."""
    return Run(finding.open_run(Path(path)))


@memory_errors()
def run(
    experiment: ExperimentConfig | Mapping[str, Any] | None = None,
    *,
    resume: str | Path | None = None,
    callbacks: Iterable[Callback] = (),
) -> Run:
    """Run an experiment to its end and return it.

    Args:
        experiment: a configuration, or a dictionary of changes to the default one.
        resume: the folder of a run to resume. `experiment`, if given, may differ from that run's configuration only in
            rounds, callbacks, results, timeouts, server.min_replies, and settings that cannot change a result, such as
            engine.workers.
        callbacks: callbacks in addition to the configured ones.

    Raises:
        FedSignError: a subclass says what is wrong; see fedsign.errors.
    """
    if resume is None:
        workload, engine, watchers, findings = _prepare(Workload(config_of(experiment)))
        folder = _start(workload, findings)
        with folder.locked():
            _execute(workload, engine, folder, [*watchers, *callbacks])
    else:
        folder = finding.open_run(Path(resume))
        with folder.locked():
            _check_folder(folder)
            # under the lock, and before anything is read: the newest intact checkpoint decides where the run goes on
            checkpoints.set_damaged_aside(folder.checkpoints, partial(_check_states, folder))
            config = _resumed_config(folder, experiment)
            workload, engine, watchers, _ = _prepare(Workload(config))
            _warn_of_other_versions(folder)
            _check_data(folder, workload)
            check_split(folder, workload)
            # when every check has passed
            results.update_config(folder, config.to_toml(), config.changed())
            # after `_prepare`: a mistake in the new configuration must not cost records
            checkpoints.rewind(folder)
            _execute(workload, engine, folder, [*watchers, *callbacks])
    return Run(folder)


def check(experiment: ExperimentConfig, *, like: Workload | None = None) -> Workload:
    """Build every component of an experiment without running it.

    Args:
        experiment: its configuration.
        like: the result of an earlier check; its data and split are reused where they are the same.

    Raises:
        FedSignError: a component cannot be built, or the data cannot be split as configured.
    """
    workload = Workload(experiment)
    if like is not None:
        workload.take_data(like)
    _prepare(workload)
    _ = workload.partition  # splits the data, which is lazy
    return workload


def environment() -> Record:
    """Return package versions and the git state, to be recorded with a run."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "flwr", "numpy")}
    return {
        "fedsign": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **versions,
        "git": _git_state(Path.cwd()),
    }


def _execute(workload: Workload, engine: Engine, folder: RunFolder, callbacks: list[Callback]) -> None:
    def on_round(record: Record) -> None:
        for callback in callbacks:
            callback.on_round(record)

    config = workload.config
    path = config.get("client.path", "sequential")
    _log.debug("engine %s, device %s, clients trained by path %s", config.engine.name, workload.device, path)
    for callback in callbacks:
        callback.on_start(folder, workload.config, folder.rounds())
    try:
        engine.execute(workload, folder, on_round)
    # also Ctrl-C: the outcome says so, and trackers close their runs
    except BaseException as error:
        _conclude(folder, _failed(error), callbacks)
        raise
    # the extension point `outcome`: functions `(config, folder) -> Record`
    added = [add(workload.config, folder) for add in extensions("outcome")]
    _conclude(folder, {"status": "finished", **dict(ChainMap(*added))}, callbacks)


def _failed(error: BaseException) -> Record:
    error = shortage_of(error) or error
    if isinstance(error, FedSignError):
        return {"status": "failed", "error": str(error)}
    if isinstance(error, Exception):
        return {"status": "failed", "error": f"{type(error).__name__}: {error}"}
    return {"status": "unfinished", "error": str(error) or "stopped from outside"}


def _conclude(folder: RunFolder, outcome: Record, callbacks: list[Callback]) -> None:
    """Write the outcome and notify the callbacks; on a full disk, the run's own error is the one to raise."""
    # the outcome first: a callback that fails must not hide how the run ended
    for end in (folder.conclude, *(callback.on_end for callback in callbacks)):
        try:
            end(outcome)
        except FedSignError:
            if outcome["status"] == "finished":
                raise


def _prepare(workload: Workload) -> tuple[Workload, Engine, list[Callback], list[Record]]:
    """Build every component once, so that a configuration mistake leaves no empty run behind; with findings."""
    config = workload.config
    strategy = make_strategy(workload)
    spec = strategy.objective(1) if isinstance(strategy, Strategy) else ObjectiveSpec()
    with global_stream(config.seed, Purpose.TRAINING):  # for users' code that draws
        check_training(workload, spec, strategy)
        findings = rehearse(workload)
        workload = decided(workload, spec)
    engine: Engine = config.engine.build()
    engine.check(workload)
    watchers = [plugins.build("callback", name, {}) for name in config.callbacks]
    return workload, engine, watchers, findings


def _start(workload: Workload, findings: list[Record]) -> RunFolder:
    """Create the run's folder, once the data are checked."""
    config = workload.config
    findings = [*workload.check_data(), *findings]
    folder = results.create(
        Path(config.results.root),
        partition=partition_record(workload),
        experiment=config.run_name,
        seed=config.seed,
        config_toml=config.to_toml(),
        changed=config.changed(),
        environment=environment(),
        data=workload.data_digest,
    )
    for record in findings:
        _log.warning("%s; %s.", record["message"], record["remedy"])
        folder.append("findings.jsonl", record)
    return folder


def partition_record(workload: Workload) -> Record:
    """Return the contents of partition.json; log how the data were read, warn of notes and of moved samples."""
    for sentence in workload.dataset.read_as:
        _log.info("%s", sentence)
    for note in workload.data_warnings:
        _log.warning("%s", note)
    return split_facts(workload)


def split_facts(workload: Workload) -> Record:
    """Return the samples per class of each client, and how many were moved to reach the minimum per client.

    For a large lazy population, only `counted_clients` are counted.
    """
    config = workload.config
    class_names = list(workload.dataset.target.class_names)
    if not len(workload.dataset.train):  # the data stay with the clients
        num_clients = config.partition.num_clients
        return {"class_names": class_names, "counts": [], "counts_are_private": True, "num_clients": num_clients}
    split = workload.split
    facts: Record = {
        "class_names": class_names,
        "counts": workload.label_counts(),
        "split": split.digest(),
        "num_moved": split.num_moved,
        "moved_label_distance": split.moved_label_distance,
    }
    if split.is_shared:
        facts["samples_are_shared"] = True
    if sentences := [*workload.dataset.read_as, *workload.dataset.notes]:
        facts["data_notes"] = sentences
    counted, num_clients = counted_clients(split.indices), len(split.indices)
    if len(counted) < num_clients:
        facts |= {"num_clients": num_clients, "counted_clients": list(counted)}
    return facts


def check_split(folder: RunFolder, workload: Workload) -> None:
    """Raise ConfigError if a run that is resumed would be split otherwise; not where clients hold data of their own."""
    if workload.client_data is None:
        check_same_split(folder, workload.config, split_facts(workload))


def config_of(experiment: ExperimentConfig | Mapping[str, Any] | None) -> ExperimentConfig:
    """Convert the `experiment` argument of `run` and `compare` to a configuration.

    Raises:
        ConfigError: it has the wrong type, or is not a valid experiment.
    """
    if isinstance(experiment, ExperimentConfig):
        return experiment
    _check_tree(experiment)
    return configs.from_dict(experiment or {})


def _check_tree(experiment: object) -> None:
    if experiment is not None and not isinstance(experiment, Mapping):
        raise ConfigError(
            f"the experiment {experiment!r} was given, but expected a configuration or a dictionary of changes, "
            'such as {"rounds": 60}; fedsign.config.load(Path("experiment.toml")) reads a file.'
        )


def _resumed_config(folder: RunFolder, experiment: ExperimentConfig | Mapping[str, Any] | None) -> ExperimentConfig:
    """Return the run's configuration with the changes that `experiment` may make on resume."""
    before = _with_path(configs.from_toml(folder.config_toml), {"path": "sequential"})
    if experiment is None:
        return before
    if isinstance(experiment, ExperimentConfig):
        after = experiment
    else:
        _check_tree(experiment)
        after = configs.from_dict(configs.merged(before.model_dump(mode="json"), current_tree(experiment)))
    if not after.name:  # a run of an earlier version has a name in its configuration
        after = after.model_copy(update={"name": before.name})
    # the decision of the first start: another path sums in another order, and changes the bits
    after = _with_path(after, {key: value for key, value in before.client if key in ("path", "chunk")})
    before, after = with_named_cut(before, after)
    counted, wanted = before.result_settings(), after.result_settings()
    for tree, path in product((counted, wanted), _WAITING_KEYS):
        section, _, key = path.partition(".")
        tree[section].pop(key, None)
    for section, value in counted.items():
        if section not in _CHANGEABLE_ON_RESUME and value != wanted[section]:
            changeable = [
                f"{path}.{key}" for path, table in tables(ExperimentConfig) for key in sorted(table.no_result)
            ]
            raise ConfigError(
                f"the run in {folder.path} was started with another '{section}'; on resume only "
                f"{', '.join([*sorted(_CHANGEABLE_ON_RESUME), *_WAITING_KEYS, *changeable])} may change. Start "
                "a new run instead."
            )
    stored = checkpoints.rounds_on_disk(folder.checkpoints)
    if stored and after.rounds < stored[-1]:
        raise ConfigError(
            f"rounds={after.rounds} was given, but the run in {folder.path} has completed {stored[-1]}; give "
            f"{stored[-1]} or more."
        )
    return after


def _with_path(config: ExperimentConfig, decided: Mapping[str, Any]) -> ExperimentConfig:
    """Replace `client.path=auto` by the recorded decision.

    Runs older than this setting have no record; they used the sequential path.
    """
    if config.get("client.path", "") != "auto":
        return config
    return config.model_copy(update={"client": config.client.model_copy(update=decided)})


def _check_folder(folder: RunFolder) -> None:
    """Check that a run's configuration is its own, before a checkpoint is taken for another run's."""
    _ = folder.config_toml
    if not folder.id:
        _log.warning("the run in %s has no manifest: that its files belong together is not checked", folder.path)


def _check_states(folder: RunFolder, checkpoint: Checkpoint) -> None:
    """Read the client states that a checkpoint refers to, if they are on this machine."""
    if folder.clients.is_dir() and checkpoint.client_versions:
        with closing(StateCache(folder.clients, run=folder.id)) as states:
            states.check(checkpoint.client_versions, checkpoint.states)


def _check_data(folder: RunFolder, workload: Workload) -> None:
    """Raise DataError if a run was started with other data."""
    started_with = folder.manifest.get("data")
    if started_with and started_with != workload.data_digest:
        raise DataError(
            f"the data of data.name={workload.config.data.name} are not those that the run in {folder.path} was "
            "started with: values, labels, or their order have changed. Put the former data back, or start a new run."
        )


def _warn_of_other_versions(folder: RunFolder) -> None:
    """Warn if versions changed: results are bit-identical only with the same versions."""
    now = environment()
    for name, before in folder.environment.items():
        if name not in ("git", "platform") and now.get(name) != before:
            _log.warning(
                "the run was started with %s %s and goes on with %s: bits may differ", name, before, now.get(name)
            )


def _git_state(folder: Path) -> str:
    """Return the commit of the folder's repository, with `+` for uncommitted changes; empty outside a repository."""
    # --exclude=*: the commit itself, never a tag
    command = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
