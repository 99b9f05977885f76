"""Figures over seeds: curves, and what it took to reach a target."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedsign.intervals import mean_and_std
from fedsign.storage.results import Line

TARGET_SHARE = 0.95
"""Without a target of the user's, the target is this share of what the reference ends at."""

_NOT_CURVES = frozenset({"round", "clients", "failures"})  # of a line of rounds.jsonl


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A figure per round over seeds: mean and sample standard deviation; None where a seed has no number."""

    rounds: tuple[int, ...]
    mean: tuple[float | None, ...]
    std: tuple[float | None, ...]  # 0.0 for one seed


@dataclass(frozen=True, kw_only=True, slots=True)
class ToTarget:
    """What it took until the metric first reached the target; medians over the seeds that reached it.

    `num_seeds` are those that finished or failed: a run that failed has not reached the target.
    """

    target: float
    num_reached: int
    num_seeds: int
    rounds: float | None
    bytes_down: float | None
    bytes_up: float | None


def curves(runs: Sequence[Sequence[Line]]) -> dict[str, Curve]:
    """Every figure of the rounds over runs; a round that one of the runs has no number for has no mean."""
    by_round = [{int(line["round"]): line for line in lines} for lines in runs]
    rounds = tuple(sorted(set().union(*by_round)))
    figures = dict.fromkeys(key for lines in runs for line in lines for key, value in line.items() if _is_figure(value))
    found = {}
    for name in figures:
        if name in _NOT_CURVES:
            continue
        values = [[lines.get(round, {}).get(name) for lines in by_round] for round in rounds]
        pairs = [(None, None) if None in row else mean_and_std(row) for row in values]
        found[name] = Curve(
            rounds=rounds,
            mean=tuple(mean for mean, _ in pairs),
            std=tuple(0.0 if std is None and mean is not None else std for mean, std in pairs),
        )
    return found


def first_round_at(lines: Sequence[Line], metric: str, target: float, *, higher_is_better: bool) -> int | None:
    """Position of the first line whose metric, unsmoothed, has reached the target; None if none has."""
    for position, line in enumerate(lines):
        value = line.get(metric)
        if value is not None and (value >= target if higher_is_better else value <= target):
            return position
    return None


def to_target(
    runs: Sequence[Sequence[Line]],
    metric: str,
    target: float | None,
    *,
    higher_is_better: bool,
    num_failed: int = 0,
) -> ToTarget | None:
    """See ToTarget, of runs that finished and the number of those that failed.

    Bytes are those of all rounds up to the one that reached the target, that one included.
    """
    if target is None:
        return None
    reached = []
    for lines in runs:
        position = first_round_at(lines, metric, target, higher_is_better=higher_is_better)
        if position is not None:
            played = lines[: position + 1]
            reached.append((played[-1]["round"], *(total(played, key) for key in ("bytes_down", "bytes_up"))))
    rounds, bytes_down, bytes_up = (_median([each[column] for each in reached]) for column in range(3))
    return ToTarget(
        target=target,
        num_reached=len(reached),
        num_seeds=len(runs) + num_failed,
        rounds=rounds,
        bytes_down=bytes_down,
        bytes_up=bytes_up,
    )


def default_target(reference_mean: float | None, *, higher_is_better: bool) -> float | None:
    """`TARGET_SHARE` of where the reference ends; for a figure that should be low, that much above it.

    >>> round(default_target(0.8, higher_is_better=True), 3), round(default_target(1.9, higher_is_better=False), 3)
    (0.76, 2.0)
    """
    if reference_mean is None:
        return None
    return reference_mean * TARGET_SHARE if higher_is_better else reference_mean / TARGET_SHARE


def total(lines: Iterable[Line], key: str) -> float:
    """Sum of a figure over rounds."""
    return float(sum(line.get(key) or 0 for line in lines))


def _is_figure(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _median(values: Sequence[float]) -> float | None:
    return float(statistics.median(values)) if values else None
