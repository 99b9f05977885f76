"""Server checkpoints: safetensors and JSON, never pickle; written atomically; the last n are kept.

    checkpoints/round-000010/
        served.safetensors      the model that clients receive next
        evaluated.safetensors   only if it differs from the served model
        strategy.safetensors    the strategy's state, if any
        clients.safetensors     versions of the clients' states, if any: `partition`, sorted, and `version`
        <table>.safetensors     another number per client, for an update encoding
        state.json              the manifest: the round, a digest of each file and of the clients' states, the chain of
                                each record file, and facts of an update encoding

Formats 1 (client versions in state.json) and 2 (without digests) can still be read.
Client states live with the clients, versioned (see [Note: versions of client state]).
"""

import logging
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedsign.errors import ClientStateError, FedSignError, ResultsError, ResumeError
from fedsign.records import Tensors
from fedsign.storage.digests import KEY, digest_of, read_json, sealed_json
from fedsign.storage.disk import fresh_path, replace_file, replaced_folder
from fedsign.storage.results import RunFolder, damaged

FORMAT = 3
MODEL = "model.safetensors"  # of a run that has finished
_READABLE = (1, 2, FORMAT)
_OWN_FILES = {"served", "evaluated", "strategy", "clients"}
_OWN_FACTS = {
    "format",
    "round",
    "num_clients_with_state",
    "client_versions",
    "files",
    "records",
    "states",
    "run",
    "kept",
}
_PARTS = "complex128:"  # before the name of such a tensor, which safetensors lacks: it is stored as its parts [..., 2]
_log = logging.getLogger("fedsign")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """Everything that the server needs to continue after `round`."""

    round: int
    served: Tensors
    evaluated: Tensors | None = None
    strategy: Tensors = field(default_factory=dict)
    client_versions: Mapping[int, int] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)  # of an update encoding, JSON values
    # of an update encoding: name -> partition -> number
    tables: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    records: Mapping[str, str] = field(default_factory=dict)  # record file -> chain of its last line
    states: str = ""  # digest of the clients' states, if the server stores them


def rewind(folder: RunFolder) -> int:
    """Drop what a run wrote after its newest checkpoint; return that checkpoint's round, or 0."""
    paths = _paths(folder.checkpoints)
    round = max(paths, default=0)
    records: Mapping[str, str] = {}
    if paths:
        with _damage_reported(paths[round]):
            records = _state(paths[round]).get("records", {})
    folder.rewind(round, records)
    return round


def save(folder: Path, checkpoint: Checkpoint, *, keep: int) -> list[int]:
    """Write a checkpoint, then remove all but the newest `keep`; return their rounds, oldest first."""
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
            "run": RunFolder(folder.parent).id,
            "kept": sorted({*_paths(folder), checkpoint.round})[-keep:],
            "records": checkpoint.records,
            "states": checkpoint.states,
            **checkpoint.facts,
        }
        # last, because it holds the digests of the other files
        (target / "state.json").write_text(sealed_json(state), encoding="utf-8")

    paths = _paths(folder)
    kept = list(paths)[-keep:]
    for old in set(folder.glob("round-??????")) - {paths[round] for round in kept}:  # also incomplete ones
        _remove(old)
    return kept


def rounds_on_disk(folder: Path) -> list[int]:
    """The rounds with a complete checkpoint, oldest first."""
    return list(_paths(folder))


def kept_at(folder: Path, round: int) -> list[int]:
    """The rounds whose checkpoints were kept when that of `round` was written; at least that one."""
    path = _paths(folder)[round]
    with _damage_reported(path):
        return [*_state(path).get("kept", [round])]


