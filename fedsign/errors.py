"""The errors that FedSign raises on purpose.

Every message says what was given, what was expected and how to fix it.  `exit_code` is the exit status of the
command line: 2 for a mistake that the user can correct before a run, 1 for a run that failed.
"""

import difflib
import errno
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
OUT_OF_MEMORY = "perhaps out of memory (see 'fedsign estimate memory')"  # of a process that was killed
_NO_MEMORY = (  # what torch, CUDA, C++, and the loader of libraries say
    "out of memory",
    "allocate memory",
    "not enough memory",
    "bad_alloc",
    "ALLOC_FAILED",
    "failed to map segment",
    "can't start new thread",
)


class FedSignError(Exception):
    """Base class of all errors that FedSign raises on purpose."""

    exit_code = 1


class ConfigError(FedSignError):
    """The configuration, or a name in it, is invalid."""

    exit_code = 2


class UnknownKeysError(ConfigError):
    """Keys that no table has; `hints` maps their paths to what may have been meant, such as ` Did you mean 'lr'?`."""

    def __init__(self, hints: Mapping[str, str]) -> None:
        self.hints = dict(hints)
        (first, hint), *others = hints.items()
        listed = ", ".join(f"'{path}' ({hint.strip()})" for path, hint in hints.items())
        super().__init__(f"unknown keys {listed}" if others else f"unknown key '{first}'.{hint}")


class DataError(FedSignError):
    """A data set or a partition cannot be built from the given data."""

    exit_code = 2


class ResultsError(FedSignError):
    """A run directory is missing, damaged or in the way."""

    exit_code = 2


class ResumeError(ResultsError):
    """A run cannot be resumed: it is damaged, or what resuming needs was not kept."""


class DiskFullError(FedSignError):
    """The disk is full; what was written is intact, and the run can be resumed."""


class MemoryShortageError(FedSignError):
    """Memory ran out, of this machine, of a limit such as `ulimit -v`, or of a GPU."""


class CodecError(FedSignError):
    """A tensor has an encoding that this version cannot read or write."""


class ReplyError(FedSignError):
    """A client's reply does not match the request."""


class ClientStateError(FedSignError):
    """The state on a client's disk is not the version that the server expects."""


class IncompleteModelError(FedSignError):
    """A client lacks tensors that the request leaves out; the server resends the whole model."""


class OtherBuildError(IncompleteModelError):
    """A client's own build of the model has other frozen tensors than the server's; the server sends them from then on.

    For example, the file of `model.start` is missing at its site, which builds the model without.
    """


class LateError(FedSignError):
    """A client trained past the round's deadline."""


class RankError(FedSignError):
    """One of the ranks that train a client together has died."""


class DivergedError(FedSignError):
    """The ranks that train a client together ran different collectives."""


class JoinError(FedSignError):
    """A rendezvous failed: a host was not authenticated, or is not needed."""


class StepError(FedSignError):
    """The steps of an optimizer were called out of order."""


class RoundError(FedSignError):
    """A round ended with too few usable replies."""


class EngineError(FedSignError):
    """An engine (Ray, SuperLink) could not start, or stopped responding."""


class LinkLostError(EngineError):
    """The connection to the SuperLink is lost; the run can be resumed once it is back."""


def shortage_of(error: BaseException) -> MemoryShortageError | DiskFullError | None:
    """The error of a shortage of memory or disk, if that is what an error or one of its causes is."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, MemoryShortageError | DiskFullError):
        if getattr(found, "errno", None) in DISK_FULL or str(found) == "database or disk is full":
            what = f": {path} could not be written" if (path := getattr(found, "filename", None)) else ""
            return DiskFullError(f"the disk is full{what}; free some space, then start again or go on with --resume.")
        is_own = isinstance(found, FedSignError) or not isinstance(found, OSError | RuntimeError | ImportError)
        says_so = not is_own and any(words in str(found) for words in _NO_MEMORY)
        if says_so or isinstance(found, MemoryError) or getattr(found, "errno", None) == errno.ENOMEM:
            whose = "the GPU" if "CUDA" in str(found) else "this machine, or its limit (ulimit -v),"
            return MemoryShortageError(
                f"the memory of {whose} does not suffice; 'fedsign estimate memory' says what an experiment needs: "
                "lower client.batch_size, client.chunk, engine.workers, or the size of model and data."
            )
        found = found.__cause__
    return found


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise a shortage of memory or disk as the error that says what to do; also a decorator."""
    try:
        yield
    except Exception as error:
        if (shortage := shortage_of(error)) and shortage is not error:
            raise shortage from error
        raise


def nearest(given: str, candidates: Iterable[str]) -> str:
    """` Did you mean 'x'?`, or nothing if no candidate is close.

    >>> nearest("fedsing", ["fedavg", "fedsign"])
    " Did you mean 'fedsign'?"
    """
    close = difflib.get_close_matches(given, list(candidates), n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""
