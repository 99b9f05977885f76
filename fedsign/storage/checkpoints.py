"""Checkpoints of the server: safetensors and JSON, never pickle; atomic; the last n are kept.

    checkpoints/round-000010/
        served.safetensors      what clients receive in the next round
        evaluated.safetensors   only where it differs from the served model
        strategy.safetensors    the strategy's state, if it has one
        clients.safetensors     versions of the clients' states, if they keep any: `partition`, ascending, and `version`
        <table>.safetensors     another number of each client, likewise, that an update encoding keeps
        state.json              the manifest: the round, a digest of each file, the chain of each of the run's records, a digest of the
                                clients' states, and facts of an update encoding

Formats 1, with the versions of the clients' states in state.json, and 2, without digests, are read too.
Client states are not here but with the clients, versioned (see [Note: versions of client state]).
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedsign.errors import ResumeError
from fedsign.records import Tensors
from fedsign.storage.digests import digest_of, read_json, sealed_json
from fedsign.storage.disk import fresh_path, replace_file, replaced_folder
from fedsign.storage.results import RunFolder

FORMAT = 3
_READABLE = (1, 2, FORMAT)
_OWN_FILES = {"served", "evaluated", "strategy", "clients"}
_OWN_FACTS = {"format", "round", "num_clients_with_state", "client_versions", "files", "records", "states"}
_DIGEST = "digest"  # in the metadata of a .safetensors file
_log = logging.getLogger("fedsign")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """All that the server needs to go on after `round`."""

    round: int
    served: Tensors
    evaluated: Tensors | None = None
    strategy: Tensors = field(default_factory=dict)
    client_versions: Mapping[int, int] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)  # of an update encoding, as JSON
    tables: Mapping[str, Mapping[int, int]] = field(default_factory=dict)  # likewise: name -> partition -> number
    records: Mapping[str, str] = field(default_factory=dict)  # of the run: file -> chain of its last line
    states: str = ""  # digest of the clients' states, where they lie with the server


def rewind(folder: RunFolder) -> int:
    """Drop what a run wrote after its newest checkpoint; returns the round of that, 0 without one."""
    paths = _paths(folder.checkpoints)
    round = max(paths, default=0)
    records: Mapping[str, str] = {}
    if paths:
        with _damage_said(paths[round]):
            records = _state(paths[round]).get("records", {})
    folder.rewind(round, records)
    return round


def save(folder: Path, checkpoint: Checkpoint, *, keep: int) -> list[int]:
    """Write a checkpoint, then remove all but the newest `keep`, whose rounds are returned, oldest first."""
    models = {"served": checkpoint.served, "evaluated": checkpoint.evaluated, "strategy": checkpoint.strategy or None}
    versions = {"clients": checkpoint.client_versions} if checkpoint.client_versions else {}
    tables = {name: _table_of(table) for name, table in {**versions, **checkpoint.tables}.items()}
    with replaced_folder(folder / f"round-{checkpoint.round:06d}") as target:
        state: dict[str, Any] = {
            "format": FORMAT,
            "round": checkpoint.round,
            "num_clients_with_state": len(checkpoint.client_versions),
            "files": {
                name: save_tensors(target / f"{name}.safetensors", tensors)
                for name, tensors in {**models, **tables}.items()
                if tensors is not None
            },
            "records": checkpoint.records,
            "states": checkpoint.states,
            **checkpoint.facts,
        }
        (target / "state.json").write_text(sealed_json(state), encoding="utf-8")

    paths = _paths(folder)
    kept = list(paths)[-keep:]
    for old in set(folder.glob("round-??????")) - {paths[round] for round in kept}:
        _remove(old)
    return kept


def rounds_on_disk(folder: Path) -> list[int]:
    """The rounds that can be resumed from, oldest first."""
    return list(_paths(folder))


def client_versions_on_disk(folder: Path) -> dict[int, dict[int, int]]:
    """Round -> versions of the clients' states, of every checkpoint that can be resumed from."""
    found = {}
    for path in _paths(folder).values():
        with _damage_said(path):
            state = _state(path)
            found[int(state["round"])] = _client_versions(path, state)
    return found


def set_damaged_aside(folder: Path) -> None:
    """Rename checkpoints that are damaged, and say so aloud, where another one is left to resume from.

    Raises:
        ResumeError: none is whole; the newest is named, and all stay where they are.
    """
    damaged: dict[Path, ResumeError] = {}
    paths = list(_paths(folder).values())
    for path in reversed(paths):
        try:
            load(path)
        except ResumeError as error:
            damaged[path] = error
    if damaged and len(damaged) == len(paths):
        raise damaged[paths[-1]]
    for path, reason in damaged.items():
        aside = fresh_path(path.with_name(f"damaged-{path.name}"))
        _log.warning(
            "%s is damaged (%s): it is renamed to %s, and not resumed from",
            path,
            reason.__cause__ or reason,
            aside.name,
        )
        path.rename(aside)


