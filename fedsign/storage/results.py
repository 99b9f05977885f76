"""A run on disk, and how to read it without torch or Flower.

runs/<experiment>/<id>/
    config.toml        the complete configuration, with versions and git state in its header
    environment.json   the same facts for programs
    partition.json     samples of each class at each client
    rounds.jsonl       one line a round, with a digest of it and of those before: the same bits whenever the run is repeated or resumed
    timings.jsonl      seconds per round (kept apart, since they never repeat)
    failures.jsonl     what failed clients reported, in full
    privacy.jsonl      what was released in each round and what of the budget is spent, with [privacy]
    privacy.key        the secret that noise comes from, for the server alone
    signs.jsonl        how far the clients' signs agree, per round and layer, if `results.signs` is set
    sites.jsonl        what each site said of the model, per round, where sites evaluate
    members.jsonl      which sites of a federation came, went and were refused, with the round
    checkpoints/       see fedsign.storage.checkpoints
    clients/           what clients keep between rounds
    lock               held by the process that plays the run
    outcome.json       how the run ended; missing while it runs and after a kill
    report.html
"""

import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fedsign.errors import ResultsError, ResumeError
from fedsign.storage import digests
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
        path = self.path / "config.toml"
        try:
            text = path.read_text(encoding="utf-8")
            digests.check_seal(text)
            if not any(line and not line.startswith("#") for line in text.splitlines()):
                raise ValueError("it holds no settings")
        except (OSError, ValueError) as error:
            raise damaged(path, error) from error
        return text

    @property
    def environment(self) -> Line:
        """Versions and git state of the program that wrote the run."""
        return read_json(self.path / "environment.json")

    @property
    def partition(self) -> Line:
        """`{"class_names": [...], "counts": [clients][classes]}`."""
        return read_json(self.path / "partition.json")

    @property
    def outcome(self) -> Line:
        """`{"status": "finished" | "failed" | "unfinished", ...}`."""
        path = self.path / "outcome.json"
        return read_json(path) if path.exists() else {"status": "unfinished"}

    def locked(self) -> AbstractContextManager[None]:
        """Hold the run for this process: two processes that play one run would spoil it.

        The system gives the lock back when a process dies, however it dies.

        Raises:
            ResultsError: another process holds it.
        """
        return exclusive(self.path / "lock", what=f"the run in {self.path}")

    def rounds(self) -> list[Line]:
        """The lines of all complete rounds."""
        return self.records("rounds.jsonl")

    def timings(self) -> list[Line]:
        """Seconds per round: `{"round", "train_s", "aggregate_s", "evaluate_s"}`."""
        return self.records("timings.jsonl")

    def records(self, name: str) -> list[Line]:
        """The complete lines of a .jsonl file.

        Raises:
            ResumeError: they are damaged, or fewer than the newest checkpoint counts on.
        """
        states = sorted(self.checkpoints.glob("round-??????/state.json"))
        chains = read_json(states[-1]).get("records", {}) if states else {}
        return read_lines(self.path / name, until=chains.get(name, ""))

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a small JSON file in one step."""
        write_text(self.path / name, digests.sealed_json(value))

    def append(self, name: str, line: Mapping[str, Any], *, durable: bool = False) -> None:
        """Add one line to a .jsonl file, chained to those before, and flush it; `durable` forces it to the disk."""
        path = self.path / name
        text = json.dumps({key: _finite(value) for key, value in line.items()})
        with disk_errors(path):
            append_bytes(path, (digests.chained(text, _last_chain(path)) + "\n").encode(), durable=durable)

    def chains(self) -> dict[str, str]:
        """Of each .jsonl file the chain of its last line, for the checkpoint that counts on those before it."""
        return {path.name: _last_chain(path) for path in sorted(self.path.glob("*.jsonl"))}

    def check_records(self, chains: Mapping[str, str]) -> None:
        """Read all records, and what else is known of the run but how it ended.

        Raises:
            ResumeError: one is damaged, or lacks lines that `chains`, those of a checkpoint, count on.
        """
        for path in self.path.glob("*.json"):
            if path.name != "outcome.json":
                read_json(path)
        for name in {*chains, *(path.name for path in self.path.glob("*.jsonl"))}:
            read_lines(self.path / name, until=chains.get(name, ""))

    def rewind(self, round: int, chains: Mapping[str, str] | None = None) -> None:
        """Drop what was written after a round, and the half line that a kill may have left.

        Raises:
            ResumeError: a record is damaged, lacks lines that a checkpoint counts on (`chains`), or rounds.jsonl is not
                complete up to that round; nothing has been changed.
        """
        self.check_records(chains or {})
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
        keep_lines(self.path / "members.jsonl")  # what has happened to sites is not played again

    def drop_after(self, round: int, *names: str) -> None:
        """Drop the lines of .jsonl files that were written after a round."""
        for path in map(self.path.joinpath, names):
            keep_lines(path, lambda line: bool(line["round"] <= round))


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
    """Write the configuration, sealed, with the environment as its header."""
    header = "".join(f"# {key}: {value}\n" for key, value in {"digest": digests.BLANK, **folder.environment}.items())
    write_text(folder.path / "config.toml", digests.sealed(header + "\n" + config_toml))


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


def read_lines(path: Path, *, until: str = "") -> list[Line]:
    """The complete lines of a .jsonl file; a last line without its end was cut off by a kill.

    Raises:
        ResumeError: a line is damaged or missing, or the one with the chain `until` is not here.
    """
    try:
        texts = _texts(path)
        lines = [json.loads(line) for line in digests.unchained(texts)]
        if until and until not in map(digests.chain_of, texts):
            raise ValueError(f"{len(lines)} lines are left; a checkpoint counts on more")
    except (OSError, ValueError) as error:
        raise damaged(path, error) from error
    return lines


def keep_lines(path: Path, wanted: Callable[[Line], bool] = lambda line: True) -> None:
    """Drop the other lines of a .jsonl file, all of them at its end, and the half line that a kill may have left."""
    if path.exists():
        kept = zip(_texts(path), read_lines(path), strict=True)
        write_text(path, "".join(f"{text}\n" for text, line in kept if wanted(line)))


def read_json(path: Path) -> Line:
    """A JSON file that `RunFolder.write_json` wrote.

    Raises:
        ResumeError: it is missing or damaged.
    """
    try:
        return digests.read_json(path.read_text(encoding="utf-8"))[0]
    except (OSError, ValueError) as error:
        raise damaged(path, error) from error


def damaged(path: Path, error: Exception) -> ResumeError:
    """The error for a file that is not as it was written."""
    return ResumeError(f"{path} is missing or damaged ({error}); restore it from a copy, or start a new run.")


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


def _texts(path: Path) -> list[str]:
    """The complete lines of a file, as they are written."""
    return [line for line in path.read_text(encoding="utf-8").split("\n")[:-1] if line] if path.exists() else []


def _last_chain(path: Path) -> str:
    """The chain of a file's last line."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 64))
            return digests.chain_of(file.read().decode("utf-8", errors="replace").removesuffix("\n"))
    except FileNotFoundError:
        return ""
