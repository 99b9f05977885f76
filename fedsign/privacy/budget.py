"""What a run has released, in `privacy.jsonl`, and so what it has spent.

[Note: rounds that are played again] A line is on the disk before what it tells of goes anywhere, and no resuming drops it.  It names
what was released by a tag: equal tags, equal content (`fedsign.privacy.secret`).  A round that is played again after a kill and
gives the same is the same release.  One that gives something else, because a client failed this time or training is not
repeatable, is one more release, and counts.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

from fedsign.privacy.accounting import Accountant
from fedsign.storage.results import RunFolder, keep_lines, read_lines

NAME = "privacy.jsonl"


class Budget:
    """The account of one run.  A *holder* is whose budget is spent by a release: all clients' together, or one client's."""

    def __init__(self, folder: Path, accountant: Accountant, *, round: int) -> None:
        """`round`: the last one that counts as played."""
        self._path, self._accountant = folder / NAME, accountant
        self._tags: dict[int, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        self._spent: Counter[str] = Counter()  # by the rounds that count as played
        self._all: Counter[str] = Counter()
        self._read(round)

    def _read(self, round: int) -> None:
        keep_lines(self._path)  # a kill may have left half a line at the end
        for line in read_lines(self._path):
            self._note(line["round"], line["released"])
        for played in [each for each in self._tags if each <= round]:
            self._count(played)

    def spend(self, round: int, released: Mapping[str, str], figures: Mapping[str, float]) -> float:
        """Write down what a round released, for good; returns epsilon of the rounds up to this one."""
        self._note(round, released)
        self._count(round)
        spent = self._accountant.epsilon(max(self._spent.values(), default=0))
        RunFolder(self._path.parent).append(
            NAME, {"round": round, "released": released, **figures, "epsilon": self.total}, durable=True
        )
        return spent

    @property
    def total(self) -> float:
        """Epsilon of all that was ever released, also in rounds that were dropped and not played again."""
        return self._accountant.epsilon(max(self._all.values(), default=0))

    def _note(self, round: int, released: Mapping[str, str]) -> None:
        for holder, tag in released.items():
            tags = self._tags[round][holder]
            self._all[holder] += tag not in tags
            tags.add(tag)

    def _count(self, round: int) -> None:
        self._spent.update({holder: len(tags) for holder, tags in self._tags.pop(round, {}).items()})
