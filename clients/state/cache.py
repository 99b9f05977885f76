"""The states of a run's clients in the process that plays it: in memory, and on disk when a checkpoint counts on them.

[Note: when states reach the disk] A version has to be on disk once a checkpoint counts on it (see
[Note: versions of client state] in fedsign.records): a killed server asks for nothing else when it is resumed.
So states stay in memory until a checkpoint is about to be put in place.  `commit`, which comes right before, writes
the versions that the server counts on now, in one transaction, and forgets the others that were never written:
nobody can ask for them, since older checkpoints count on versions that older commits wrote.  A kill before the
transaction's end leaves what the last checkpoint knows; one after it leaves newer versions too, which do not count.

Memory is a budget.  The clients that were longest not asked for leave first; what was not written yet goes to the disk,
in the same transaction, so that a kill takes it back.  A kept state is a copy: an objective may change the tensors it
gave or was given.

[Note: the digest of the states] That of a checkpoint is the sum of the digests of the states that it counts on, as far as they lie in
the database, so that a commit costs no more than what changed since the one before, however many clients there are.
"""

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import torch

from clients.state.database import StateDatabase
from clients.state.store import ClientStore
from fedsign.errors import ClientStateError
from fedsign.records import Tensors, TrainRequest

_TENSOR_BYTES = 640  # what a tensor takes besides its numbers


class StateCache(ClientStore):
    """Of all partitions; for the one process that plays a run.

    A run that kept a file for each state, as other engines do, is gone on with: what is not here is looked for there.
    """

    def __init__(self, folder: Path, *, budget_bytes: int) -> None:
        super().__init__(folder)
        self._database = StateDatabase(folder)
        self._budget_bytes = budget_bytes
        # partition -> version -> state; first: oldest use
        self._held: OrderedDict[int, dict[int, Tensors]] = OrderedDict()
        self._unwritten: set[tuple[int, int]] = set()  # (partition, version)
        self._changed: set[int] = set()  # partitions, since the last commit
        self._counted: dict[int, int] = {}  # partition -> digest of the state that the last checkpoint counts on
        self._sum = 0  # of those
        self.held_bytes = 0

    def resume(self, versions: Mapping[int, int], digest: str) -> None:
        """A checkpoint counts on these versions; see [Note: the digest of the states].

        Raises:
            ClientStateError: they are not those that were here when it was written.
        """
        found = self._database.digests()
        self._counted = {partition: found.get((partition, version), 0) for partition, version in versions.items()}
        self._sum = sum(self._counted.values())
        if digest and digest != self._digest:
            raise ClientStateError(
                f"the clients' states in {self._database.path} are not those that the checkpoint counts on: some are damaged, "
                "missing or of another run; restore the file from a copy, or start a new run."
            )

    def load(self, request: TrainRequest) -> Tensors | None:
        """See ClientStore."""
        partition, version = request.partition, request.state_version
        for old in [held for held in self._held.get(partition, ()) if held < request.round]:
            if old not in request.needed_versions:
                self._forget(partition, old)
        self._database.remove(partition, before=request.round, but=request.needed_versions)
        if not version:
            return None
        state = self._held.get(partition, {}).get(version)
        if state is None:
            state = self._database.read(partition, version)
            if state is None:
                return super().load(request)
            self._hold(partition, version, state)
        else:
            self._held.move_to_end(partition)
        return _copy(state)

    def save(self, partition: int, version: int, state: Tensors) -> None:
        """Take the state after round `version` into memory; see [Note: when states reach the disk]."""
        self._unwritten.add((partition, version))
        self._changed.add(partition)
        self._hold(partition, version, _copy(state))

    def versions(self, partition: int) -> list[int]:
        """The versions that are here, oldest first."""
        held = self._held.get(partition, {})
        return sorted({*held, *self._database.versions(partition), *super().versions(partition)})

    def commit(self, versions: Mapping[int, int]) -> str:
        """Write what the server counts on (partition -> version), before a checkpoint is put in place; returns its digest."""
        for partition, version in sorted(self._unwritten):
            if versions.get(partition) == version:
                self._write(partition, version)
            else:
                self._forget(partition, version)
        for partition in self._changed:
            found = self._database.digests(partition).get((partition, versions.get(partition, 0)), 0)
            self._sum += found - self._counted.get(partition, 0)
            self._counted[partition] = found
        self._changed.clear()
        self._database.commit()
        return self._digest

    @property
    def _digest(self) -> str:
        return f"{self._sum % 2**128:032x}"

    def close(self) -> None:
        """Close the file when the run ends, however it ends."""
        self._database.close()

    def _hold(self, partition: int, version: int, state: Tensors) -> None:
        held = self._held.setdefault(partition, {})
        self.held_bytes += _bytes_of(state) - _bytes_of(held.get(version, {}))
        held[version] = state
        self._held.move_to_end(partition)
        while self.held_bytes > self._budget_bytes:
            oldest = next(iter(self._held))
            for each in list(self._held[oldest]):
                if (oldest, each) in self._unwritten:
                    self._write(oldest, each)
                self._forget(oldest, each)

    def _write(self, partition: int, version: int) -> None:
        self._database.write(partition, version, self._held[partition][version])
        self._unwritten.discard((partition, version))

    def _forget(self, partition: int, version: int) -> None:
        self._unwritten.discard((partition, version))
        self.held_bytes -= _bytes_of(self._held[partition].pop(version))
        if not self._held[partition]:
            del self._held[partition]


def _copy(state: Tensors) -> Tensors:
    """In memory as it would come from the disk: on the CPU, contiguous, ordered by name."""
    return {name: state[name].detach().cpu().clone(memory_format=torch.contiguous_format) for name in sorted(state)}


def _bytes_of(state: Tensors) -> int:
    return sum(tensor.nbytes + _TENSOR_BYTES for tensor in state.values())
