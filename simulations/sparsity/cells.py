"""The cells of a sweep on disk, and how they are played: several at a time, and none twice.

FOLDER/cells/<hash>.json    what a cell was, and its loss; there once the cell was played to its end, found by the hash of all that its
                            loss depends on.  A sweep that was stopped goes on where it was, a larger one takes what it shares.
FOLDER/logs/                what the worker processes had to say
FOLDER/lock                 held by the process that plays
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedsign.config import ExperimentConfig
from fedsign.errors import ConfigError, EngineError, ResultsError
from fedsign.storage.digests import read_json, sealed_json
from fedsign.storage.disk import disk_errors, exclusive, remove_partials, write_text
from simulations.jobs import Job, Team, Watcher, digest_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One training; `words` are what tells it from the others of its sweep, for who reads its file.

    `steps` of training on all clients' samples, or, with 0, the experiment's own rounds; `samples` of the held-out ones, 0 for all.
    """

    config: ExperimentConfig
    steps: int
    samples: int
    words: Mapping[str, Any]

    @property
    def id(self) -> str:
        """The hash."""
        return digest_of(self.config, steps=self.steps, samples=self.samples)


def loss_in(path: Path) -> float | None:
    """What a cell's file says: NaN if it diverged; None if it was not played, or its file was damaged."""
    try:
        found = read_json(path.read_text(encoding="utf-8"))[0]["loss"]
        return math.nan if found is None else float(found)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_loss(path: Path, loss: float, words: Mapping[str, Any]) -> None:
    """A loss that is no finite number is written as null."""
    content = {**words, "loss": loss if math.isfinite(loss) else None}
    write_text(path, sealed_json(content))


def losses_of(cells: Sequence[Cell], folder: Path, *, workers: int | None = None) -> list[float]:
    """The loss of each cell; those that are not in the folder yet are played, as many at a time as there are cores.

    Raises:
        ConfigError: `workers` cannot be.
        ResultsError: the folder cannot be written, or another process plays there.
        EngineError: a cell could not be played.
    """
    if workers is not None and workers < 1:
        raise ConfigError(f"--workers={workers} was given, but expected is 1 or more.")
    if folder.exists() and not folder.is_dir():
        raise ResultsError(f"{folder} is a file; give a folder, or the name of one to be made, with --out.")
    paths = [folder / "cells" / f"{cell.id}.json" for cell in cells]
    with disk_errors(folder):
        (folder / "cells").mkdir(parents=True, exist_ok=True)
    with exclusive(folder / "lock", what=f"the sweep in {folder}"):
        remove_partials(folder / "cells")
        pending = {path: cell for path, cell in zip(paths, cells, strict=True) if loss_in(path) is None}
        if pending:
            threads = max(cell.config.engine.threads for cell in cells)
            _play(pending, folder, workers or max(1, len(os.sched_getaffinity(0)) // threads))
    return [loss for loss in map(loss_in, paths) if loss is not None]


def _play(pending: Mapping[Path, Cell], folder: Path, workers: int) -> None:
    jobs = []
    for path, cell in pending.items():
        told = {"steps": cell.steps, "samples": cell.samples, "words": dict(cell.words)}
        jobs.append(Job(id=cell.id, asked={"config": cell.config.to_toml(), "path": str(path.absolute()), **told}))
    console = Console(stderr=True)
    columns = (TextColumn("cells"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"))
    # in a notebook Rich would ask for ipywidgets
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=console.is_jupyter) as bar:
        task, failures = bar.add_task("", total=len(jobs)), list[str]()

        class Ended(Watcher):
            """Shows how many cells have ended, on standard error, and keeps the sentences of those that failed."""

            def on_end(self, worker: int, job: Job, error: str | None) -> None:
                bar.advance(task)
                failures.extend([] if error is None else [error])

        with Team("simulations.sparsity.training", workers=workers, logs=folder / "logs") as team:
            team.play(jobs, (Ended(),))
    if failures:
        raise EngineError(
            f"{len(failures)} of {len(jobs)} cells could not be played; the same command plays them once more. The "
            f"first: {failures[0]}"
        )
