"""The steps of a learning on disk, until all are taken: the same learning goes on with them after an interruption.

FOLDER/steps.json   the steps so far, and the optimizer's state after them; removed at the end
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedsign.bilevel.unroll import Tree
from fedsign.errors import ResultsError
from fedsign.storage.digests import read_json, sealed_json
from fedsign.storage.disk import replace_file

Step = dict[str, Any]
FILE = "steps.json"
_SEALED = b'{\n "digest'


class KeptSteps:
    """The steps of an earlier call with the same digest; none if there was none, or if the file is damaged.

    Raises:
        ResultsError: a file of the user has the name.
    """

    def __init__(self, folder: Path, digest: str) -> None:
        self._path, self._digest = folder / FILE, digest
        self.steps: list[Step] = []
        self._state: Mapping[str, Any] = {}
        self._began_at = time.monotonic()
        try:
            content, _ = read_json(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            if self._path.exists() and not _SEALED.startswith(self._path.read_bytes()[: len(_SEALED)]):
                raise ResultsError(f"{self._path} is not FedSign's; move it away, or give another folder.") from error
            return
        if content.get("digest_of") == digest:
            self.steps, self._state = content["steps"], content["state"]
            self._began_at -= content["seconds"]

    @property
    def seconds(self) -> float:
        """Seconds of this call and of those before it."""
        return time.monotonic() - self._began_at

    def state(self, like: Tree) -> Tree:
        """The optimizer's state after the steps; that of the beginning if there are none."""
        return {
            name: torch.tensor(self._state[name], dtype=each.dtype) if self._state else each
            for name, each in like.items()
        }

    def write(self, steps: Sequence[Step], state: Tree) -> None:
        """Replace the file."""
        values = {name: each.tolist() for name, each in state.items()}
        facts = {"digest_of": self._digest, "seconds": self.seconds}
        text = sealed_json({**facts, "steps": list(steps), "state": values})
        # not durable: after a power failure, steps are taken again
        replace_file(self._path, lambda partial: partial.write_text(text, encoding="utf-8"), durable=False)

    def remove(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)
