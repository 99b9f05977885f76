"""What a client keeps between rounds, on its own disk, versioned by round.

    <folder>/<partition>/round-000007.safetensors

Versions and why a client may have to go back: [Note: versions of client state] in fedsign.records.  A
version is written before the reply is sent, since a client does not know of the server's checkpoints; it
counts only once the server asks for it.  In the server's own process: `clients.state.cache`.
"""

from pathlib import Path

from safetensors import SafetensorError

from fedsign.errors import ClientStateError
from fedsign.records import Tensors, TrainRequest
from fedsign.storage.checkpoints import load_tensors, save_tensors
from fedsign.storage.disk import remove_partials, replace_file


class ClientStore:
    """The states of all partitions that a process serves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, request: TrainRequest) -> Tensors | None:
        """The state the server counts on; None for version 0, the initial state.

        Versions before the request's round that nobody can ask for any more are removed.  Later ones are
        left alone: they may belong to a younger request that another process has answered.

        Raises:
            ClientStateError: the version is not here, or damaged.
        """
        partition, version = request.partition, request.state_version
        remove_partials(self._path(partition, version).parent)
        versions = self.versions(partition)
        if version and version not in versions:
            raise ClientStateError(
                f"the state of partition {partition} after round {version} is not in {self.folder} (there: "
                f"{versions or 'none'}): this client's disk was cleared or the run was moved without it; start a new run."
            )
        for old in versions:
            if old < request.round and old not in request.needed_versions:
                self._path(partition, old).unlink()
        return self.read(partition, version) if version else None

    def read(self, partition: int, version: int) -> Tensors:
        """One version, which is here.

        Raises:
            ClientStateError: it is damaged.
        """
        try:
            return load_tensors(self._path(partition, version))
        except (OSError, SafetensorError) as error:
            raise ClientStateError(
                f"the state of partition {partition} in {self._path(partition, version)} is damaged ({error}); restore the file "
                "from a copy, or start a new run."
            ) from error

    def save(self, partition: int, version: int, state: Tensors) -> None:
        """Write the state after round `version`, in one step."""
        replace_file(self._path(partition, version), lambda partial: save_tensors(partial, state))

    def versions(self, partition: int) -> list[int]:
        """The versions that are here, oldest first."""
        folder = self._path(partition, 0).parent
        return sorted(int(path.stem.removeprefix("round-")) for path in folder.glob("round-*.safetensors"))

    def _path(self, partition: int, version: int) -> Path:
        return self.folder / f"{partition:06d}" / f"round-{version:06d}.safetensors"
