"""The cells of a sweep on disk, trained in parallel, each only once.

FOLDER/cells/<hash>.json    a finished cell and its loss. The hash covers everything that the loss depends on, so an
                            interrupted sweep continues, and a larger one reuses the cells it shares.
FOLDER/logs/                output of the worker processes
FOLDER/lock                 held by the process that trains
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsign.config import ExperimentConfig
from fedsign.errors import ConfigError, EngineError
from fedsign.storage.digests import read_json, sealed_json
from fedsign.storage.disk import disk_errors, exclusive, remove_partials, write_text
from fedsign.storage.owned import check_writable
from simulations.jobs import Job, Team, Watcher, digest_of
from simulations.progress import display


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One training. `words` tell it from the sweep's other cells, for readers of its file.

    `steps`: of centralized training; 0 runs the experiment's own rounds. `samples`: held-out samples; 0 for all.
    """

    config: ExperimentConfig
    steps: int
    samples: int
    words: Mapping[str, Any]

    @property
    def id(self) -> str:
        """The hash."""
        # without `words`: sweeps that call a training by other names share it
        return digest_of(self.config, steps=self.steps, samples=self.samples)


def loss_in(path: Path) -> float | None:
    """Read the loss of a cell's file: NaN if it diverged; None if there is no file, or a damaged one."""
    try:
        loss = read_json(path.read_text(encoding="utf-8"))[0]["loss"]
        return math.nan if loss is None else float(loss)
    # a damaged file is like none: the cell is run again
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_loss(path: Path, loss: float, words: Mapping[str, Any]) -> None:
    """Write a loss; null if it is not finite."""
    content = {**words, "loss": loss if math.isfinite(loss) else None}
    write_text(path, sealed_json(content))


def losses_of(cells: Sequence[Cell], folder: Path, *, workers: int | None = None) -> list[float]:
    """Return the loss of each cell; train those that the folder lacks, one per core at a time.

    Raises:
        ConfigError: `workers` is invalid.
        ResultsError: the folder cannot be written, or is in use by another process.
        EngineError: a cell could not be trained.
    """
    if workers is not None and workers < 1:
        raise ConfigError(f"--workers={workers} was given, but expected 1 or more.")
    check_writable(folder)
    paths = [folder / "cells" / f"{cell.id}.json" for cell in cells]
    with disk_errors(folder):
        (folder / "cells").mkdir(parents=True, exist_ok=True)
    with exclusive(folder / "lock", name=f"the sweep in {folder}"):
        # under the lock: partial files of a living sweep must stay
        remove_partials(folder / "cells")
        pending = {path: cell for path, cell in zip(paths, cells, strict=True) if loss_in(path) is None}
        if pending:
            # workers share the cores, whichever cell they run
            threads = max(cell.config.engine.threads for cell in cells)
            _run(pending, folder, workers or max(1, len(os.sched_getaffinity(0)) // threads))
    return [loss for loss in map(loss_in, paths) if loss is not None]


def _run(pending: Mapping[Path, Cell], folder: Path, workers: int) -> None:
    jobs = []
    for path, cell in pending.items():
        fields = {"steps": cell.steps, "samples": cell.samples, "words": dict(cell.words)}
        jobs.append(Job(id=cell.id, message={"config": cell.config.to_toml(), "path": str(path.absolute()), **fields}))
    failures = list[str]()
    with display(len(jobs), unit="cell", first=f"{len(jobs)} cells to train in {folder}") as shown:

        class Ended(Watcher):
            """Shows the number of finished cells, and collects the errors of failed ones."""

            num = 0

            def on_end(self, worker: int, job: Job, error: str | None) -> None:
                self.num += 1
                failures.extend([] if error is None else [error])
                shown.show(self.num, {"failed": len(failures)} if failures else None)

        with Team("simulations.sparsity.training", workers=workers, logs=folder / "logs") as team:
            team.run(jobs, (Ended(),))
    if failures:
        raise EngineError(
            f"{len(failures)} of {len(jobs)} cells could not be trained; the same command tries them again. The "
            f"first: {failures[0]}"
        )
