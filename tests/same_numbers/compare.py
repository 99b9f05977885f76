"""The results of a configuration as tensors and numbers, and the differences between two of them.

All tensors are compared by name, type, shape and bits: those of the final model, of checkpoints (served and evaluated
model, strategy state, versions), of client states, and of files that commands write. So are all numbers of JSON files.
Texts are not compared, so that messages may change; nor are the entries of `NOT_COMPARED`.
"""

import json
import math
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, load_file, save_file
from torch import Tensor

from fedsign.former_names import RECORDS

Number = int | float | None  # bool is an int; None is JSON's null, as which a diverged loss is written

TIMES = frozenset({"timings.jsonl", "time_s", "seconds"})  # files and keys whose numbers are times
NOT_COMPARED = TIMES | {"environment.json", "inputs", "format", "kept"}
ALIASES: dict[str, str] = dict(RECORDS)  # a file, key or tensor as it was named once -> as it is named today


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Tensors and numbers by path: `run/checkpoints/round-000002/served.safetensors/0.weight`,
    `run/rounds.jsonl/0/loss`.
    """

    tensors: dict[str, Tensor]
    numbers: dict[str, Number]

    @classmethod
    def of(cls, folder: Path) -> "Snapshot":
        """All that lies in a folder."""
        found = cls({}, {})
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            place = path.relative_to(folder).parts
            if NOT_COMPARED.isdisjoint(place):
                found._add(path, place)
        return found

    @classmethod
    def read(cls, folder: Path) -> "Snapshot":
        """What `write` wrote."""
        return cls(load_file(folder / "tensors.safetensors"), json.loads((folder / "numbers.json").read_text()))

    def write(self, folder: Path) -> None:
        """Both as files, for `read`."""
        save_file(self.tensors, folder / "tensors.safetensors")
        (folder / "numbers.json").write_text(json.dumps(self.numbers))

    def _add(self, path: Path, place: tuple[str, ...]) -> None:
        match path.suffix:
            case ".safetensors":
                self._add_tensors(place, load_file(path))
            case ".sqlite":
                for partition, version, state in _states(path):  # as if they lay in files, as with other engines
                    self._add_tensors((*place[:-1], f"{partition:06d}", f"round-{version:06d}.safetensors"), state)
            case ".json":
                self.numbers.update(_numbers(json.loads(path.read_text(encoding="utf-8")), place))
            case ".jsonl":
                lines = path.read_text(encoding="utf-8").splitlines()
                self.numbers.update(_numbers([json.loads(line) for line in lines], place))

    def _add_tensors(self, place: tuple[str, ...], tensors: dict[str, Tensor]) -> None:
        self.tensors.update({_name((*place, name)): tensor for name, tensor in tensors.items()})


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs, and by how much the most: relative to the larger number, or to a tensor's largest element."""

    first: str
    count: int
    largest: float


def difference(base: Snapshot, other: Snapshot) -> Difference | None:
    """Where `other` is not what `base` is; None where they are the same to the last bit."""
    found = [*_compared(base.numbers, other.numbers, _number), *_compared(base.tensors, other.tensors, _tensor)]
    if not found:
        return None
    return Difference(first=found[0][0], count=len(found), largest=max(deviation for _, deviation in found))


def _compared(base: dict[str, Any], other: dict[str, Any], compare: Any) -> Iterator[tuple[str, float]]:
    """(what, relative deviation) of each that differs; infinite where there is no measure for it."""
    for name in [*base, *(name for name in other if name not in base)]:
        if name not in other:
            yield f"{name} is missing", math.inf
        elif name not in base:
            yield f"{name} is new", math.inf
        elif (found := compare(base[name], other[name])) is not None:
            yield f"{name}: {found[0]}", found[1]


def _number(base: Number, other: Number) -> tuple[str, float] | None:
    if repr(base) == repr(other):
        return None
    if not isinstance(base, float) or not isinstance(other, float) or not math.isfinite(base - other):
        return f"{base!r} -> {other!r}", math.inf
    return f"{base!r} -> {other!r}", abs(base - other) / (max(abs(base), abs(other)) or 1.0)


def _tensor(base: Tensor, other: Tensor) -> tuple[str, float] | None:
    if (base.dtype, base.shape) != (other.dtype, other.shape):
        return f"{base.dtype} {[*base.shape]} -> {other.dtype} {[*other.shape]}", math.inf
    differs = base.flatten().view(torch.uint8) != other.flatten().view(torch.uint8)
    if not differs.any():
        return None
    said = f"{int(differs.view(-1, base.element_size()).any(1).sum())} of {base.numel()} elements"
    if not base.is_floating_point():
        return said, math.inf
    one, two = base.double(), other.double()
    deviation = ((one - two).abs().max() / torch.stack([one, two]).abs().max().clamp(min=1e-300)).item()
    return said, deviation if math.isfinite(deviation) else math.inf


def _numbers(value: Any, place: tuple[str, ...]) -> Iterator[tuple[str, Number]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        if str(key) not in NOT_COMPARED:
            yield from _numbers(inner, (*place, str(key)))
    if value is None or isinstance(value, int | float):
        yield _name(place), value


def _name(place: tuple[str, ...]) -> str:
    return "/".join(ALIASES.get(part, part) for part in place)


def _states(path: Path) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
    """See clients.state.database: a state is cut into pieces."""
    connection = sqlite3.connect(path)
    rows = connection.execute(
        "SELECT partition, version, data FROM states ORDER BY partition, version, piece"
    ).fetchall()
    connection.close()
    pieces: dict[tuple[int, int], bytes] = {}
    for partition, version, data in rows:
        pieces[partition, version] = pieces.get((partition, version), b"") + data
    for (partition, version), data in pieces.items():
        yield partition, version, load(data)
