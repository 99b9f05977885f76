"""The way of a round: the files and functions that it walks through, counted by profiling.

    python -m benchmarks.walk               FedSign in process
    python -m benchmarks.walk --messages    the same over Flower messages
    python -m benchmarks.walk --peer pfl    pfl-research, where it is installed beside FedSign

What counts, for us and for peers alike:

- the second round: from the end of the first, callbacks included, to its own end, in the main thread;
- files: those of the project whose code runs;
- functions: those of these files that are entered, each once, whoever calls it.  Comprehensions and lambdas have no name and do
  not count; neither do methods that dataclasses generate.

Ours is the default experiment in process, on the sequential path: FedSign, an MLP on digits, evaluation at the server, progress bar and
report, and a checkpoint in every round.  pfl-research plays the work W1, as in the benchmarks: FederatedAveraging and central
evaluation, without checkpoints and reports.

The tree shows who calls whom, in the order of the first call; calls of one function by one visit of its caller are one line.
"""

import argparse
import importlib.util
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

from flwr.app import Message

from benchmarks.export import export
from benchmarks.players.ours import Clock
from benchmarks.players.stopwatch import Stopwatch
from benchmarks.works.w1 import W1
from fedsign.registry import PACKAGES
from simulations import run
from strategies.fedsign import FedSign

_ROOT = Path(__file__).parents[1]


class FedSignOverMessages(FedSign):
    """A method of Flower's interface that a strategy overrides makes the round use messages."""

    def configure_train(self, *arguments: Any) -> Iterable[Message]:
        """The same messages."""
        return super().configure_train(*arguments)


@dataclass(slots=True)
class Visit:
    """A function, and what it calls."""

    name: str
    count: int = 0
    calls: dict[CodeType, "Visit"] = field(default_factory=dict)

    def lines(self, depth: int = 0) -> Iterator[str]:
        """The tree of what it calls."""
        for visit in self.calls.values():
            yield "  " * depth + visit.name + (f" x{visit.count}" if visit.count > 1 else "")
            yield from visit.lines(depth + 1)


class Walk(Stopwatch):
    """Instead of the time, what the second round walks through of the files in some folders."""

    def __init__(self, *folders: Path) -> None:
        super().__init__()
        self.functions: dict[str, set[str]] = defaultdict(set)  # file -> names
        self.tree = Visit("")
        self._folders = tuple(f"{folder}/" for folder in folders)
        self._stack: list[tuple[FrameType | None, Visit]] = [(None, self.tree)]
        self._num_marks = 0

    def mark(self) -> None:
        """A round has ended, or, the first time, begins."""
        self._num_marks += 1
        sys.setprofile(self._note if self._num_marks == 2 else None)

    @property
    def num_functions(self) -> int:
        """How many functions were entered."""
        return sum(map(len, self.functions.values()))

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "return" and frame is self._stack[-1][0]:
            self._stack.pop()
        if event != "call" or not code.co_filename.startswith(self._folders):
            return
        file = str(Path(code.co_filename).relative_to(Path(self._folders[0]).parent))
        names = self.functions[file]
        if code.co_name.startswith("<"):
            return
        names.add(code.co_qualname)
        visit = self._stack[-1][1].calls.setdefault(code, Visit(f"{code.co_qualname} ({file})"))
        visit.count += 1
        self._stack.append((frame, visit))


def walk_ours(*, messages: bool = False) -> Walk:
    """The second round of FedSign."""
    walk = Walk(*(_ROOT / package for package in PACKAGES))
    with tempfile.TemporaryDirectory() as root:
        experiment: dict[str, Any] = {"rounds": 2, "results": {"root": root, "checkpoint_every": 1}}
        if messages:
            experiment["strategy"] = {"name": f"{__name__}:{FedSignOverMessages.__name__}"}
        run(experiment, callbacks=[Clock(walk)])
    return walk


def walk_pfl() -> Walk:
    """The second round of pfl-research."""
    spec = importlib.util.find_spec("pfl")
    if spec is None or spec.origin is None:
        raise SystemExit(
            "pfl-research is not installed here; install the packages of benchmarks/peers/pfl*.txt beside FedSign."
        )
    from benchmarks.players import pfl_research

    walk = Walk(Path(spec.origin).parent)
    with tempfile.TemporaryDirectory() as folder:
        work = export(W1, Path(folder))
        pfl_research.play(
            SimpleNamespace(work=work, device="cpu", settings={}, out=Path(folder) / "result"), watch=walk
        )
    return walk


def main() -> None:
    """Print the walk."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--messages", action="store_true", help="over Flower messages")
    which.add_argument("--peer", choices=["pfl"], help="of a peer instead")
    given = parser.parse_args()
    walk = walk_pfl() if given.peer else walk_ours(messages=given.messages)
    print(*walk.tree.lines(), sep="\n")
    print(f"{len(walk.functions)} files, {walk.num_functions} functions")


if __name__ == "__main__":
    main()
