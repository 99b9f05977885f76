"""Checkpoints of the server: safetensors and JSON, never pickle; atomic; the last n are kept.

    checkpoints/round-000010/
        served.safetensors      what clients receive in the next round
        evaluated.safetensors   only where it differs from the served model
        strategy.safetensors    the strategy's state, if it has one
        clients.safetensors     versions of the clients' states, if they keep any: `partition`, ascending, and `version`
        <table>.safetensors     another number of each client, likewise, that an update encoding keeps
        state.json              the round, how many clients keep a state, and facts of an update encoding; in format 1, which
                                is read too, the versions of the clients' states

Client states are not here but with the clients, versioned (see [Note: versions of client state]).
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedsign.errors import ResumeError
from fedsign.records import Tensors
from fedsign.storage.disk import replace_file, replaced_folder

FORMAT = 2
_READABLE = (1, FORMAT)
_OWN_FILES = {"served", "evaluated", "strategy", "clients"}
_OWN_FACTS = {"format", "round", "num_clients_with_state", "client_versions"}


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


def save(folder: Path, checkpoint: Checkpoint, *, keep: int) -> list[int]:
    """Write a checkpoint, then remove all but the newest `keep`, whose rounds are returned, oldest first."""
    with replaced_folder(folder / f"round-{checkpoint.round:06d}") as target:
        save_tensors(target / "served.safetensors", checkpoint.served)
        if checkpoint.evaluated is not None:
            save_tensors(target / "evaluated.safetensors", checkpoint.evaluated)
        if checkpoint.strategy:
            save_tensors(target / "strategy.safetensors", checkpoint.strategy)
        versions = {"clients": checkpoint.client_versions} if checkpoint.client_versions else {}
        for name, table in {**versions, **checkpoint.tables}.items():
            save_tensors(target / f"{name}.safetensors", _table_of(table))
        state: dict[str, Any] = {
            "format": FORMAT,
            "round": checkpoint.round,
            "num_clients_with_state": len(checkpoint.client_versions),
            **checkpoint.facts,
        }
        (target / "state.json").write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")

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
        evaluated = path / "evaluated.safetensors"
        strategy = path / "strategy.safetensors"
        return Checkpoint(
            round=state["round"],
            served=load_file(path / "served.safetensors"),
            evaluated=load_file(evaluated) if evaluated.exists() else None,
            strategy=load_file(strategy) if strategy.exists() else {},
            client_versions=_client_versions(path, state),
            facts={key: value for key, value in state.items() if key not in _OWN_FACTS},
            tables={file.stem: _read_table(file) for file in path.glob("*.safetensors") if file.stem not in _OWN_FILES},
        )


def save_model(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one model as a plain state_dict in safetensors, in one step."""
    replace_file(path, lambda partial: save_tensors(partial, tensors))


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors; ENOSPC arrives as OSError, whatever safetensors makes of it."""
    # Clones, since safetensors refuses tensors that share memory (tied weights).
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    try:
        save_file(plain, path)
    except SafetensorError as error:
        raise _as_os_error(error, path) from error


def _as_os_error(error: SafetensorError, path: Path) -> Exception:
    """safetensors hides the errno in its text: "... (os error 28)"."""
    number = str(error).rpartition("os error ")[2].partition(")")[0]
    return OSError(int(number), str(error), str(path)) if number.isdigit() else error


def _state(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((path / "state.json").read_text(encoding="utf-8"))
    if state["format"] not in _READABLE:
        raise ResumeError(
            f"the checkpoint {path} has format {state['format']}, this version reads {FORMAT}; use the fedsign that wrote it."
        )
    return state


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
    return _read_table(path / "clients.safetensors")


def _read_table(path: Path) -> dict[int, int]:
    table = load_file(path)
    return dict(zip(table["partition"].tolist(), table["version"].tolist(), strict=True))


@contextmanager
def _damage_said(path: Path) -> Iterator[None]:
    """Turn what a damaged checkpoint raises into a sentence."""
    try:
        yield
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise ResumeError(
            f"the checkpoint {path} is damaged ({error}); remove this folder to resume from the one before."
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
