"""The client states of a run in the process that runs it: in memory, and on disk once a checkpoint needs them.

[Note: when states reach the disk] A version must be on disk once a checkpoint refers to it (see [Note: versions of
client state] in fedsign.records); a resumed server asks for no others.  So states stay in memory until right before a
checkpoint is put in place.  `commit` then writes the versions that the server refers to now, in one transaction, and
drops other unwritten ones: nobody can ask for them, since older checkpoints refer to versions from older commits.  A
kill before the end of the transaction leaves what the last checkpoint needs; a kill after it also leaves newer
versions, which are ignored.

Memory has a budget.  The least recently used clients are evicted first; their unwritten states go to disk in the same
transaction, so a kill undoes that.  States are stored as copies, because an objective may modify its tensors.

[Note: the digest of the states] A checkpoint's digest is the sum of the digests of the states in the database that it
refers to.  A sum can be updated, so a commit costs only what has changed, whatever the number of clients.
"""

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import torch

from clients.state.database import StateDatabase
from clients.state.store import ClientStore
from fedsign.errors import ClientStateError
from fedsign.records import Tensors, TrainRequest

_TENSOR_BYTES = 640  # overhead of a tensor object


class StateCache(ClientStore):
    """The store of all partitions, for a run in a single process.

    It can continue a run that stored one file per state, as other engines do: missing states are looked up there.
    """

    def __init__(self, folder: Path, *, budget_bytes: int = 0, run: str = "") -> None:
        super().__init__(folder, run=run)
        self._database = StateDatabase(folder)
        self._budget_bytes = budget_bytes
        # partition -> version -> state, least recently used first
        self._held: OrderedDict[int, dict[int, Tensors]] = OrderedDict()
        self._unwritten: set[tuple[int, int]] = set()  # (partition, version)
        self._changed: set[int] = set()  # partitions changed since the last commit
        self._counted: dict[int, int] = {}  # partition -> digest of the state in the last checkpoint
        self._sum = 0  # of these digests
        self.held_bytes = 0

    def resume(self, versions: Mapping[int, int], digest: str) -> None:
        """Continue from a checkpoint that refers to these versions; see [Note: the digest of the states].

        Raises:
            ClientStateError: the states differ from those at the time of the checkpoint.
        """
        digests = self._database.digests()
        # 0 for a state in a file of its own, which this digest does not cover
        self._counted = {partition: digests.get((partition, version), 0) for partition, version in versions.items()}
        self._sum = sum(self._counted.values())
        if digest and digest != self._digest:
            raise ClientStateError(
                f"the clients' states in {self._database.path} are not those that the checkpoint counts on: "
                "some are damaged, "
                "missing or of another run; restore the file from a copy, or start a new run."
            )

    def check(self, versions: Mapping[int, int], digest: str) -> None:
        """Read all states that a checkpoint refers to; see `resume`.

        Raises:
            ClientStateError: one is missing, damaged, or not of this client and run.
        """
        self.resume(versions, digest)
        for partition, version in versions.items():
            if self._database.read(partition, version) is None:
                self.read(partition, version)

    def load(self, request: TrainRequest) -> Tensors | None:
        """The state for a request, from memory or disk; also removes versions that nobody can ask for any more."""
        partition, version = request.partition, request.state_version
        for old in [held for held in self._held.get(partition, ()) if held < request.round]:
            if old not in request.needed_versions:
                self._forget(partition, old)
        # in the transaction of the next commit: a kill before that undoes the removal
        self._database.remove(partition, before=request.round, but=request.needed_versions)
        if not version:
            return None
        state = self._held.get(partition, {}).get(version)
        if state is None:
            state = self._database.read(partition, version)
            if state is None:
                return super().load(request)  # a file of a run that began on another engine
            self._hold(partition, version, state)
        else:
            self._held.move_to_end(partition)
        return _copy(state)

    def save(self, partition: int, version: int, state: Tensors) -> None:
        """Store the state after round `version` in memory; see [Note: when states reach the disk]."""
        self._unwritten.add((partition, version))
        self._changed.add(partition)
        self._hold(partition, version, _copy(state))

    def versions(self, partition: int) -> list[int]:
        """The available versions, oldest first."""
        held = self._held.get(partition, {})
        return sorted({*held, *self._database.versions(partition), *super().versions(partition)})

    def commit(self, versions: Mapping[int, int]) -> str:
        """Write the versions that the next checkpoint refers to (partition -> version); return their digest."""
        for partition, version in sorted(self._unwritten):  # a copy, since both branches remove from the set
            if versions.get(partition) == version:
                self._write(partition, version)
            else:
                self._forget(partition, version)
        for partition in self._changed:  # update the sum by differences, see [Note: the digest of the states]
            digest = self._database.digests(partition).get((partition, versions.get(partition, 0)), 0)
            self._sum += digest - self._counted.get(partition, 0)
            self._counted[partition] = digest
        self._changed.clear()
        self._database.commit()
        return self._digest

    @property
    def _digest(self) -> str:
        return f"{self._sum % 2**128:032x}"  # 32 hex digits, however many states are summed

    def close(self) -> None:
        """Close the database at the end of the run."""
        self._database.close()

    def _hold(self, partition: int, version: int, state: Tensors) -> None:
        held = self._held.setdefault(partition, {})
        self.held_bytes += _bytes_of(state) - _bytes_of(held.get(version, {}))
        held[version] = state
        self._held.move_to_end(partition)
        while self.held_bytes > self._budget_bytes:
            oldest = next(iter(self._held))  # even the state just added, if it exceeds the budget alone
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
    """Copy a state as if loaded from disk: on the CPU, contiguous, sorted by name."""
    return {name: state[name].detach().cpu().clone(memory_format=torch.contiguous_format) for name in sorted(state)}


def _bytes_of(state: Tensors) -> int:
    return sum(tensor.nbytes + _TENSOR_BYTES for tensor in state.values())
