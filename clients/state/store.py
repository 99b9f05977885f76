"""Client state between rounds, on the client's own disk, versioned by round.

    <folder>/<partition>/round-000007.safetensors    its metadata hold the client, the round, and the run's id

[Note: versions of client state] in fedsign.records explains why a client may have to go back.  A version is written
before the reply is sent, because the client does not know the server's checkpoints; it counts only once the server asks
for it.  `clients.state.cache` is the counterpart in the server's own process.
"""

from pathlib import Path

from safetensors import SafetensorError

from fedsign.errors import ClientStateError
from fedsign.records import Tensors, TrainRequest
from fedsign.storage.checkpoints import load_tensors, save_tensors
from fedsign.storage.disk import remove_partials, replace_file


class ClientStore:
    """The states of the partitions that a process serves; `run` is the run's id, if there is one."""

    def __init__(self, folder: Path, *, run: str = "") -> None:
        self.folder, self._run = folder, run

    def load(self, request: TrainRequest) -> Tensors | None:
        """Load the version that the server asks for; None for version 0, the initial state.

        Removes versions before the request's round that nobody can ask for any more.  Later ones stay, since they may
        belong to a newer request that another process has answered.

        Raises:
            ClientStateError: the version is missing or damaged.
        """
        partition, version = request.partition, request.state_version
        remove_partials(self._path(partition, version).parent)
        versions = self.versions(partition)
        if version and version not in versions:
            raise ClientStateError(
                f"the state of partition {partition} after round {version} is not in {self.folder} (there: "
                f"{versions or 'none'}): this client's disk was cleared or the run was moved without it; "
                "start a new run."
            )
        for old in versions:
            if old < request.round and old not in request.needed_versions:
                self._path(partition, old).unlink()
        return self.read(partition, version) if version else None

    def read(self, partition: int, version: int) -> Tensors:
        """Read an available version.

        Raises:
            ClientStateError: it is damaged.
        """
        try:
            return load_tensors(self._path(partition, version), facts=self._facts(partition, version))
        except (OSError, SafetensorError) as error:
            raise ClientStateError(
                f"the state of partition {partition} in {self._path(partition, version)} is damaged ({error}); "
                "restore the file "
                "from a copy, or start a new run."
            ) from error

    def save(self, partition: int, version: int, state: Tensors) -> None:
        """Write the state after round `version`, atomically."""
        facts = self._facts(partition, version)
        replace_file(self._path(partition, version), lambda partial: save_tensors(partial, state, facts))

    def versions(self, partition: int) -> list[int]:
        """The available versions, oldest first."""
        folder = self._path(partition, 0).parent
        return sorted(int(path.stem.removeprefix("round-")) for path in folder.glob("round-*.safetensors"))

    def _facts(self, partition: int, version: int) -> dict[str, str]:
        """By which a file of another client, round, or run is recognized."""
        return {"client": str(partition), "round": str(version), **({"run": self._run} if self._run else {})}

    def _path(self, partition: int, version: int) -> Path:
        return self.folder / f"{partition:06d}" / f"round-{version:06d}.safetensors"
