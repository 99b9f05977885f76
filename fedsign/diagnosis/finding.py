"""A finding: what looks wrong with a run, and what to set."""

import logging
from dataclasses import asdict, dataclass
from typing import Literal

from fedsign.storage.results import Record

FILE = "findings.jsonl"
_log = logging.getLogger("fedsign")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A likely mistake. `round` is 0 for a finding about the data, else the round that revealed it."""

    rule: str  # a short name, such as "feature-scales"
    source: Literal["data", "run"]
    message: str  # a clause with the numbers, without a period
    remedy: str  # an imperative clause: what to set
    round: int = 0

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}."

    @property
    def record(self) -> Record:
        """The finding as a record of findings.jsonl."""
        return asdict(self)

    def warn(self) -> None:
        """Log the finding."""
        _log.warning("%s%s", f"round {self.round}: " if self.round else "", self)
