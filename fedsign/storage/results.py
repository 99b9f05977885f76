"""The layout of a run on disk, and how to read it without torch or Flower.

runs/<experiment>/<id>/
    config.toml        the complete configuration, with versions and git state in its header
    environment.json   the same facts for programs
    manifest.json      what belongs to the run, see [Note: one run]
    partition.json     number of samples per client and class
    rounds.jsonl       one chained record per round; bitwise equal whenever the run is repeated or resumed
    timings.jsonl      seconds per round, kept apart because they never repeat
    failures.jsonl     full reports of failed clients
    clients.jsonl      metrics per round and client, unless [privacy] protects them
    findings.jsonl     likely mistakes in the data and in the course of the run
    privacy.jsonl      releases per round and the budget spent, with [privacy]
    privacy.key        the secret behind the noise, for the server alone; privacy.key.json has a digest of it
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

[Note: one run] A run has an id, which is in `manifest.json`, `config.toml`, each checkpoint, and the file of a client's
state.  Files that are equal whenever a run is repeated do not contain it: the manifest and the checkpoints hold
their digests instead, also those of models, and the chains of the records.  A file of another run is thus found
although it is whole.  The manifest is written before a file whose digest it holds, and accepts the former content until
the next write, so that a kill in between leaves a run that can be resumed.  At the end of a run it also gets the chains
of all records.  Digests detect accidents and mix-ups, not somebody who writes all files anew.
"""

import itertools
import json
import math
import os
import struct
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fedsign.errors import DISK_FULL, ResultsError, ResumeError
from fedsign.storage import digests
from fedsign.storage.disk import append_bytes, disk_errors, exclusive, remove_partials, write_text

Record = dict[str, Any]

MANIFEST, _CONFIG, _OUTCOME = "manifest.json", "config.toml", "outcome.json"
_LONGEST_HEADER = 100_000_000  # bytes, as in the safetensors library


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
        path = self.path / _CONFIG
        try:
            text = path.read_text(encoding="utf-8")
            digests.check_seal(text)
            if not any(line and not line.startswith("#") for line in text.splitlines()):
                raise ValueError("it holds no settings")
            self.check_owner(_header(text).get("run", ""))
        except (OSError, ValueError) as error:
            raise damaged(path, error) from error
        return text

    @property
    def manifest(self) -> Record:
        """What belongs to the run, see [Note: one run]; empty for a run of an earlier version."""
        path = self.path / MANIFEST
        content = read_json(path) if path.exists() else {}
        if content and not (content.get("format") == 1 and "files" in content):
            raise damaged(path, ValueError("it is no manifest"))
        return content

    @property
    def id(self) -> str:
        """The run's id; empty for a run of an earlier version."""
        return str(self.manifest.get("run", ""))

    def check_owner(self, run: str) -> None:
        """Check the id `run` that a file of this run holds.

        Raises:
            ValueError: it is another run's.
        """
        if run and not self.id:
            raise damaged(self.path / MANIFEST, ValueError(f"the other files are of {_named_run(run)}"))
        if run != (own := self.id):
            raise ValueError(f"it is of {_named_run(run)}, but {MANIFEST} is of {_named_run(own)}")

    @property
    def environment(self) -> Record:
        """Versions and git state under which the run was written."""
        return self.bound("environment.json")

    @property
    def partition(self) -> Record:
        """`{"class_names": [...], "counts": [clients][classes]}`."""
        return self.bound("partition.json")

    @property
    def outcome(self) -> Record:
        """`{"status": "finished" | "failed" | "unfinished", ...}`."""
        if (self.path / _OUTCOME).exists():
            return self.bound(_OUTCOME)
        lost = {"error": f"{self.path / _OUTCOME} is missing; resume the run"} if "end" in self.manifest else {}
        return {"status": "unfinished", **lost}

    def bound(self, name: str) -> Record:
        """Read a JSON file whose digest is in the manifest.

        Raises:
            ResumeError: it is missing, damaged, or of another run.
        """
        path, manifest = self.path / name, self.manifest
        content = read_json(path)
        if manifest and digests.digest_of(path.read_bytes()) not in manifest["files"].get(name, ()):
            raise damaged(path, ValueError(f"it is not of {_named_run(self.id)}, of which {MANIFEST} is"))
        return content

    def bind_model(self, name: str, digests: Iterable[str]) -> None:
        """Let the manifest, if there is one, list the digests that a model's file may have; an empty one: none."""
        if manifest := self.manifest:
            manifest.setdefault("models", {})[name] = [*digests]
            self._write_manifest(manifest)

    def check_model(self, name: str) -> None:
        """Check the digest of a model's file, without reading the model.

        Raises:
            ResumeError: it is missing, damaged, or not the one that the manifest lists.
        """
        path, known = self.path / name, self.manifest.get("models", {}).get(name)
        if known and (read_metadata(path).get(digests.KEY, "") if path.exists() else "") not in known:
            raise damaged(path, ValueError(f"the model that {MANIFEST} lists is not there"))

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
        return read_records(self.path / name, until=self.required_chains().get(name, ""))

    def required_chains(self) -> Mapping[str, str]:
        """The chains that the records must contain: those at the end of the run, or at the newest checkpoint."""
        chains: Record = {}
        if states := sorted(self.checkpoints.glob("round-??????/state.json")):
            state = read_json(states[-1])
            try:
                self.check_owner(state.get("run", ""))
            except ValueError as error:
                raise damaged(states[-1], error) from error
            chains = state.get("records", {})
        return dict(self.manifest.get("end", {}).get("records", chains))

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a small JSON file atomically; the manifest, if it holds the file's digest, is written first."""
        text, manifest = digests.sealed_json(value), self.manifest
        if known := manifest.get("files", {}).get(name):
            manifest["files"][name] = [known[-1], digests.digest_of(text.encode())]
            self._write_manifest(manifest)
        write_text(self.path / name, text)

    def conclude(self, outcome: Record) -> None:
        """Write the outcome of a run, after the manifest has bound it, the models, and all records."""
        if manifest := self.manifest:
            text = digests.sealed_json(outcome)
            manifest["end"] = {"records": self.chains()}
            manifest["files"][_OUTCOME] = [digests.digest_of(text.encode())]
            self._write_manifest(manifest)
        write_text(self.path / _OUTCOME, digests.sealed_json(outcome))

    def _write_manifest(self, content: Mapping[str, Any]) -> None:
        write_text(self.path / MANIFEST, digests.sealed_json(content))

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
        bound = self.manifest.get("files", ())
        for name in {*bound, *(path.name for path in self.path.glob("*.json"))}:
            if name not in (_OUTCOME, "tags.json"):
                self.bound(name) if name in bound else read_json(self.path / name)
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
                f"newest checkpoint has behind it (found: {len(rounds)}); restore it from a copy, or start a new run."
            )
        remove_partials(self.path)
        remove_partials(self.checkpoints)
        # first: a run whose records are cut must not look finished
        (self.path / _OUTCOME).unlink(missing_ok=True)  # may also be a foreign one
        if (manifest := self.manifest).pop("end", None):
            del manifest["files"][_OUTCOME]
            self._write_manifest(manifest)
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
    data: str = "",
) -> RunFolder:
    """Create the folder `root`/experiment/<time>-seed<seed>; writing the configuration last makes it a run.

    `data` is the digest of the data.
    """
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
    files = {"environment.json": environment, "partition.json": partition}
    for name, value in files.items():
        folder.write_json(name, value)
    bound = {name: [digests.digest_of((folder.path / name).read_bytes())] for name in files}
    run = f"{folder.path.name}-{uuid.uuid4().hex[:12]}"
    folder.write_json(MANIFEST, {"format": 1, "run": run, "data": data, "files": bound})
    update_config(folder, config_toml, changed)
    return folder


