"""The ledger of a run's releases, `privacy.jsonl`, and the budget that they spend.

[Note: rounds that are run again] A record is durable before its release is used, and resuming never drops it.  It
identifies releases by tags; equal tags mean equal content (`fedsign.privacy.secret`).  If a round that is repeated
after a kill releases the same content, that is one release.  If the content differs, because another client failed or
training is not deterministic, it is a further release and counts.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

from fedsign.privacy.accounting import Accountant
from fedsign.storage.results import RunFolder, keep_records, read_records

NAME = "privacy.jsonl"


class Budget:
    """The ledger of one run.  A *holder* is the owner of a budget: all clients together, or a single client."""

    def __init__(self, folder: Path, accountant: Accountant, *, round: int) -> None:
        """Open the ledger; `round` is the last completed round."""
        self._path, self._accountant = folder / NAME, accountant
        self._tags: dict[int, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        self._spent: Counter[str] = Counter()  # by completed rounds
        self._all: Counter[str] = Counter()  # also by rounds that were dropped
        self._read(round)

    def _read(self, round: int) -> None:
        keep_records(self._path)  # drops the partial line that a kill may have left
        for record in read_records(self._path):
            self._note(record["round"], record["released"])
        for number in [each for each in self._tags if each <= round]:
            self._count(number)

    def spend(self, round: int, released: Mapping[str, str], metrics: Mapping[str, float]) -> float:
        """Record a round's releases durably; return epsilon of the rounds so far."""
        self._note(round, released)
        self._count(round)
        # rounds compose per holder, so the holder with the most releases determines epsilon
        spent = self._accountant.epsilon(max(self._spent.values(), default=0))
        # durable before the caller uses the release: a kill in between must not lose it
        RunFolder(self._path.parent).append(
            NAME, {"round": round, "released": released, **metrics, "epsilon": self.total}, durable=True
        )
        return spent

    @property
    def total(self) -> float:
        """Epsilon of all releases, including those of rounds that were dropped by resuming."""
        return self._accountant.epsilon(max(self._all.values(), default=0))

    def _note(self, round: int, released: Mapping[str, str]) -> None:
        for holder, tag in released.items():
            tags = self._tags[round][holder]
            self._all[holder] += tag not in tags  # equal tags: the same release again
            tags.add(tag)

    def _count(self, round: int) -> None:
        self._spent.update({holder: len(tags) for holder, tags in self._tags.pop(round, {}).items()})
