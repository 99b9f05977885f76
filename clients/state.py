"""What a client keeps between rounds, on its own disk, versioned by round.

    <folder>/<partition>/round-000007.safetensors

Versions and why a client may have to go back: [Note: versions of client state] in fedsign.records.  A
version is written before the reply is sent; it counts only once the server asks for it.
"""

from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file

from fedsign.checkpoints import save_tensors
from fedsign.disk import remove_partials, replace_file
from fedsign.errors import ClientStateError
from fedsign.records import Tensors


@dataclass(frozen=True, slots=True)
class ClientStore:
    """The states of all partitions that a process serves."""

    folder: Path

    def load(self, partition: int, *, version: int, durable_round: int) -> Tensors | None:
        """Roll back to `version` and return it; None for version 0, the initial state.

        Newer versions are removed.  Of the older ones those stay that a server resumed from
        `durable_round` or later could ask for.

        Raises:
            ClientStateError: the version is not here.
        """
        remove_partials(self._path(partition, version).parent)
        versions = self.versions(partition)
        if version and version not in versions:
            raise ClientStateError(
                f"the state of partition {partition} after round {version} is not in {self.folder} (there: "
                f"{versions or 'none'}): this client's disk was cleared or the run was moved without it; start a new run."
            )
        before = [old for old in versions if old <= durable_round]
        for old in versions:
            if old > version or (before and old < before[-1]):
                self._path(partition, old).unlink()
        return load_file(self._path(partition, version)) if version else None

    def save(self, partition: int, version: int, state: Tensors) -> None:
        """Write the state after round `version`, in one step."""
        replace_file(self._path(partition, version), lambda partial: save_tensors(partial, state))

    def versions(self, partition: int) -> list[int]:
        """The versions that are here, oldest first."""
        folder = self._path(partition, 0).parent
        return sorted(int(path.stem.removeprefix("round-")) for path in folder.glob("round-*.safetensors"))

    def _path(self, partition: int, version: int) -> Path:
        return self.folder / f"{partition:06d}" / f"round-{version:06d}.safetensors"
