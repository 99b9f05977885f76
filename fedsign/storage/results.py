"""The layout of a run on disk, and how to read it without torch or Flower.

runs/<experiment>/<id>/
    config.toml        the complete configuration, with versions and git state in its header
    environment.json   the same facts for programs
    partition.json     number of samples per client and class
    rounds.jsonl       one chained record per round; bitwise equal whenever the run is repeated or resumed
    timings.jsonl      seconds per round, kept apart because they never repeat
    failures.jsonl     full reports of failed clients
    clients.jsonl      metrics per round and client, unless [privacy] protects them
    findings.jsonl     likely mistakes in the data and in the course of the run
    privacy.jsonl      releases per round and the budget spent, with [privacy]
    privacy.key        the secret behind the noise, for the server alone
    signs.jsonl        sign agreement per round and layer, if `results.signs` is set
    sites.jsonl        metrics per round and site, if sites evaluate
    members.jsonl      sites that joined, left, or were refused, with the round
    checkpoints/       see fedsign.storage.checkpoints
    clients/           client states
    model.safetensors  the evaluated model after the last round
    best.safetensors   the evaluated model of the best round by validation, with `results.keep_best`
    lock               held by the process that executes the run
    outcome.json       how the run ended; missing while it runs and after a kill
    tags.json          tags and a note of the user's, if there are any
    report.html
"""

import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fedsign.errors import ResultsError, ResumeError, nearest
from fedsign.storage import digests
from fedsign.storage.disk import DISK_FULL, append_bytes, disk_errors, exclusive, remove_partials, write_text

Record = dict[str, Any]

