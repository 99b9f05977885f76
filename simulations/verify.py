"""Verification of files on disk: each against its digest, and those of a run against its manifest and checkpoints."""

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

from clients.state.cache import StateCache
from clients.state.database import StateDatabase
from fedsign.config import parse_toml
from fedsign.errors import ClientStateError, FedSignError, ResultsError, ResumeError
from fedsign.extensions import extensions
from fedsign.storage import checkpoints
from fedsign.storage.disk import PARTIAL
from fedsign.storage.results import MANIFEST, RunFolder, damaged, read_json, read_records

Findings = Iterator[tuple[Path, str]]  # a file, and what is wrong with it; empty if it is whole
_KEY_MARK = ".key.json"  # beside a key: the digest of its file
_OF_CHECKPOINTS = re.compile(r"round-\d{6}/(state\.json|\w+\.safetensors)")
_OF_CLIENTS = re.compile(r"states\.sqlite(-\w+)?|\w+\.key(\.json)?|(logs|received)/.*|\d{6}/round-\d{6}\.safetensors")


def verify(path: Path) -> Findings:
    """Yield each file that a run, a comparison or a client reads back, and its damage, empty if it is whole.

    Of runs, also yield what is missing and what does not belong to them.

    Raises:
        ResultsError: there is no such file.
    """
    has_files = False
    for file in sorted(path.rglob("*")):
        # by name first: rounds.jsonl and state.json say more than their suffix
        read = _READERS.get(file.name, _READERS.get(file.suffix))
        if file.name.endswith(_KEY_MARK):
            read = _read_mark
        if read is None or not file.is_file() or _is_left(file.relative_to(path)):
            continue
        has_files = True
        yield file, _damage(partial(read, file))
    if not has_files:
        raise ResultsError(
            f"{path} holds nothing to verify; give the folder of a run, of a comparison or of clients' states."
        )
    for folder in sorted({file.parent for name in (MANIFEST, "config.toml") for file in path.rglob(name)}):
        if not _is_left(folder.relative_to(path)):
            yield from _verify_run(RunFolder(folder))
    for folder in (path, *sorted(each for each in path.rglob("*/") if not _is_left(each.relative_to(path)))):
        for check in extensions("verify"):
            try:
                yield from check(folder)
            except FedSignError as error:
                yield folder, str(error)


def _is_left(inside: Path) -> bool:
    """Whether a file is partial, or was set aside."""
    return any(part.startswith("damaged-") or part.endswith(PARTIAL) for part in inside.parts)


def _damage(read: Callable[[], object]) -> str:
    try:
        read()
    except FedSignError as error:
        return str(error)
    return ""


def _verify_run(run: RunFolder) -> Findings:
    """Yield what is missing of a run, or foreign in it."""
    try:
        parse_toml(run.config_toml, source=str(run.path))
        manifest, required = run.manifest, run.required_chains()
    except FedSignError as error:
        yield run.path, str(error)
        return
    for name in manifest.get("files", ()):
        yield run.path / name, _damage(partial(run.bound, name))
    for name, chain in required.items():
        yield run.path / name, _damage(partial(read_records, run.path / name, until=chain))
    for name in manifest.get("models", ()):
        yield run.path / name, _damage(partial(run.check_model, name))
    yield from _verify_checkpoints(run)
    if run.clients.is_dir():
        yield from _foreign(run.clients, _OF_CLIENTS)


def _verify_checkpoints(run: RunFolder) -> Findings:
    """Yield missing checkpoints, what does not belong to one, and states that one refers to."""
    for path in checkpoints.missing(run):
        yield path, f"the checkpoint {path} is missing; resuming goes on from an earlier one."
    if run.checkpoints.is_dir():
        yield from _foreign(run.checkpoints, _OF_CHECKPOINTS)
    for round in checkpoints.rounds_on_disk(run.checkpoints):
        yield from _verify_states(run, run.checkpoints / f"round-{round:06d}")


def _verify_states(run: RunFolder, path: Path) -> Findings:
    """Yield client states that a checkpoint refers to and that are damaged, missing, or another run's."""
    try:
        checkpoint = checkpoints.load(path)
    except ResumeError:
        return  # reported with the file
    unlisted = {file.name for file in path.iterdir()} - {"state.json", *checkpoints.files_of(path)}
    for name in sorted(unlisted):
        yield path / name, f"{path / name} does not belong to this checkpoint; remove it."
    # states of a federation's sites are on their machines
    if checkpoint.client_versions and (run.clients.is_dir() or checkpoint.states):
        try:
            with closing(StateCache(run.clients, run=run.id)) as states:
                states.check(checkpoint.client_versions, checkpoint.states)
        except ClientStateError as error:
            database = run.clients / "states.sqlite"
            yield database if database.exists() else run.clients, str(error)


def _foreign(folder: Path, known: re.Pattern[str]) -> Findings:
    for file in sorted(folder.rglob("*")):
        inside = file.relative_to(folder)
        if file.is_file() and not known.fullmatch(inside.as_posix()) and not _is_left(inside):
            yield file, f"{file} is not a file of a run; remove it."


def _read_mark(file: Path) -> None:
    """Check a key against the digest beside it."""
    key = file.with_suffix("")
    try:
        is_same = hashlib.sha256(key.read_bytes()).hexdigest() == read_json(file)["sha256"]
    except (OSError, KeyError) as error:
        raise damaged(key, error) from error
    if not is_same:
        raise damaged(key, ValueError(f"it is not the key of {file.name}"))


def _read_key(file: Path) -> None:
    mark = file.with_name(f"{file.name}.json")
    if not mark.exists() and (file.parent / MANIFEST).exists() | (file.parent.parent / MANIFEST).exists():
        raise damaged(mark, ValueError("it is written with the key"))


def _read_database(file: Path) -> None:
    with closing(StateDatabase(file.parent)) as database:
        database.check()


_READERS: dict[str, Callable[[Path], object]] = {
    "config.toml": lambda file: RunFolder(file.parent).config_toml,
    "state.json": lambda file: checkpoints.load(file.parent),
    "states.sqlite": _read_database,
    ".json": read_json,
    ".jsonl": read_records,
    ".key": _read_key,
    ".safetensors": checkpoints.load_model,
}