def update_config(folder: RunFolder, config_toml: str, changed: Mapping[str, Any] | None = None) -> None:
    """Write the sealed configuration; in its header, the environment and the settings that are not the defaults."""
    facts = {"digest": digests.BLANK, **({"run": folder.id} if folder.id else {}), **folder.environment}
    if changed is not None:
        facts["changed"] = json.dumps(changed)
    header = "".join(f"# {key}: {value}\n" for key, value in facts.items())
    write_text(folder.path / _CONFIG, digests.sealed(header + "\n" + config_toml))


def changed_settings(config_toml: str) -> dict[str, tuple[Any, Any]] | None:
    """The settings that were not the defaults when the run was started: path -> value, default.

    None for a run of an earlier version.

    >>> changed_settings('# changed: {"client.lr": [0.1, 0.05]}\\nseed = 0')
    {'client.lr': (0.1, 0.05)}
    """
    found = _header(config_toml).get("changed")
    return None if found is None else {path: (value, default) for path, (value, default) in json.loads(found).items()}


def _header(config_toml: str) -> dict[str, str]:
    """The facts in the comment at the top of a configuration."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), config_toml.splitlines())
    return {key: value for line in lines for key, _, value in [line.removeprefix("# ").partition(": ")]}


def _named_run(id: str) -> str:
    return f"the run {id}" if id else "a run without a manifest"


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


def read_metadata(path: Path) -> dict[str, str]:
    """The facts in the header of a .safetensors file, read without torch or NumPy.

    Raises:
        ResumeError: it is missing or damaged.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, _LONGEST_HEADER)))
        found: dict[str, str] = header.get("__metadata__", {})
    except (OSError, ValueError, struct.error) as error:
        raise damaged(path, error) from error
    return found


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