RUNS = Path("runs")  # where runs are, unless `results.root` says otherwise
SET_ASIDE = "set-aside"  # in a comparison's cell, one level below its run: runs that could not be resumed
_DEEPEST = 5  # ./comparisons/NAME/cells/CELL/RUN


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of a run."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def clients(self) -> Path:
        """The folder of client states, for engines on this machine."""
        return self.path / "clients"

    @property
    def best(self) -> Path:
        """The file of the best model by validation; only with `results.keep_best`."""
        return self.path / "best.safetensors"

    @property
    def config_toml(self) -> str:
        """The configuration as TOML."""
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
    def environment(self) -> Record:
        """Versions and git state under which the run was written."""
        return read_json(self.path / "environment.json")

    @property
    def partition(self) -> Record:
        """`{"class_names": [...], "counts": [clients][classes]}`."""
        return read_json(self.path / "partition.json")

    @property
    def outcome(self) -> Record:
        """`{"status": "finished" | "failed" | "unfinished", ...}`."""
        path = self.path / "outcome.json"
        return read_json(path) if path.exists() else {"status": "unfinished"}

    def locked(self) -> AbstractContextManager[None]:
        """Lock the run for this process; the system releases the lock when the process dies.

        Raises:
            ResultsError: another process holds the lock.
        """
        return exclusive(self.path / "lock", name=f"the run in {self.path}")

    def rounds(self) -> list[Record]:
        """The records of all complete rounds."""
        return self.records("rounds.jsonl")

    def timings(self) -> list[Record]:
        """Seconds per round: `{"round", "train_s", "evaluate_s"}`."""
        return self.records("timings.jsonl")

    def findings(self) -> list[Record]:
        """Likely mistakes in the data (round 0) and in the course of the run."""
        return self.records("findings.jsonl")

    def records(self, name: str) -> list[Record]:
        """The complete records of a .jsonl file.

        Raises:
            ResumeError: they are damaged, or fewer than the newest checkpoint requires.
        """
        states = sorted(self.checkpoints.glob("round-??????/state.json"))
        chains = read_json(states[-1]).get("records", {}) if states else {}
        return read_records(self.path / name, until=chains.get(name, ""))

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a small JSON file atomically."""
        write_text(self.path / name, digests.sealed_json(value))

    def append(self, name: str, record: Mapping[str, Any], *, durable: bool = False) -> None:
        """Append a chained record to a .jsonl file; `durable` syncs it to disk."""
        path = self.path / name
        text = json.dumps({key: _finite(value) for key, value in record.items()})
        with disk_errors(path):
            append_bytes(path, (digests.chained(text, _last_chain(path)) + "\n").encode(), durable=durable)

    def chains(self) -> dict[str, str]:
        """The chain of the last line of each .jsonl file, for a checkpoint that requires the records so far."""
        return {path.name: _last_chain(path) for path in sorted(self.path.glob("*.jsonl"))}

    def check_records(self, chains: Mapping[str, str]) -> None:
        """Verify all records and JSON files of the run, except its outcome and its tags, which it does not read.

        Raises:
            ResumeError: a file is damaged, or lacks records that a checkpoint requires (`chains`).
        """
        for path in self.path.glob("*.json"):
            if path.name not in ("outcome.json", "tags.json"):
                read_json(path)
        for name in {*chains, *(path.name for path in self.path.glob("*.jsonl"))}:  # a file in `chains` may be missing
            read_records(self.path / name, until=chains.get(name, ""))

    def rewind(self, round: int, chains: Mapping[str, str] | None = None) -> None:
        """Drop everything after a round, and a partial line that a kill may have left.

        Raises:
            ResumeError: a file is damaged, lacks records that a checkpoint requires (`chains`), or rounds.jsonl is
                incomplete up to the round.  Nothing was changed.
        """
        self.check_records(chains or {})
        rounds = [record["round"] for record in self.rounds() if record["round"] <= round]
        if rounds != list(range(1, round + 1)):
            raise ResumeError(
                f"{self.path / 'rounds.jsonl'} does not hold one record for each of the rounds 1 to {round} that the "
                "newest "
                f"checkpoint has behind it (found: {len(rounds)}); restore the file from a copy, or start a new run."
            )
        remove_partials(self.path)
        remove_partials(self.checkpoints)
        # first: a run whose records are cut must not look finished
        (self.path / "outcome.json").unlink(missing_ok=True)
        # not privacy.jsonl: what was released stays released
        self.drop_after(round, "rounds.jsonl", "timings.jsonl", "failures.jsonl", "findings.jsonl", "sites.jsonl")
        keep_records(self.path / "members.jsonl")  # keep later events: repeating the rounds does not repeat them

    def drop_after(self, round: int, *names: str) -> None:
        """Drop the records of .jsonl files after a round."""
        for path in map(self.path.joinpath, names):
            keep_records(path, lambda record: bool(record["round"] <= round))


def create(
    root: Path,
    *,
    experiment: str,
    seed: int,
    config_toml: str,
    changed: Mapping[str, Any] | None = None,
    environment: Record,
    partition: Record,
) -> RunFolder:
    """Create the folder `root`/experiment/<time>-seed<seed>; writing the configuration last makes it a run."""
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
    update_config(folder, config_toml, changed)
    return folder


def update_config(folder: RunFolder, config_toml: str, changed: Mapping[str, Any] | None = None) -> None:
    """Write the sealed configuration; in its header, the environment and the settings that are not the defaults."""
    facts = {"digest": digests.BLANK, **folder.environment}
    if changed is not None:
        facts["changed"] = json.dumps(changed)
    header = "".join(f"# {key}: {value}\n" for key, value in facts.items())
    write_text(folder.path / "config.toml", digests.sealed(header + "\n" + config_toml))


def changed_settings(config_toml: str) -> dict[str, tuple[Any, Any]] | None:
    """The settings that were not the defaults when the run was started: path -> value, default.

    None for a run of an earlier version.

    >>> changed_settings('# changed: {"client.lr": [0.1, 0.05]}\\nseed = 0')
    {'client.lr': (0.1, 0.05)}
    """
    header = itertools.takewhile(lambda line: line.startswith("#"), config_toml.splitlines())
    prefix = "# changed: "
    found = next((line.removeprefix(prefix) for line in header if line.startswith(prefix)), None)
    return None if found is None else {path: (value, default) for path, (value, default) in json.loads(found).items()}


def open_run(path: Path) -> RunFolder:
    """Open a run by its folder, by a file in it, or under ./runs by NAME/RUN, by RUN, or by a NAME that has one run.

    Raises:
        ResultsError: there is no run, or several.
    """
    is_in_it = path.is_file() or (len(path.parts) > 1 and not path.is_dir())  # such as a page that is to be written
    given = path.parent if is_in_it else path
    found = [given] if _is_run(given) else _named(path)
    if len(found) > 1:
        runs = ", ".join(map(str, found[-3:]))
        raise ResultsError(f"{path} could be any of {len(found)} runs; give the folder of one, such as {runs}.")
    if not found:
        what = f"{path} is not a run: there is no config.toml in it." if path.exists() else f"there is no run {path}."
        raise ResultsError(
            f"{what}{nearest(str(path), _names())} 'fedsign runs' lists the runs under ./{RUNS}; give the name or the "
            "folder of one."
        )
    return RunFolder(found[0])


def _names() -> Iterator[str]:
    """What runs under ./runs can be called."""
    for config in RUNS.glob("*/*/config.toml"):
        run = config.parent
        yield from (run.parent.name, run.name, f"{run.parent.name}/{run.name}", str(run))


def _named(path: Path) -> list[Path]:
    """The runs under ./runs that a path can mean."""
    if path.is_absolute() or ".." in path.parts or not path.name:
        return []
    if _is_run(exact := RUNS / path):
        return [exact]
    of_name, with_id = (folder.glob("*/") for folder in (exact, RUNS))
    return sorted(filter(_is_run, [*of_name, *(each / path for each in with_id)]))


def _is_run(folder: Path) -> bool:
    return (folder / "config.toml").is_file()


def find_runs(root: Path) -> list[RunFolder]:
    """All runs under a folder, also the cells of comparisons; oldest first."""
    found = sorted(_runs_under(root, _DEEPEST), key=lambda path: (path.name, path))  # names begin with the time
    return [RunFolder(path) for path in found]


def _runs_under(folder: Path, depth: int) -> Iterator[Path]:
    if _is_run(folder):
        yield folder
    elif depth:
        for each in folder.glob("*/"):
            if each.name != SET_ASIDE and not each.name.startswith("."):
                yield from _runs_under(each, depth - 1)


def read_records(path: Path, *, until: str = "") -> list[Record]:
    """The complete records of a .jsonl file; a last line without a newline was cut off by a kill.

    Raises:
        ResumeError: a record is damaged or missing, or none has the chain `until`.
    """
    try:
        texts = _texts(path)
        records = [json.loads(text) for text in digests.unchained(texts)]
        if until and until not in map(digests.chain_of, texts):
            raise ValueError(f"{len(records)} lines are left; a checkpoint counts on more")
    except (OSError, ValueError) as error:
        raise damaged(path, error) from error
    return records


def keep_records(path: Path, wanted: Callable[[Record], bool] = lambda record: True) -> None:
    """Keep the wanted records of a .jsonl file; the others must be at its end.  Also drops a partial last line."""
    if path.exists():
        kept = zip(_texts(path), read_records(path), strict=True)
        write_text(path, "".join(f"{text}\n" for text, record in kept if wanted(record)))


def read_json(path: Path) -> Record:
    """Read a JSON file written by `RunFolder.write_json`.

    Raises:
        ResumeError: it is missing or damaged.
    """
    try:
        return digests.read_json(path.read_text(encoding="utf-8"))[0]
    except (OSError, ValueError) as error:
        raise damaged(path, error) from error


def damaged(path: Path, error: Exception) -> ResumeError:
    """The error for a missing or damaged file."""
    return ResumeError(f"{path} is missing or damaged ({error}); restore it from a copy, or start a new run.")


def final_value(records: list[Record], key: str, *, last: int = 5) -> float | None:
    """Mean of a metric over those of the last rounds that measured it, or its last value; None if one is undefined.

    >>> final_value([{"accuracy": 0.5}, {"accuracy": 1.0}, {}], "accuracy")
    0.75
    """
    values = [record[key] for record in records[-last:] if key in record]
    values = values or [record[key] for record in records if key in record][-1:]
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers and len(numbers) == len(values) else None


def _fresh(parent: Path, name: str) -> Path:
    """Create a new folder, with a number appended if the name is taken."""
    attempt = 1
    while True:
        path = parent / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            os.mkdir(path)  # noqa: PTH102 - atomic check and creation
        except FileExistsError:
            attempt += 1
        else:
            return path


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _texts(path: Path) -> list[str]:
    """The complete lines of a file."""
    return [line for line in path.read_text(encoding="utf-8").split("\n")[:-1] if line] if path.exists() else []


def _last_chain(path: Path) -> str:
    """The chain of a file's last line."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 64))  # more than a chain takes; the file may be large
            # the first of these bytes may lie within a character
            return digests.chain_of(file.read().decode("utf-8", errors="replace").removesuffix("\n"))
    except FileNotFoundError:
        return ""
