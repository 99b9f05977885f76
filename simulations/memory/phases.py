"""What an account consists of: processes, the phases of each, and the parts of each phase."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from fedsign.errors import ConfigError
from fedsign.memory.estimate import ACTIVATIONS
from fedsign.memory.step import GRADIENTS, STATES

PROGRAM, SHARED, MODEL, GATHERED, COPY, STATE = "program", "shared", "model", "gathered", "copy", "state"
SUMS, HEAP = "sums", "heap"
PARTS = (PROGRAM, SHARED, MODEL, GATHERED, COPY, GRADIENTS, STATES, ACTIVATIONS, STATE, SUMS, HEAP)
BUILD, TRAIN, REPLY, AGGREGATE, EVALUATE, NORM = "build", "train", "reply", "aggregate", "evaluate", "norm"
SERVER, WORKER, RANK, GPU = "server", "worker", "rank", "GPU"

# Measured on the CPU with glibc (benchmarks/alone/memory.py).
_HOLES = 0.15  # freed memory that the allocator cannot use again, relative to what comes and goes in smaller blocks
RETURNED = 2**25  # bytes; larger blocks go back to the system: glibc's largest threshold


class UnaccountedError(ConfigError):
    """The memory of a run can only be measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """What exists at the largest moment of a phase, in bytes by part."""

    name: str
    parts: Mapping[str, int]

    @classmethod
    def of(cls, name: str, stays: Mapping[str, int], *, holes: int = 0, small: float = 1.0, **moving: int) -> Self:
        """A phase with what `stays` through all phases of the process, what comes and goes, and further `holes`.

        `small` is the share of it in blocks that do not go back to the system; activations are taken as such.
        """
        freed = sum(size * (1 if part == ACTIVATIONS else small) for part, size in moving.items())
        return cls.exact(name, {**stays, **moving, HEAP: int(_HOLES * freed) + holes})

    @classmethod
    def exact(cls, name: str, given: Mapping[str, int]) -> Self:
        """A phase with these parts, and no others."""
        return cls(name=name, parts={part: given.get(part, 0) for part in PARTS})

    @property
    def total_bytes(self) -> int:
        """The sum."""
        return sum(self.parts.values())

    @property
    def own_bytes(self) -> int:
        """The sum without memory that processes share."""
        return self.total_bytes - self.parts[SHARED]


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """The memory of a process by phase; of several alike, that of the one that needs most."""

    name: str
    phases: tuple[Phase, ...]
    count: int = 1
    measured_bytes: int | None = None

    @property
    def peak(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.total_bytes)

    def as_json(self) -> dict[str, Any]:
        """The JSON representation."""
        facts: dict[str, Any] = {"peak_bytes": self.peak.total_bytes, "peak_in": self.peak.name}
        if self.measured_bytes is not None:
            facts["measured_bytes"] = self.measured_bytes
        return {**facts, "phases": {phase.name: dict(phase.parts) for phase in self.phases}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """The memory of a run on this machine: the server's process, and those that train."""

    title: str
    num_parameters: int  # frozen ones included
    num_frozen: int
    num_trained: int  # by a client in a round
    processes: tuple[Process, ...]  # the server's first, which maps all that is shared

    @property
    def peak_bytes(self) -> int:
        """The most that all processes take together, in which what they share counts once."""
        server, *others = self.processes
        return server.peak.total_bytes + sum(
            process.count * max(phase.own_bytes for phase in process.phases) for process in others
        )

    def measured(self, peaks: Mapping[str, int]) -> "Account":
        """The same with measured bytes, by the name of the process."""
        processes = (replace(each, measured_bytes=peaks.get(each.name)) for each in self.processes)
        return replace(self, processes=tuple(processes))

    def as_json(self) -> dict[str, Any]:
        """The JSON representation; that of a single process has its phases."""
        facts = {
            "title": self.title,
            "num_parameters": self.num_parameters,
            "num_frozen": self.num_frozen,
            "num_trained": self.num_trained,
        }
        if len(self.processes) == 1:
            return {**facts, **self.processes[0].as_json()}
        processes = [{"name": each.name, "count": each.count, **each.as_json()} for each in self.processes]
        return {**facts, "peak_bytes": self.peak_bytes, "processes": processes}