def load_latest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint, or None when there is none."""
    paths = _paths(folder)
    return load(paths[max(paths)]) if paths else None


def load(path: Path) -> Checkpoint:
    """Read one checkpoint.

    Raises:
        ResumeError: it is damaged or of another format.
    """
    with _damage_said(path):
        state = _state(path)
        names = state["files"] if state["format"] == FORMAT else {file.stem for file in path.glob("*.safetensors")}
        found = {name: _read(path, name, state) for name in names}
        return Checkpoint(
            round=state["round"],
            served=found["served"],
            evaluated=found.get("evaluated"),
            strategy=found.get("strategy", {}),
            client_versions=_client_versions(path, state),
            facts={key: value for key, value in state.items() if key not in _OWN_FACTS},
            tables={name: _versions_in(table) for name, table in found.items() if name not in _OWN_FILES},
            records=state.get("records", {}),
            states=state.get("states", ""),
        )


def save_model(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one model as a plain state_dict in safetensors, in one step."""
    replace_file(path, lambda partial: save_tensors(partial, tensors))


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors and, beside them, their digest, which is returned; ENOSPC arrives as OSError, whatever safetensors makes of it."""
    # Clones, since safetensors refuses tensors that share memory (tied weights).
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    digest = tensors_digest(plain)
    try:
        save_file(plain, path, metadata={_DIGEST: digest})
    except SafetensorError as error:
        raise _as_os_error(error, path) from error
    return digest


def load_tensors(path: Path, *, digest: str = "") -> Tensors:
    """What `save_tensors` wrote; `digest` is what it returned, where that is known.

    Raises:
        SafetensorError: it is damaged.
    """
    with safe_open(path, framework="pt") as file:
        written = (file.metadata() or {}).get(_DIGEST, digest)
    tensors = load_file(path)
    if (written or digest) and not tensors_digest(tensors) == written == (digest or written):
        raise SafetensorError(f"{path.name}: its digest does not match")
    return tensors


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Of names, types, shapes and bytes."""
    parts: list[Any] = []
    for name, tensor in sorted(tensors.items()):
        parts.append(f"{name} {tensor.dtype} {[*tensor.shape]}".encode())
        parts.append(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest_of(*parts)


def _as_os_error(error: SafetensorError, path: Path) -> Exception:
    """safetensors hides the errno in its text: "... (os error 28)"."""
    number = str(error).rpartition("os error ")[2].partition(")")[0]
    return OSError(int(number), str(error), str(path)) if number.isdigit() else error


def _state(path: Path) -> dict[str, Any]:
    state, is_sealed = read_json((path / "state.json").read_text(encoding="utf-8"))
    if state["format"] not in _READABLE:
        raise ResumeError(
            f"the checkpoint {path} has format {state['format']}, this version reads {FORMAT}; use the fedsign that wrote it."
        )
    if state["format"] == FORMAT and not is_sealed:
        raise ValueError("state.json: its digest is missing")
    return state


def _read(path: Path, name: str, state: Mapping[str, Any]) -> Tensors:
    return load_tensors(path / f"{name}.safetensors", digest=state.get("files", {}).get(name, ""))


def _table_of(versions: Mapping[int, int]) -> Tensors:
    """As tensors, since a million clients as text would take seconds."""
    partitions = np.fromiter(versions.keys(), dtype=np.int64, count=len(versions))
    order = np.argsort(partitions)
    values = np.fromiter(versions.values(), dtype=np.int64, count=len(versions))
    return {"partition": torch.from_numpy(partitions[order]), "version": torch.from_numpy(values[order])}


def _client_versions(path: Path, state: Mapping[str, Any]) -> dict[int, int]:
    if state["format"] == 1:
        return {int(key): value for key, value in state["client_versions"].items()}
    if not state["num_clients_with_state"]:
        return {}
    return _versions_in(_read(path, "clients", state))


def _versions_in(table: Tensors) -> dict[int, int]:
    return dict(zip(table["partition"].tolist(), table["version"].tolist(), strict=True))


@contextmanager
def _damage_said(path: Path) -> Iterator[None]:
    """Turn what a damaged checkpoint raises into a sentence."""
    try:
        yield
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise ResumeError(
            f"the checkpoint {path} is damaged ({error}); restore it from a copy, or start a new run."
        ) from error


def _paths(folder: Path) -> dict[int, Path]:
    """Round -> whole checkpoint, oldest first; one that was being removed has no state.json any more."""
    return {
        int(path.name.removeprefix("round-")): path
        for path in sorted(folder.glob("round-??????"))
        if (path / "state.json").exists()
    }


def _remove(path: Path) -> None:
    """Remove a checkpoint so that a kill in between never leaves one that looks whole."""
    (path / "state.json").unlink(missing_ok=True)
    for entry in path.iterdir():
        entry.unlink()
    path.rmdir()
