"""A run on disk, and how to read it without torch or Flower.

runs/<experiment>/<id>/
    config.toml        the complete configuration, with versions and git state in its header
    environment.json   the same facts for programs
    partition.json     samples of each class at each client
    rounds.jsonl       one line a round: the same bits whenever the run is repeated or resumed
    timings.jsonl      seconds per round (kept apart, since they never repeat)
    failures.jsonl     what failed clients reported, in full
    privacy.jsonl      what was released in each round and what of the budget is spent, with [privacy]
    privacy.key        the secret that noise comes from, for the server alone
    signs.jsonl        how far the clients' signs agree, per round and layer, if `results.signs` is set
    sites.jsonl        what each site said of the model, per round, where sites evaluate
    checkpoints/       see fedsign.storage.checkpoints
    clients/           what clients keep between rounds
    lock               held by the process that plays the run
    outcome.json       how the run ended; missing while it runs and after a kill
    report.html
"""

import json
import math
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fedsign.errors import ResultsError, ResumeError
from fedsign.storage.disk import DISK_FULL, append_bytes, disk_errors, exclusive, remove_partials, write_text

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RunFolder:
    """One run's folder."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def clients(self) -> Path:
        """Folder of the clients' states, for engines on this machine."""
        return self.path / "clients"

    @property
    def config_toml(self) -> str:
        """The configuration as text."""
        return (self.path / "config.toml").read_text(encoding="utf-8")

    @property
    def environment(self) -> Line:
        """Versions and git state of the program that wrote the run."""
        return _read_json(self.path / "environment.json")

    @property
    def partition(self) -> Line:
        """`{"class_names": [...], "counts": [clients][classes]}`."""
        return _read_json(self.path / "partition.json")

    @property
    def outcome(self) -> Line:
        """`{"status": "finished" | "failed" | "unfinished", ...}`."""
        path = self.path / "outcome.json"
        return _read_json(path) if path.exists() else {"status": "unfinished"}

    def locked(self) -> AbstractContextManager[None]:
        """Hold the run for this process: two processes that play one run would spoil it.

        The system gives the lock back when a process dies, however it dies.

        Raises:
            ResultsError: another process holds it.
        """
        return exclusive(self.path / "lock", what=f"the run in {self.path}")

    def rounds(self) -> list[Line]:
        """The lines of all complete rounds."""
        return read_lines(self.path / "rounds.jsonl")

    def timings(self) -> list[Line]:
        """Seconds per round: `{"round", "train_s", "aggregate_s", "evaluate_s"}`."""
        return read_lines(self.path / "timings.jsonl")

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a small JSON file in one step."""
        write_text(self.path / name, json.dumps(value, indent=1) + "\n")

    def append(self, name: str, line: Mapping[str, Any], *, durable: bool = False) -> None:
        """Add one line to a .jsonl file and flush it; `durable` forces it to the disk."""
        path = self.path / name
        text = json.dumps({key: _finite(value) for key, value in line.items()}) + "\n"
        with disk_errors(path):
            append_bytes(path, text.encode(), durable=durable)

    def rewind(self, round: int) -> None:
        """Drop what was written after a round, and the half line that a kill may have left.

        Raises:
            ResumeError: rounds.jsonl is not complete up to that round; nothing has been changed.
        """
        found = [line["round"] for line in self.rounds() if line["round"] <= round]
        if found != list(range(1, round + 1)):
            raise ResumeError(
                f"{self.path / 'rounds.jsonl'} does not hold one record for each of the rounds 1 to {round} that the newest "
                f"checkpoint has behind it (found: {len(found)}); restore the file from a copy, or start a new run."
            )
        remove_partials(self.path)
        remove_partials(self.checkpoints)
        (self.path / "outcome.json").unlink(missing_ok=True)
        self.drop_after(round, "rounds.jsonl", "timings.jsonl", "failures.jsonl", "sites.jsonl")

    def drop_after(self, round: int, *names: str) -> None:
        """Drop the lines of .jsonl files that were written after a round."""
        for path in map(self.path.joinpath, names):
            if path.exists():
                kept = [line for line in read_lines(path) if line["round"] <= round]
                write_text(path, "".join(json.dumps(line) + "\n" for line in kept))


def create(
    root: Path, *, experiment: str, seed: int, config_toml: str, environment: Line, partition: Line
) -> RunFolder:
    """Make a new run's folder `root`/experiment/<time>-seed<seed>; the configuration, written last, makes it a run."""
    parent = root / experiment
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    with disk_errors(parent):
        try:
            parent.mkdir(parents=True, exist_ok=True)
            folder = RunFolder(_fresh(parent, f"{stamp}-seed{seed}"))
        except OSError as error:
            if error.errno in DISK_FULL:
                raise
            raise ResultsError(
                f"results.root={root} cannot hold runs ({error.strerror}: {error.filename}); name a folder that can be "
                "written with --set results.root=PATH."
            ) from error
    folder.write_json("environment.json", environment)
    folder.write_json("partition.json", partition)
    update_config(folder, config_toml)
    return folder


def update_config(folder: RunFolder, config_toml: str) -> None:
    """Write the configuration, with the environment as its header."""
    header = "".join(f"# {key}: {value}\n" for key, value in folder.environment.items())
    write_text(folder.path / "config.toml", header + "\n" + config_toml)


def open_run(path: Path) -> RunFolder:
    """An existing run, by its folder or a file in it.

    Raises:
        ResultsError: there is no run.
    """
    folder = path if path.is_dir() else path.parent
    if not (folder / "config.toml").is_file():
        raise ResultsError(
            f"{path} is not a run: there is no config.toml in it. 'fedsign runs' lists the runs under ./runs; "
            "give the folder of one."
        )
    return RunFolder(folder)


def find_runs(root: Path) -> list[RunFolder]:
    """All runs under a folder, oldest first."""
    return [RunFolder(config.parent) for config in sorted(root.glob("*/*/config.toml"))]


def read_lines(path: Path) -> list[Line]:
    """The complete lines of a .jsonl file; a last line without its end was cut off by a kill."""
    if not path.exists():
        return []
    *complete, _cut_off = path.read_text(encoding="utf-8").split("\n")
    try:
        return [json.loads(line) for line in complete if line]
    except json.JSONDecodeError as error:
        raise ResumeError(f"{path} is damaged ({error}); the run cannot be read.") from error


def final_value(lines: list[Line], key: str, *, last: int = 5) -> float | None:
    """Mean of a figure over the last rounds, or None where it is missing.

    >>> final_value([{"accuracy": 0.5}, {"accuracy": 1.0}], "accuracy")
    0.75
    """
    values = [line.get(key) for line in lines[-last:]]
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers and len(numbers) == len(values) else None


def _fresh(parent: Path, name: str) -> Path:
    """Make a folder that was not there, counting up when it was."""
    attempt = 1
    while True:
        path = parent / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            os.mkdir(path)  # noqa: PTH102 - the one call that tells "made" from "was there"
        except FileExistsError:
            attempt += 1
        else:
            return path


def _finite(value: Any) -> Any:
    """JSON knows no NaN and no infinity: a diverged loss is written as null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _read_json(path: Path) -> Line:
    try:
        content: Line = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ResumeError(f"{path} is missing or damaged ({error}); the run cannot be read.") from error
    return content
