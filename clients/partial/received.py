"""A disk cache of the last model that a node's clients received, to complete requests that omit tensors.

    <folder>/received/<digest>.safetensors

Each tensor is a file named after the digest of its values (`fedsign.partial.updates`), so unchanged tensors are not
written again, and all clients on the same disk share them.  Only the last model is kept: a tensor that a request omits
has not changed since, so it belongs to the last model as well.

As with any cache, a tensor that cannot be written here is simply sent again.
"""

import logging
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from secrets import token_hex

from safetensors import SafetensorError
from torch import Tensor

from clients.middleware import ClientMiddleware
from fedsign.errors import FedSignError, IncompleteModelError
from fedsign.records import TrainRequest
from fedsign.storage.checkpoints import load_tensors, save_tensors
from fedsign.storage.disk import PARTIAL, disk_errors, sync
from fedsign.traits import OptimizerTraits
from fedsign.workload import Workload

_TENSOR, _SUFFIX = "tensor", ".safetensors"
_ABANDONED_S = 3600.0  # no writer takes this long for one file
_log = logging.getLogger("fedsign")


class ReceivedTensors(ClientMiddleware):
    """Middleware that completes requests from the cache in `folder`, and fills the cache."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "received"

    def concerns(self, request: TrainRequest) -> bool:
        """Requests that may omit tensors."""
        return bool(request.digests)

    def before(self, request: TrainRequest) -> TrainRequest:
        """Complete the request's model; cached tensors are memory-mapped.

        Raises:
            IncompleteModelError: an omitted tensor is not in the cache.
        """
        digests = request.digests
        left_out = [name for name in digests if name not in request.tensors]
        here = {name: tensor for name in left_out if (tensor := self._read(digests[name])) is not None}
        if lacking := [name for name in left_out if name not in here]:
            raise IncompleteModelError(
                f"client {request.partition} lacks {len(lacking)} of the {len(left_out)} tensors that the request of "
                "round "
                f"{request.round} leaves out (first: '{lacking[0]}'): its disk was cleared, "
                "or another node served it before; it "
                "is sent the whole model."
            )
        try:
            for name, tensor in request.tensors.items():
                self._write(digests[name], tensor)
            self._remove_all_but(set(digests.values()))  # last: if a write fails, the previous model stays whole
        except (FedSignError, OSError, SafetensorError) as error:
            _log.warning("what client %d received is not kept, and will be sent again: %s", request.partition, error)
        whole = here | request.tensors
        return replace(request, tensors={name: whole[name] for name in digests})  # in the model's order

    def _path(self, digest: str) -> Path:
        return self._folder / (digest + _SUFFIX)

    def _read(self, digest: str) -> Tensor | None:
        """A tensor, or None if missing.  Damaged files are removed, so that they are written again."""
        try:
            return load_tensors(self._path(digest))[_TENSOR]
        except (SafetensorError, KeyError):
            self._path(digest).unlink(missing_ok=True)
        except OSError:
            pass
        return None

    def _write(self, digest: str, tensor: Tensor) -> None:
        """Write a tensor atomically; other processes may write the same one."""
        path = self._path(digest)
        if path.exists():  # named by its content, so there is nothing to write
            return
        partial = path.with_name(f"{path.name}.{token_hex(8)}{PARTIAL}")  # unique per writer
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                save_tensors(partial, {_TENSOR: tensor})
                sync(partial)
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)

    def _remove_all_but(self, digests: Collection[str]) -> None:
        """Remove tensors of earlier models, and leftovers of killed processes."""
        for path in self._folder.glob("*" + _SUFFIX):
            if path.name.removesuffix(_SUFFIX) not in digests:
                path.unlink(missing_ok=True)
        for path in self._folder.glob("*" + PARTIAL):
            with suppress(FileNotFoundError):  # renamed by its writer
                if time.time() - path.stat().st_mtime > _ABANDONED_S:
                    path.unlink()


def middleware_of(workload: Workload, *, in_process: bool, folder: Path) -> list[ClientMiddleware]:
    """The extension point `client_middleware`; in process, or with full updates, requests omit nothing."""
    leaves_out = not in_process and OptimizerTraits.of(workload.config.client.optimizer.name).trains_part
    return [ReceivedTensors(folder)] if leaves_out else []
