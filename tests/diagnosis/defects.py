"""A clean table and clean images, and the same with a seeded defect."""

import re
from collections.abc import Callable

import torch
from torch import Tensor

from fedsign.data.base import Dataset, LazySamples, Samples

Parts = tuple[Tensor, Tensor, Tensor, Tensor]  # features and targets, of training and test
NUM_FEATURES, NUM_CLASSES = 12, 3


def table(seed: int, *, defect: str = "", regression: bool = False, follows: bool = False) -> Dataset:
    """600 training and 120 test samples with normal features, one of them a rare indicator; classes or real targets.

    With `follows`, what the remedy of the defect's finding says was done to the samples.
    """
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(720, NUM_FEATURES, generator=random)
    x[:, 11] = (torch.rand(720, generator=random) < 0.01).float()
    x[0, 11] = 1.0
    y = x[:, :NUM_CLASSES].sum(dim=1) if regression else x[:, :NUM_CLASSES].argmax(dim=1)
    parts = TABLES[defect](x[:600], y[:600], x[600:], y[600:])
    if follows:
        parts = REMEDIES[defect](*parts)
    num_classes = int(max(parts[1].max(), parts[3].max())) + 1
    return _dataset(parts, 0 if regression else num_classes + (defect == "nobody's class" and not follows))


def images(seed: int, *, defect: str = "", lazy: bool = False, follows: bool = False) -> Dataset:
    """200 training and 40 test images [3, 8, 8] in [0, 1], with a black border; 2 % of them are gray."""
    random = torch.Generator().manual_seed(seed)
    x = torch.rand(240, 3, 8, 8, generator=random)
    x[:, :, 0] = 0.0
    y = torch.randint(2, (240,), generator=random)
    x[::50] = x[::50, :1].expand(-1, 3, -1, -1)
    parts = IMAGES[defect](x[:200], y[:200], x[200:], y[200:])
    if follows:
        parts = REMEDIES[defect](*parts)
    if defect == "flat":
        parts = (parts[0].flatten(1), parts[1], parts[2].flatten(1), parts[3])
    whole = _dataset(parts, 2)
    if not lazy:
        return whole
    train, test = (
        LazySamples(source=_Rows(part.features, broken=defect == "broken"), targets=part.targets)
        for part in (whole.train, whole.test)
    )
    return Dataset(train=train, test=test, class_names=whole.class_names)


class _Rows:
    """Features one by one."""

    def __init__(self, rows: Tensor, *, broken: bool) -> None:
        self._rows, self._is_broken = rows, broken

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int, /) -> Tensor:
        if self._is_broken and index:
            raise OSError("image file is truncated")
        return self._rows[index]


def _dataset(parts: Parts, num_classes: int) -> Dataset:
    train, test = (Samples(features=x.contiguous(), targets=y) for x, y in (parts[:2], parts[2:]))
    return Dataset(train=train, test=test, class_names=tuple(str(label) for label in range(num_classes)))


def _scaled(factors: Tensor | float) -> Callable[..., Parts]:
    return lambda x, y, u, v: (x * factors, y, u * factors, v)


def _with(column: int, values: Callable[[Tensor], Tensor | float]) -> Callable[..., Parts]:
    """Replace a column."""

    def change(x: Tensor, y: Tensor, u: Tensor, v: Tensor) -> Parts:
        for part in (x, u):
            part[:, column] = values(part)
        return x, y, u, v

    return change


def _without(x: Tensor, column: int) -> Tensor:
    return torch.cat([x[:, :column], x[:, column + 1 :]], dim=1)


def _gray(x: Tensor, y: Tensor, u: Tensor, v: Tensor) -> Parts:
    x[:60] = x[:60, :1].expand(-1, 3, -1, -1)
    return x, y, u, v


def _blank(x: Tensor, y: Tensor, u: Tensor, v: Tensor) -> Parts:
    """Three images of one color."""
    x[:3] = x[:3, :, 1:2, :1]
    return x, y, u, v