def missing(run: RunFolder) -> list[Path]:
    """The checkpoints that a run must have and has not, oldest first; those set aside are not missing."""
    every = tomllib.loads(run.config_toml)["results"]["checkpoint_every"]
    records = run.path / "rounds.jsonl"
    num_rounds = records.read_bytes().count(b"\n") if records.exists() else 0
    try:
        is_over = run.outcome["status"] == "finished"
    except ResumeError:
        is_over = False
    # the checkpoint follows the record, so that the last round's may be missing after a kill
    expected = {num_rounds if is_over else max(num_rounds - 1, 0) // every * every} - {0}
    found = rounds_on_disk(run.checkpoints)
    if found:
        newest = found[-1]
        expected = {each for each in expected if each > newest} | set(kept_at(run.checkpoints, newest))
    paths = [run.checkpoints / f"round-{round:06d}" for round in sorted(expected - {*found})]
    return [path for path in paths if not [*path.parent.glob(f"damaged-{path.name}*")]]


def files_of(path: Path) -> set[str]:
    """The names of a checkpoint's files with tensors."""
    with _damage_reported(path):
        return {f"{name}.safetensors" for name in _names(path, _state(path))}


def client_versions_on_disk(folder: Path) -> dict[int, dict[int, int]]:
    """Round -> versions of the clients' states, for every complete checkpoint."""
    versions = {}
    for path in _paths(folder).values():
        with _damage_reported(path):
            state = _state(path)
            versions[int(state["round"])] = _client_versions(path, state)
    return versions


def set_damaged_aside(folder: Path, check: Callable[[Checkpoint], object] = lambda checkpoint: None) -> None:
    """Rename damaged checkpoints, with a warning, if an intact one is left to resume from.

    Args:
        folder: the checkpoints.
        check: raises ClientStateError if states that a checkpoint refers to are damaged; then it is, too.

    Raises:
        ResumeError, ClientStateError: all are damaged; none is renamed, and the error names the newest.
    """
    damaged: dict[Path, FedSignError] = {}
    paths = list(_paths(folder).values())
    for path in reversed(paths):
        try:
            check(load(path))
        except (ResumeError, ClientStateError) as error:
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
    """The newest checkpoint, or None."""
    paths = _paths(folder)
    return load(paths[max(paths)]) if paths else None


def load(path: Path) -> Checkpoint:
    """Read one checkpoint.

    Raises:
        ResumeError: it is damaged or of another format.
    """
    with _damage_reported(path):
        state = _state(path)
        tables = {name: _read(path, name, state) for name in _names(path, state)}
        return Checkpoint(
            round=state["round"],
            served=tables["served"],
            evaluated=tables.get("evaluated"),
            strategy=tables.get("strategy", {}),
            client_versions=_client_versions(path, state),
            facts={key: value for key, value in state.items() if key not in _OWN_FACTS},
            tables={name: _versions_in(table) for name, table in tables.items() if name not in _OWN_FILES},
            records=state.get("records", {}),
            states=state.get("states", ""),
        )


def last_model(run: RunFolder) -> Tensors:
    """The evaluated model of a run that has finished; else that of its newest checkpoint.

    Raises:
        ResultsError: there is no checkpoint yet.
        ResumeError: a file is missing or damaged.
    """
    if run.outcome["status"] == "finished":
        return load_model(run.path / MODEL)
    if lost := missing(run):
        raise damaged(lost[-1], ValueError("resuming goes on from an earlier checkpoint"))
    checkpoint = load_latest(run.checkpoints)
    if checkpoint is None:
        raise ResultsError(f"{run.path} has no checkpoint yet; resume it with 'fedsign run --resume {run.path}'.")
    return checkpoint.evaluated or checkpoint.served


def save_model(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str] | None = None) -> None:
    """Write a model as a plain state_dict in safetensors, atomically; `facts` are metadata of the file."""
    run = RunFolder(path.parent)
    digests = [*run.manifest.get("models", {}).get(path.name, [""])]  # several after a kill

    def write(partial: Path) -> None:
        digests.append(save_tensors(partial, tensors, facts))
        run.bind_model(path.name, digests)  # before the file is there, see [Note: one run]

    replace_file(path, write)
    run.bind_model(path.name, digests[-1:])


def load_model(path: Path) -> Tensors:
    """Read what `save_model` wrote.

    Raises:
        ResumeError: it is missing, damaged, or of another run.
    """
    RunFolder(path.parent).check_model(path.name)
    try:
        return load_tensors(path)
    except (OSError, SafetensorError) as error:
        raise damaged(path, error) from error


def save_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str] | None = None) -> str:
    """Write tensors with their digest, which is returned; a full disk raises OSError, as for other writes."""
    plain: Tensors = {}
    storages = set()
    for name, tensor in tensors.items():
        one = tensor.detach().cpu().contiguous()
        # safetensors refuses tensors that share memory, such as tied weights: cloned, unlike a whole model
        plain[name] = one.clone() if one.untyped_storage().data_ptr() in storages else one
        storages.add(one.untyped_storage().data_ptr())
    digest = tensors_digest(plain)
    try:
        save_file(storable(plain), path, metadata={**(facts or {}), KEY: digest})
    except SafetensorError as error:
        raise _as_os_error(error, path) from error
    return digest


