"""What is to be trained next: the longest first, small clients several at a time, and no further ahead than may be.

A unit is what is trained together: a client, or on the cohort path a chunk.  Replies are taken in by the server in the
order of the requests, so a unit that is trained long before its turn leaves a reply that lies and waits.  Hence
the window: a unit may begin once it is among the first `window` ones from the first one that is not yet done.

A job is what is handed out at once.  Jobs become smaller toward the end of a round (guided self-scheduling,
Polychronopoulos and Kuck 1987), so that the workers finish together at the cost of few messages.  None of this
changes a result.
"""

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from fedsign.records import TrainRequest

_JOBS_PER_WORKER = 4  # that what is left would make at the present size
_LARGEST_JOB = 64  # clients


@dataclass(slots=True, eq=False)
class Unit:
    """Requests that are trained together; `cost` in samples."""

    requests: list[TrainRequest]
    cost: int
    position: int = 0
    attempts: int = 0  # that ended with the worker's death
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
        """How many units may begin now."""
        return len(self._admitted) + len(self._again)

    def take(self) -> list[Unit]:
        """The next job, nothing if none may begin; a unit that was given back is a job of its own."""
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
        """It was not trained to the end."""
        self._again.append(unit)

    def done(self, unit: Unit) -> None:
        """Its replies were passed on."""
        self._is_done[unit.position] = True
        while self._first < len(self._units) and self._is_done[self._first]:
            self._first += 1
        self._admit()

    def _admit(self) -> None:
        while self._num_admitted < min(len(self._units), self._first + self._window):
            heapq.heappush(self._admitted, (-self._units[self._num_admitted].cost, self._num_admitted))
            self._num_admitted += 1