_KEPT: Callable[..., Parts] = lambda *parts: parts  # noqa: E731
TABLES: dict[str, Callable[..., Parts]] = {
    "": _KEPT,
    "scales": _scaled(10.0 ** torch.arange(NUM_FEATURES).remainder(4)),
    "large": _scaled(50.0),
    "tiny": _scaled(1e-3),
    "constant": _with(4, lambda x: 0.7),
    "repeated feature": _with(5, lambda x: x[:, 2]),
    "copied samples": lambda x, y, u, v: (torch.cat([x, x[:40]]), torch.cat([y, y[:40]]), u, v),
    "leak": lambda x, y, u, v: (x, y, torch.cat([u, x[:20]]), torch.cat([v, y[:20]])),
    "nobody's class": _KEPT,
    "class of the test": lambda x, y, u, v: (x[y > 0], y[y > 0] - 1, u, v.where(v > 0, 3) - 1),
    "from 1": lambda x, y, u, v: (x, y + 1, u, v + 1),
    "one class": lambda x, y, u, v: (x, y * 0 + 1, u, v),
    "one class in the test": lambda x, y, u, v: (x, y, u, v * 0),
    "one target": lambda x, y, u, v: (x, y * 0 + 2, u, v),
    "large targets": lambda x, y, u, v: (x, y * 3 + 20, u, v),
    "rare class": lambda x, y, u, v: (x, (torch.arange(len(y)) < 6).long(), u, v.clamp(max=1)),
    "few values": lambda x, y, u, v: (x.sign(), y, u.sign(), v),
    "heavy tail": _with(7, lambda x: (2.5 * x[:, 7]).exp() / 20),
}
REMEDIES: dict[str, Callable[..., Parts]] = {  # of findings that name no setting
    "constant": lambda x, y, u, v: (_without(x, 4), y, _without(u, 4), v),
    "repeated feature": lambda x, y, u, v: (_without(x, 5), y, _without(u, 5), v),
    "copied samples": lambda x, y, u, v: (x[:600], y[:600], u, v),
    "leak": lambda x, y, u, v: (x, y, u[:120], v[:120]),
    "nobody's class": _KEPT,
    "class of the test": lambda x, y, u, v: (x, y, u[v < 2], v[v < 2]),
    "from 1": lambda x, y, u, v: (x, y - 1, u, v - 1),
    "one class": lambda x, y, u, v: (x, (x[:, 0] > 0).long(), u, (u[:, 0] > 0).long()),
    "one class in the test": lambda x, y, u, v: (x, y, u, torch.arange(len(v)) % 3),
    "one target": lambda x, y, u, v: (x, x[:, 0], u, u[:, 0]),
    "large targets": lambda x, y, u, v: (x, (y - y.mean()) / y.std(), u, (v - y.mean()) / y.std()),
    "rare class": lambda x, y, u, v: (x, (torch.arange(len(y)) % 10 < 5).long(), u, v),
    "blank": lambda x, y, u, v: (x[3:], y[3:], u, v),
    "gray": lambda x, y, u, v: (x[:, :1].expand(-1, 3, -1, -1), y, u[:, :1].expand(-1, 3, -1, -1), v),
}
IMAGES: dict[str, Callable[..., Parts]] = {
    "": _KEPT,
    "flat": _KEPT,
    "broken": _KEPT,
    "gray": _gray,
    "bytes": _scaled(255.0),
    "bands": _scaled(torch.tensor([1.0, 1.0, 5000.0])[:, None, None]),
    "12 bits in 16": _scaled(4095 / 65535),
    "blank": _blank,
}


def settings_in(remedy: str) -> list[str]:
    """The settings that a remedy names, as `--set` takes them."""
    return [quoted or plain for quoted, plain in re.findall(r"--set (?:'([^']*)'|(\S+))", remedy)]
