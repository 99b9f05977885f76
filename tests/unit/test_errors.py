"""A shortage of memory is told from other errors, whoever reports it."""

import errno
import mmap
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsign.data.base import Dataset
from fedsign.errors import DataError, DiskFullError, MemoryShortageError, ReplyError, shortage_of
from fedsign.records import failure_of
from fedsign.storage.disk import disk_full
from simulations import compare, load_run, run
from simulations.callbacks.base import Callback

PETABYTE = 2**50


def raising(error: Exception) -> Callable[[], object]:
    def call() -> object:
        raise error

    return call


def as_cause() -> object:
    try:
        return np.empty(PETABYTE)
    except MemoryError as error:
        raise DataError("the table cannot be read; correct the file.") from error


SHORTAGES: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.empty(PETABYTE),
    "NumPy": lambda: np.empty(PETABYTE),
    "Python": lambda: bytearray(PETABYTE),
    "a map": lambda: mmap.mmap(-1, PETABYTE),
    "the cause of another error": as_cause,
    "a fork": raising(OSError(errno.ENOMEM, "Cannot allocate memory")),
    "a library": raising(ImportError("libx.so: failed to map segment from shared object")),
    "a GPU": raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total ...")),
    "a kernel of a GPU": raising(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")),
}


@pytest.mark.parametrize("whose", SHORTAGES)
def test_a_shortage_of_memory_is_one_sentence_with_a_remedy(whose: str) -> None:
    with pytest.raises((MemoryError, OSError, RuntimeError, ImportError, DataError)) as caught:
        SHORTAGES[whose]()
    found = shortage_of(caught.value)
    assert isinstance(found, MemoryShortageError) and "'fedsign estimate memory'" in str(found)
    assert ("of the GPU" in str(found)) == ("GPU" in whose)
    failure = failure_of(3, caught.value)  # what a client answers
    assert failure.reason == str(found) and "Traceback" in failure.details
    assert shortage_of(found) is found


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/data/x"), "full: /data/x could not be written; free"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "full; free"),
        (sqlite3.OperationalError("database or disk is full"), "full; free"),
    ],
)
def test_a_full_disk_is_one_sentence_wherever_it_is(error: Exception, what: str) -> None:
    found = shortage_of(error)
    assert isinstance(found, DiskFullError) and f"the disk is {what} some space" in str(found)
    assert failure_of(3, error).reason == str(found)
    known = disk_full(Path("/data/x"))
    known.__cause__ = error
    assert shortage_of(known) is known


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EACCES, "Permission denied"),
        RuntimeError("the size of tensor a (3) must match"),
        ValueError("out of memory lanes"),
        ReplyError("the reply says that memory ran out of memory"),
    ],
    ids=repr,
)
def test_other_errors_are_none(error: Exception) -> None:
    assert shortage_of(error) is None


def huge(seed: int) -> Dataset:
    return np.empty(PETABYTE)  # type: ignore[return-value]


class Greedy(Callback):
    """Asks for too much once a round has ended."""

    def on_round(self, record: Any) -> None:
        bytearray(PETABYTE)


def test_python_raises_a_shortage_of_memory_as_the_sentence_of_the_command(tmp_path: Path) -> None:
    said = "'fedsign estimate memory' says"
    with pytest.raises(MemoryShortageError, match=said):
        run({"data": {"name": f"{__name__}:huge"}, "results": {"root": str(tmp_path)}})
    with pytest.raises(MemoryShortageError, match=said):
        compare({"data": {"name": f"{__name__}:huge"}}, seeds=1, out=tmp_path / "compared")
    small = {"rounds": 1, "callbacks": [], "model": {"name": "linear"}, "results": {"root": str(tmp_path)}}
    with pytest.raises(MemoryShortageError, match=said) as caught:
        run(small, callbacks=[Greedy()])
    (path,) = tmp_path.glob("*/*/outcome.json")
    assert load_run(path.parent).outcome["error"] == str(caught.value)
