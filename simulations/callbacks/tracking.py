"""What all trackers share: each record of a run is sent to an external service exactly once.

[Note: what a tracker has] trackers.json in the run's folder stores the tracker's run id and the last round sent.
`begin` corrects this by what the tracker itself reports: a killed process may have sent more rounds, and a library may
have lost some. A resumed run replays the rounds after its checkpoint to the same bits. Rounds that the tracker has are
not sent again. Rounds that it lacks (its server was down, or the tracker was enabled only now) are sent before the
first new one. Resuming a run, even a finished one, therefore sends whatever is missing.

A tracker that raises does not stop training. It is skipped until the end of the run, because an unreachable server may
cost minutes in every round; then it is tried once more.
"""

import json
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from fedsign.config import ExperimentConfig
from fedsign.extras import require
from fedsign.storage import results
from fedsign.storage.results import Record, RunFolder, read_json
from simulations.callbacks.base import Callback
from simulations.frames import numbers_of

STATE_FILE = "trackers.json"
_LONGEST = 300  # characters kept of a library's error message
_log = logging.getLogger("fedsign")

Setting = str | int | float | bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Earlier:
    """What earlier starts of a run left in trackers.json."""

    id: str
    last_sent: int  # the last round handed to the library
    last_ended: int  # the last round of the last start that ended cleanly; 0 if none did


class Tracker(Callback):
    """Base class of trackers. Subclasses define how to begin a run, log a round and end the run."""

    name: ClassVar[str]  # the registered name
    label: ClassVar[str]  # the name in messages
    library: ClassVar[str] = ""  # the required library, installed by the extra of this name

    def __init__(self) -> None:
        needed = self.library
        self._library: Any = require(needed, extra=needed, feature=f"callback '{self.name}'") if needed else None
        self._unsent: list[Record] = []
        self.last_sent = 0  # a round; 0 before the first
        self._is_open = self._is_down = False

    @abstractmethod
    def begin(self, earlier: "Earlier | None", *, last_recorded: int) -> tuple[str, int]:
        """Open a new run, or resume the earlier one.

        Args:
            earlier: what earlier starts of the same run recorded, if any.
            last_recorded: the last round on record; later rounds will be run.

        Returns:
            The tracker's run id, and the last round that it already has; see [Note: what a tracker has].
        """

    @abstractmethod
    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of one round."""

    @abstractmethod
    def end(self, outcome: Record, final: Mapping[str, float]) -> None:
        """Log the outcome and the means over the last rounds, and close."""

    def on_start(self, folder: RunFolder, config: ExperimentConfig, records: list[Record]) -> None:
        """Begin, and send the missing rounds of earlier starts."""
        self.folder, self.config = folder, config
        self._unsent = list(records)
        self._attempt(self._send)

    def on_round(self, record: Record) -> None:
        """Send a round."""
        self._unsent.append(record)
        if not self._is_down:
            self._attempt(self._send)

    def on_end(self, outcome: Record) -> None:
        """Send the missing rounds and the outcome."""

        def finish() -> None:
            self._send()
            self.end(outcome, self._final())
            self._last_ended = self.last_sent
            self._remember()

        if self._attempt(finish) and self._is_down:
            _log.warning("%s answers again and has all rounds now.", self.label)

    def _attempt(self, action: Callable[[], None]) -> bool:
        """Return whether the action succeeded; report the first failure in one line."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - no error of a tracking library may end the training
            if not self._is_down:
                reason = next(iter(str(error).strip().splitlines()), "no message")[:_LONGEST]
                _log.warning(
                    "%s failed (%s: %s); the run goes on without it, and it is tried once more at the end. All figures "
                    "are in %s; 'fedsign run --resume %s' sends what is missing.",
                    self.label,
                    type(error).__name__,
                    reason,
                    self.folder.path / "rounds.jsonl",
                    self.folder.path,
                )
            self._is_down = True
            return False
        return True

    def _send(self) -> None:
        """Send the pending rounds, oldest first."""
        if not self._is_open:
            state = _read_state(self.folder).get(self.name)
            earlier = Earlier(**state) if state else None
            last_recorded = self._unsent[-1]["round"] if self._unsent else 0
            self._id, self.last_sent = self.begin(earlier, last_recorded=last_recorded)
            self._last_ended = earlier.last_ended if earlier else 0
            self._is_open = True
            self._remember()
        try:
            while self._unsent:
                if self._unsent[0]["round"] > self.last_sent:
                    self.log(self._unsent[0]["round"], numbers_of(self._unsent[0]))
                    self.last_sent = self._unsent[0]["round"]
                del self._unsent[0]
        # also if a round could not be sent: the ones before it were
        finally:
            self._remember()

    def _remember(self) -> None:
        state = Earlier(id=self._id, last_sent=self.last_sent, last_ended=self._last_ended)
        self.folder.write_json(STATE_FILE, {**_read_state(self.folder), self.name: asdict(state)})

    def _final(self) -> dict[str, float]:
        """Return `final_accuracy` and the like, as the command prints them, without diverged values."""
        records = self.folder.rounds()
        names = (*(metric.rpartition(":")[2] for metric in self.config.metrics), "loss")
        values = {f"final_{name}": results.final_value(records, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


def settings_of(config: ExperimentConfig) -> dict[str, Setting]:
    """Flatten the complete configuration: `{"client.lr": 0.05, ...}`; a list becomes JSON text."""
    return dict(_leaves(config.model_dump(mode="json")))


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Setting]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value if isinstance(value, Setting) else json.dumps(value)


def _read_state(folder: RunFolder) -> dict[str, Any]:
    path = folder.path / STATE_FILE
    return read_json(path) if path.exists() else {}
