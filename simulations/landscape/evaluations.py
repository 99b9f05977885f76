"""Evaluate the points of a landscape: shown on the way, and kept on disk until all are there.

FOLDER/points-<digest>.jsonl   values so far, a chained record for each stack of points; removed at the end. The digest
                               covers the model and the request, so that only the same analysis goes on with them.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsign.landscape.landscape import Landscape, Values
from fedsign.storage.digests import chain_of, chained, digest_of, unchained
from fedsign.storage.disk import append_bytes, disk_errors, exclusive
from simulations.progress import display


@contextmanager
def evaluating(
    landscape: Landscape,
    num_points: int,
    *,
    keep: Path | None,
    request: Mapping[str, Any],
    models: Sequence[Tensor] = (),
) -> Iterator[None]:
    """Show and keep the values of the points that the block evaluates; take those that an earlier call has kept.

    Args:
        landscape: what is evaluated.
        num_points: number of points.
        keep: the folder; None keeps nothing.
        request: what, besides the models, decides which points these are.
        models: parameters that do, beside the landscape's center.

    Raises:
        ResultsError: another process makes the same analysis.
    """
    with ExitStack() as stack:
        known, write = deque[Values](), _nowhere
        if keep is not None:
            file = keep / f"points-{_digest(request, [landscape.center, *models])}.jsonl"
            lock = file.with_suffix(".lock")
            with disk_errors(keep):
                keep.mkdir(parents=True, exist_ok=True)
            stack.enter_context(exclusive(lock, name=f"this analysis in {keep}"))
            stack.callback(lock.unlink, missing_ok=True)
            known, write = deque(_read(file)), _Writer(file)
        done = sum(len(each.loss) for each in known)
        shown = stack.enter_context(display(num_points, start=done, unit="point"))

        def around(evaluate: Callable[[], Values]) -> Values:
            nonlocal done
            values = known.popleft() if known else None
            if values is None:
                values = evaluate()
                done += len(values.loss)
                name, of = values.main()
                shown.show(done, {name: float(of[-1])})
            write(values)
            return values

        landscape.around = around
        yield
        if keep is not None:
            file.unlink(missing_ok=True)


def _nowhere(values: Values) -> None:
    """Keep nothing."""


class _Writer:
    """Appends values to a file; those that are there already are passed over."""

    def __init__(self, path: Path) -> None:
        self._path, self._chain, self._num_there = path, "", len(_read(path))

    def __call__(self, values: Values) -> None:
        error = None if values.error is None else values.error.tolist()
        line = chained(json.dumps({"loss": values.loss.tolist(), "error": error}), self._chain)
        self._chain = chain_of(line)
        if self._num_there:
            self._num_there -= 1
            return
        with disk_errors(self._path):
            # not durable: after a power failure, points are evaluated again
            append_bytes(self._path, f"{line}\n".encode(), durable=False)


def _read(path: Path) -> list[Values]:
    """The intact values; what follows a damaged line is cut off."""
    if not path.exists():
        return []
    found = list[Values]()
    *lines, _ = path.read_bytes().split(b"\n")  # what follows the last line is cut by a kill, or empty
    with suppress(ValueError):
        for plain in unchained(line.decode(errors="replace") for line in lines):
            content = json.loads(plain)
            error = None if content["error"] is None else np.array(content["error"])
            found.append(Values(np.array(content["loss"]), error))
    with path.open("r+b") as file:
        file.truncate(sum(len(line) + 1 for line in lines[: len(found)]))
    return found


def _digest(request: Mapping[str, Any], models: Sequence[Tensor]) -> str:
    # torch: other versions draw other noise, and round in other ways
    text = json.dumps({**request, "torch": torch.__version__}, sort_keys=True, default=str)
    return digest_of(text.encode(), *(model.detach().cpu().contiguous().numpy().tobytes() for model in models))[:10]
