"""Verification of files on disk against their digests."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from safetensors import SafetensorError

from clients.state.database import StateDatabase
from fedsign.errors import FedSignError, ResultsError
from fedsign.storage import checkpoints
from fedsign.storage.disk import PARTIAL
from fedsign.storage.results import RunFolder, damaged, read_json, read_records


def verify(path: Path) -> Iterator[tuple[Path, str]]:
    """Yield each file that a run, a comparison or a client reads back, and its damage, empty if it is whole.

    Raises:
        ResultsError: there is no such file.
    """
    has_files = False
    for file in sorted(path.rglob("*")):
        # by name first: rounds.jsonl and state.json say more than their suffix
        read = _READERS.get(file.name, _READERS.get(file.suffix))
        inside = file.relative_to(path).parts
        left = any(part.startswith("damaged-") or part.endswith(PARTIAL) for part in inside)  # partial, or set aside
        if read is None or not file.is_file() or left:
            continue
        has_files = True
        try:
            read(file)
        except FedSignError as error:
            yield file, str(error)
        else:
            yield file, ""
    if not has_files:
        raise ResultsError(
            f"{path} holds nothing to verify; give the folder of a run, of a comparison or of clients' states."
        )


def _read_tensors(file: Path) -> None:
    try:
        checkpoints.load_tensors(file)
    except (OSError, SafetensorError) as error:
        raise damaged(file, error) from error


def _read_database(file: Path) -> None:
    with closing(StateDatabase(file.parent)) as database:
        database.check()


def _read_rounds(file: Path) -> None:
    """Check a run's records, up to what its newest checkpoint refers to."""
    run = RunFolder(file.parent)
    # later records may be torn: a resumed run drops them
    last = checkpoints.load_latest(run.checkpoints)
    run.check_records({} if last is None else last.records)


_READERS: dict[str, Callable[[Path], object]] = {
    "config.toml": lambda file: RunFolder(file.parent).config_toml,
    "state.json": lambda file: checkpoints.load(file.parent),
    "rounds.jsonl": _read_rounds,
    "states.sqlite": _read_database,
    ".json": read_json,
    ".jsonl": read_records,
    ".safetensors": _read_tensors,
}
