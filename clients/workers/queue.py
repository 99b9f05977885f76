"""Schedule the units of a round: longest first, small clients several at a time, within a window.

A unit is what is trained together: a client, or a chunk on the cohort path.  The server aggregates replies in the order
of the requests, so a unit trained long before its turn leaves a reply waiting in memory.  Therefore a unit may start
only within a window of `window` units after the first unfinished one.

A job is a list of units handed out at once.  Jobs shrink toward the end of a round (guided self-scheduling,
Polychronopoulos and Kuck 1987), so that workers finish together with few messages.  Scheduling never changes results.
"""

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from fedsign.records import TrainRequest

_JOBS_PER_WORKER = 4  # into which the remaining work is divided to get the next job's size
_LARGEST_JOB = 64  # clients


@dataclass(slots=True, eq=False)
class Unit:
    """Requests that are trained together; `cost` is in samples."""

    requests: list[TrainRequest]
    cost: int
    position: int = 0
    attempts: int = 0  # failed ones, in which the worker died
    answered: set[int] = field(default_factory=set)  # partitions


class Queue:
    """The units of a round."""

    def __init__(self, units: Iterable[Unit], *, window: int, num_workers: int) -> None:
        self._units = list(units)
        for position, unit in enumerate(self._units):
            unit.position = position
        self._window, self._num_workers = window, num_workers
        self._cost_left = sum(unit.cost for unit in self._units)
        self._is_done = [False] * len(self._units)
        self._first = self._num_admitted = 0
        self._admitted: list[tuple[int, int]] = []  # a heap of (-cost, position)
        self._again: deque[Unit] = deque()
        self._admit()

    def __len__(self) -> int:
        """The number of units that may start now."""
        return len(self._admitted) + len(self._again)

    def take(self) -> list[Unit]:
        """The next job, empty if no unit may start; a returned unit is a separate job."""
        if self._again:
            return [self._again.popleft()]
        job: list[Unit] = []
        cost, num_clients, fair = 0, 0, self._cost_left / (_JOBS_PER_WORKER * self._num_workers)
        while self._admitted:
            unit = self._units[self._admitted[0][1]]
            num_clients += len(unit.requests)
            if job and (cost + unit.cost > fair or num_clients > _LARGEST_JOB):
                break
            heapq.heappop(self._admitted)
            job.append(unit)
            cost += unit.cost
        self._cost_left -= cost
        return job

    def give_back(self, unit: Unit) -> None:
        """Return a unit that was not finished."""
        self._again.append(unit)

    def done(self, unit: Unit) -> None:
        """Mark a unit as done, which advances the window."""
        self._is_done[unit.position] = True
        # units finish out of order; the window starts at the first one still missing
        while self._first < len(self._units) and self._is_done[self._first]:
            self._first += 1
        self._admit()

    def _admit(self) -> None:
        while self._num_admitted < min(len(self._units), self._first + self._window):
            # ties: first come
            heapq.heappush(self._admitted, (-self._units[self._num_admitted].cost, self._num_admitted))
            self._num_admitted += 1
