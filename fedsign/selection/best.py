"""The best model by validation, and early stopping.

[Note: best on disk] The best model so far stays in memory, and replaces best.safetensors only at a checkpoint, before
it.  A run that is resumed from an earlier checkpoint than the file repeats the rounds in between, and their best model
with them; the file's own round tells.  What the best round is follows from the records alone.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isfinite, nan

from torch import Tensor

from fedsign.config import ExperimentConfig
from fedsign.federation.exchange import RoundHook
from fedsign.metrics import is_higher_better
from fedsign.records import Tensors
from fedsign.report.wording import plural
from fedsign.storage.checkpoints import save_model
from fedsign.storage.results import Record, RunFolder, read_metadata
from fedsign.workload import Workload

_log = logging.getLogger("fedsign")


def metric_of(config: ExperimentConfig) -> str:
    """The metric that judges models, such as `validation_accuracy`: that of results.keep_best, or the first."""
    first: bool | str = True
    chosen = config.get("results.keep_best", first)
    names = [name.rpartition(":")[2] for name in config.metrics]
    return f"validation_{chosen if isinstance(chosen, str) else [*names, 'loss'][0]}"


@dataclass(slots=True)
class Best:
    """The best round so far; of equal ones the first. `round` is 0 before there is one."""

    metric: str
    round: int = 0
    value: float = nan

    def update(self, record: Record) -> bool:
        """Whether a round is the best so far. A value that is not finite never is."""
        value = record.get(self.metric)
        if value is None or not isfinite(value):
            return False
        is_better = value > self.value if is_higher_better(self.metric) else value < self.value
        if self.round and not is_better:
            return False
        self.round, self.value = record["round"], value
        return True

    def stop_reason(self, round: int, patience: int) -> str:
        """Why a run ends with this round; empty if it goes on."""
        if not patience or round - self.round < patience:
            return ""
        waited = f"no better {self.metric.replace('_', ' ')} for {plural(round - self.round, 'round')}"
        return f"{waited}, best in round {self.round}" if self.round else waited


def best_of(metric: str, records: Iterable[Record]) -> Best:
    """The best of some rounds."""
    best = Best(metric)
    for record in records:
        best.update(record)
    return best


class Selection(RoundHook):
    """Keeps the best model of a run, and ends the run when no better one has come for `patience` rounds."""

    def __init__(self, metric: str, folder: RunFolder, *, keep_best: bool, patience: int, round: int) -> None:
        """`round`: the last completed round."""
        self._folder, self._path, self._patience, self._keep_best = folder, folder.best, patience, keep_best
        self._best = best_of(metric, folder.rounds() if round else ())
        self._kept = self._on_disk(round) if keep_best else Best(metric)
        self._model: Tensors | None = None  # a best model that is not on disk yet
        self.stop = self._best.stop_reason(round, patience)

    def evaluated(self, record: Record, model: Callable[[], Mapping[str, Tensor]]) -> None:
        """Compare a round with the best one."""
        self._best.update(record)
        self.stop = self._best.stop_reason(record["round"], self._patience)
        if self._keep_best and self._kept.update(record):
            # copies: a strategy may change its tensors
            self._model = {name: tensor.detach().clone() for name, tensor in model().items()}

    def write(self, record: Record, *, durable: bool) -> Record:
        """Write the best model at a checkpoint."""
        if durable and self._model is not None:
            facts = {"round": str(self._kept.round), "metric": self._kept.metric, "value": repr(self._kept.value)}
            save_model(self._path, self._model, facts)
            self._model = None
        return record

    def _on_disk(self, round: int) -> Best:
        """The best model of the rounds so far if the file holds it, else none."""
        self._folder.check_model(self._path.name)
        best, held = self._best, read_metadata(self._path) if self._path.exists() else {}
        if (held.get("round"), held.get("metric")) == (str(best.round), best.metric):
            return Best(best.metric, best.round, best.value)
        # a file of a later round: these rounds are repeated
        if best.round and int(held.get("round", 0)) <= round:
            _log.warning(
                "the model of round %d, the best so far, was not kept: %s will hold the best of the rounds from %d on",
                best.round,
                self._path.name,
                round + 1,
            )
        return Best(best.metric)


def round_hook(workload: Workload, strategy: object, folder: RunFolder, *, round: int) -> Selection | None:
    """The extension point `round_hook`; active with `results.keep_best` or `results.patience`."""
    config = workload.config
    keep_best, patience = config.get("results.keep_best", False) is not False, config.get("results.patience", 0)
    if not keep_best and not patience:
        return None
    return Selection(metric_of(config), folder, keep_best=keep_best, patience=patience, round=round)


def outcome(config: ExperimentConfig, folder: RunFolder) -> Record:
    """The extension point `outcome`: why the run stopped early, if it did."""
    patience = config.get("results.patience", 0)
    records = folder.rounds() if patience else []
    if not records or len(records) >= config.rounds:
        return {}
    reason = best_of(metric_of(config), records).stop_reason(len(records), patience)
    return {"stopped": f"round {len(records)}: {reason}"} if reason else {}
