"""Progress of a federation's runs, written by their ServerApps for `fedsign deploy status`."""

import logging
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsign.errors import FedSignError
from fedsign.storage import digests
from fedsign.storage.disk import is_held, replace_file
from fedsign.storage.results import RunFolder, read_json
from simulations.deployment.federation import Federation

if TYPE_CHECKING:
    from fedsign.flower.pulling import Requests

_EVERY_S = 0.5  # seconds between writes during a round; its end is written at once
_log = logging.getLogger("fedsign")


class Progress:
    """Writes the progress of one run, notified of pending replies; see `Watch` in fedsign.flower.pulling."""

    def __init__(self, federation: Federation, name: str, run: Path, *, num_rounds: int, model_bytes: int = 0) -> None:
        """`name` identifies the run across resumes."""
        from fedsign.flower.pulling import Requests  # and torch, which the SuperLink does without

        self._file = _folder(federation) / f"{name}.json"
        self._facts: dict[str, Any] = {
            "run": str(run.resolve()),
            "num_rounds": num_rounds,
            "model_bytes": model_bytes,
        }
        self.remarks: Mapping[int, str] = {}  # about the versions of sites that answered the roll call, by partition
        self._requests = Requests("roll call", 0, ())
        # wall clock, not monotonic: another process, `deploy status`, compares it with its own
        self._since = self._written_at = time.time()
        self._write([])

    def __call__(self, requests: "Requests", waiting: Sequence[int]) -> None:
        """Write the progress, at most once per interval."""
        now = time.time()
        if requests is not self._requests:
            self._requests, self._since = requests, now
        if not waiting or now - self._written_at > _EVERY_S:
            self._written_at = now
            self._write(waiting)

    def _write(self, waiting: Sequence[int]) -> None:
        content = {
            "round": self._requests.round,
            "what": self._requests.kind,
            "since": self._since,
            "waiting": [*waiting],
        }
        content["remarks"] = {str(partition): remark for partition, remark in self.remarks.items()}
        text = digests.sealed_json(self._facts | content)
        # durable=False: it is for looking at only, and an fsync twice a second would slow the round down
        replace_file(self._file, lambda partial: partial.write_text(text, encoding="utf-8"), durable=False)


@dataclass(frozen=True, slots=True)
class RunProgress:
    """A run's last written progress. `waiting`: partitions yet to reply; `remarks`: about their versions."""

    file: Path
    run: RunFolder
    num_rounds: int
    round: int
    what: str
    since: float
    waiting: Sequence[int]
    remarks: Mapping[str, str]
    model_bytes: int = 0

    @property
    def is_running(self) -> bool:
        """Whether the command that executes the run is alive."""
        # the kernel releases the lock however the command dies, unlike a pid file
        return is_held(self.run.path / "lock")

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to resume."""
        try:
            # someone may have deleted the run's folder: there is nothing to resume then
            return not self.run.path.exists() or (not self.is_running and self.run.outcome["status"] == "finished")
        except FedSignError:
            return False  # the outcome cannot be read

    @property
    def how_to_go_on(self) -> str:
        """The command that resumes the run."""
        return f"fedsign run --resume {shlex.quote(str(self.run.path))}"


def runs_of(federation: Federation) -> Iterator[RunProgress]:
    """Return active and interrupted runs. A file damaged by a power failure is skipped with a warning."""
    for file in sorted(_folder(federation).glob("*.json")):
        try:
            # written without fsync: after a power failure it may be empty
            content = read_json(file)
            yield RunProgress(file, RunFolder(Path(content.pop("run"))), **content)
        except (FedSignError, TypeError, KeyError) as error:
            _log.warning("how far a run is cannot be read: %s", error)


def forget_over(federation: Federation) -> None:
    """Delete the progress files of completed runs."""
    for run in runs_of(federation):
        if run.is_over:
            run.file.unlink(missing_ok=True)


def _folder(federation: Federation) -> Path:
    return federation.server / "state" / "runs"