def load_tensors(path: Path, *, digest: str = "", facts: Mapping[str, str] | None = None) -> Tensors:
    """Load what `save_tensors` wrote; `digest` is the value it returned, if known, and `facts` are those expected.

    Raises:
        SafetensorError: it is damaged, or has other facts.
    """
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
    written = metadata.get(KEY, digest)
    for key, value in (facts or {}).items():
        if metadata.get(key, value) != value:  # files of earlier versions have none
            raise SafetensorError(f"{path.name}: it is of {key} {metadata[key]}, not of {key} {value}")
    tensors = restored(load_file(path))
    # the digest in the file finds damage; that of the manifest also finds an intact file of another checkpoint
    if (written or digest) and not tensors_digest(tensors) == written == (digest or written):
        raise SafetensorError(f"{path.name}: its digest does not match")
    return tensors


def storable(tensors: Mapping[str, Tensor]) -> Tensors:
    """Contiguous tensors of types that safetensors has."""
    is_split = {name: tensor.dtype == torch.complex128 for name, tensor in tensors.items()}
    return {
        f"{_PARTS}{name}" if is_split[name] else name: torch.view_as_real(tensor) if is_split[name] else tensor
        for name, tensor in tensors.items()
    }


def restored(stored: Mapping[str, Tensor]) -> Tensors:
    """The inverse of `storable`."""
    return {
        name.removeprefix(_PARTS): torch.view_as_complex(tensor) if name.startswith(_PARTS) else tensor
        for name, tensor in stored.items()
    }


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """A digest of names, dtypes, shapes, and bytes."""
    parts: list[Any] = []
    for name, tensor in sorted(tensors.items()):  # safetensors does not keep the order
        parts.append(f"{name} {tensor.dtype} {[*tensor.shape]}".encode())
        parts.append(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest_of(*parts)


def _as_os_error(error: SafetensorError, path: Path) -> Exception:
    """Recover the errno from safetensors' message, "... (os error 28)"."""
    number = str(error).rpartition("os error ")[2].partition(")")[0]
    return OSError(int(number), str(error), str(path)) if number.isdigit() else error


def _state(path: Path) -> dict[str, Any]:
    state, is_sealed = read_json((path / "state.json").read_text(encoding="utf-8"))
    if state["format"] not in _READABLE:
        raise ResumeError(
            f"the checkpoint {path} has format {state['format']}, this version reads {FORMAT}; "
            "use the fedsign that wrote it."
        )
    if state["format"] == FORMAT and not is_sealed:
        raise ValueError("state.json: its digest is missing")
    RunFolder(path.parent.parent).check_owner(state.get("run", ""))
    return state


def _names(path: Path, state: Mapping[str, Any]) -> Iterable[str]:
    """By the manifest, if it is in the format: a missing file must raise, not look like an optional one."""
    return state["files"] if state["format"] == FORMAT else {file.stem for file in path.glob("*.safetensors")}


def _read(path: Path, name: str, state: Mapping[str, Any]) -> Tensors:
    return load_tensors(path / f"{name}.safetensors", digest=state.get("files", {}).get(name, ""))


def _table_of(versions: Mapping[int, int]) -> Tensors:
    """Store a table as tensors; a million clients as text would take seconds."""
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
def _damage_reported(path: Path) -> Iterator[None]:
    """Turn the errors of a damaged checkpoint into a ResumeError."""
    try:
        yield
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise ResumeError(
            f"the checkpoint {path} is damaged ({error}); restore it from a copy, or start a new run."
        ) from error


def _paths(folder: Path) -> dict[int, Path]:
    """Round -> complete checkpoint, oldest first; one whose removal was interrupted has no state.json."""
    return {
        int(path.name.removeprefix("round-")): path
        for path in sorted(folder.glob("round-??????"))
        if (path / "state.json").exists()
    }


def _remove(path: Path) -> None:
    """Remove a checkpoint, state.json first, so that a kill in between does not leave one that looks complete."""
    (path / "state.json").unlink(missing_ok=True)
    for entry in path.iterdir():
        entry.unlink()
    path.rmdir()
