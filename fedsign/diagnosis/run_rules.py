"""Rules about the course of a run: each sees the records of rounds.jsonl in turn, and says what looks wrong.

A rule keeps a bounded window of past rounds.  A missing value, such as one that privacy withholds, is skipped.  The
thresholds are loose: `python -m benchmarks.diagnosis` counts false alarms on the runs of the recipes.
"""

import math
from collections import deque
from dataclasses import dataclass
from statistics import fmean, median
from typing import ClassVar, Protocol

from fedsign.report.wording import figure, plural
from fedsign.storage.results import Record

_SMOOTH = 10  # rounds over which a loss or an accuracy is averaged
_LONG = 50  # rounds for which a loss must have risen by half
_EARLY = 30  # rounds in which a run should have left its start
_MOST = 0.5  # of the steps of weights below float32
_IN_A_ROW = 3  # rounds, or requests to a client


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What the rules know of an experiment besides its records."""

    num_clients: int
    rounds: int  # planned
    majority: float | None = None  # share of the most frequent class among the test samples; None: no classes
    num_test: int = 0
    can_select: bool = False  # whether `results.keep_best` and `results.patience` are there, and unused


class RunRule(Protocol):
    """One rule, with its state in one run."""

    name: ClassVar[str]

    def __init__(self, facts: Facts) -> None: ...

    def see(self, record: Record) -> str:
        """What looks wrong after this round, a clause without a period; empty if nothing does."""
        ...

    @property
    def remedy(self) -> str:
        """What to set, an imperative clause."""
        ...


class Majority:
    """The accuracy is not better than that of always predicting the most frequent class, by one standard error."""

    name: ClassVar = "majority-class"
    remedy = "scale the features with data.normalize=per_channel, check the labels, or change client.lr"

    def __init__(self, facts: Facts) -> None:
        self._facts, self._last = facts, deque[float](maxlen=_EARLY)

    def see(self, record: Record) -> str:
        """See [RunRule]."""
        accuracy, share = _number(record, "accuracy"), self._facts.majority
        if accuracy is None or share is None or share == 1:
            return ""
        self._last.append(accuracy)
        if len(self._last) < _EARLY:
            return ""
        error = math.sqrt(share * (1 - share) / self._facts.num_test)
        mean, latest = fmean(self._last), fmean([*self._last][-_SMOOTH // 2 :])
        if mean > share + error or latest > share + 2 * error:
            return ""
        return (
            f"the test accuracy is {figure(mean)} in the mean of the last {_EARLY} rounds, and always predicting the "
            f"most frequent class has {figure(share)}"
        )


class RisingLoss:
    """The smoothed test loss has risen by half for 50 rounds, or threefold for a quarter of the run, and still rises.

    Peaks are exempt: the lowest of the latest losses has risen half as far, at least.
    """

    name: ClassVar = "loss-rising"

    def __init__(self, facts: Facts) -> None:
        self._can_select = facts.can_select
        self._quarter = min(max(facts.rounds // 4, _SMOOTH), _LONG)
        self._last, self._means = deque[float](maxlen=_SMOOTH), deque[float](maxlen=self._quarter // 2)
        self._first, self._lowest, self._at = math.nan, math.inf, 0

    @property
    def remedy(self) -> str:
        """See [RunRule]."""
        keep = (
            "; to keep the best model, or to stop there, by validation samples: data.validation_fraction=0.1 with "
            "results.keep_best=true, or with results.patience"
        )
        return "lower client.lr or train for fewer rounds" + (keep if self._can_select else "")

    def see(self, record: Record) -> str:
        """See [RunRule]."""
        loss = _number(record, "loss")
        if loss is None:
            return ""
        self._last.append(loss)
        if len(self._last) < _SMOOTH:
            return ""
        mean = fmean(self._last)
        self._means.append(mean)
        if math.isnan(self._first):
            self._first = mean
        if mean <= self._lowest:
            self._lowest, self._at = mean, record["round"]
        rounds = record["round"] - self._at
        if rounds < self._quarter or self._lowest < 0:  # a negative loss has no factor
            return ""
        factor, share = (1.5, 0.02) if rounds >= _LONG else (3.0, 0.1)
        rise = max((factor - 1) * self._lowest, share * self._first)
        if mean - self._lowest < rise or min(self._last) - self._lowest < rise / 2 or mean < self._means[0]:
            return ""
        return f"the test loss has risen from {figure(self._lowest)} in round {self._at} to {figure(mean)}"


class Divergence:
    """A loss is not finite, or has multiplied and still rises."""

    name: ClassVar = "divergence"
    remedy = "lower client.lr, or set client.clip_norm=10"

    def __init__(self, facts: Facts) -> None:
        self._first: dict[str, list[float]] = {"loss": [], "train_loss": []}
        self._last = {key: deque[float](maxlen=_IN_A_ROW) for key in ("loss", "train_loss")}

    def see(self, record: Record) -> str:
        """See [RunRule]."""
        for key, name in (("loss", "test"), ("train_loss", "training")):
            if key == "loss" and key in record and _number(record, key) is None:
                return "the test loss is not finite"
            if (loss := _number(record, key)) is None:
                continue
            if len(self._first[key]) < _IN_A_ROW:
                self._first[key].append(loss)
                continue
            first, last = max(self._first[key]), self._last[key]
            last.append(loss)
            is_rising = len(last) == _IN_A_ROW and sorted(last) == [*last]
            if is_rising and first > 0 and loss >= 10 * first and loss >= 3 * last[0]:
                return f"the {name} loss has grown from {figure(first)} to {figure(loss)} and rises fast"
        return ""


class Plateau:
    """Neither the test loss nor the training loss has ever left its first value."""

    name: ClassVar = "plateau"
    remedy = "raise client.lr or client.local_epochs, and check data.normalize"

    def __init__(self, facts: Facts) -> None:
        self._losses: dict[str, list[float]] = {"loss": [], "train_loss": []}
        self._is_over = False

    def see(self, record: Record) -> str:
        """See [RunRule]."""
        if self._is_over:
            return ""
        for key, losses in self._losses.items():
            if (loss := _number(record, key)) is not None:
                losses.append(loss)
        given = [losses for losses in self._losses.values() if losses]
        if not given or min(map(len, given)) < _EARLY:
            return ""
        self._is_over = True  # only the beginning counts: later, a plateau is the end of training
        if any(fmean(losses[-_SMOOTH:]) < 0.99 * fmean(losses[:_IN_A_ROW]) for losses in given):
            return ""
        name, losses = ("test", given[0]) if self._losses["loss"] else ("training", given[-1])
        return (
            f"the {name} loss is {figure(fmean(losses[-_SMOOTH:]))} after {_EARLY} rounds, as in the first rounds "
            f"({figure(fmean(losses[:_IN_A_ROW]))})"
        )


class Weights:
    """The norm of the weights has grown a hundredfold, or shrunk to a hundredth, since the first round."""

    name: ClassVar = "weights"
    remedy = "lower client.lr, or check client.weight_decay and the strategy's settings"

    def __init__(self, facts: Facts) -> None:
        self._first = 0.0

    def see(self, record: Record) -> str:
        """See [RunRule]."""
        norm = _number(record, "weight_norm")
        if norm is None:
            return ""
        self._first = self._first or norm
        if self._first / 100 < norm < 100 * self._first or not self._first:
            return ""
        verb = "grown" if norm > self._first else "shrunk"
        return f"the norm of the weights has {verb} from {figure(self._first)} to {figure(norm)}"


class Updates:
    """Updates are too small for the weights to change, from the first round or at once, or grow a hundredfold.

    Updates that shrink slowly are those of a run that converges.  With client.low_precision=plain, clients say which
    share of their steps rounding has lost.
    """

    name: ClassVar = "updates"

    def __init__(self, facts: Facts) -> None:
        self._norms = deque[float](maxlen=_LONG)
        self._last = deque[float](maxlen=1 + _SMOOTH)  # relative to the weights
        self._largest = 0.0
        self._is_small = self._is_lost = False

    @property
    def remedy(self) -> str:
        """See [RunRule]."""
        if self._is_lost:
            return "leave out client.low_precision, or set it to stochastic, which needs no float32 copies"
        change = "raise client.lr" if self._is_small else "lower client.lr, or set client.clip_norm=10"
        return f"{change}, and check the strategy's settings"

    def see(self, record: Record) -> str:
        """See [RunRule]."""
        if (lost := record.get("lost_updates", 0.0)) >= _MOST:
            self._is_lost = True
            return f"a local step leaves {lost:.0%} of the weights with a gradient unchanged: rounding loses it"
        norm, weights = _number(record, "update_norm"), _number(record, "weight_norm")
        if norm is None or not weights:
            return ""
        self._last.append(norm / weights)
        self._largest = max(self._largest, norm / weights)
        before, *last = self._last
        never_changed = len(self._norms) >= _SMOOTH and self._largest < 1e-5
        if never_changed or (len(last) == _SMOOTH and before > 1e-3 and max(last) < 1e-6):
            self._is_small = True
            return f"the norm of the updates is {figure(norm)}, that of the weights {figure(weights)}"
        usual = median(self._norms) if len(self._norms) >= _SMOOTH else math.inf
        self._norms.append(norm)
        if norm >= 100 * usual and norm >= 0.1 * weights:
            return f"the norm of the updates is {figure(norm)}, and was {figure(usual)} before"
        return ""


class FailingClients:
    """A client fails again and again, and more often than others; or most replies fail."""

    name: ClassVar = "failing-clients"
    remedy = "read failures.jsonl, and mend or remove what fails"

    def __init__(self, facts: Facts) -> None:
        self._num_clients = facts.num_clients
        self._in_a_row: dict[int, int] = {}  # clients that failed in their latest requests
        self._num_asked = self._num_failed = 0
        self._last = deque[tuple[int, int]](maxlen=_SMOOTH)  # asked, failed

    def see(self, record: Record) -> str:
        """See [RunRule]."""
        reasons = {each["client"]: each["reason"] for each in record.get("failures", ())}
        asked = [client for client in record.get("clients", ()) if client not in record.get("surplus", ())]
        failed = [client for client in asked if client in reasons]
        self._num_asked += len(asked)
        self._num_failed += len(failed)
        self._last.append((len(asked), len(failed)))
        for client in asked:
            if client not in reasons:
                self._in_a_row.pop(client, None)
        for client in failed:
            self._in_a_row[client] = num = self._in_a_row.get(client, 0) + 1
            # the rate of the others; one failure is added, since a rate of 0 from a few requests proves little
            others = (self._num_failed - num + 1) / max(self._num_asked - num + 1, 1)
            if num >= _IN_A_ROW and self._num_clients * others**num < 0.01:
                return f"client {client} failed in its last {num} requests ({_short(reasons[client])})"
        num_asked, num_failed = (sum(each) for each in zip(*self._last, strict=True))
        if len(self._last) == _SMOOTH and num_failed > num_asked / 2:
            return f"{num_failed} of {plural(num_asked, 'request')} failed in the last {_SMOOTH} rounds"
        return ""


RULES: tuple[type[RunRule], ...] = (
    Majority,
    RisingLoss,
    Divergence,
    Plateau,
    Weights,
    Updates,
    FailingClients,
)


def _number(record: Record, key: str) -> float | None:
    """A finite value, else None."""
    value = record.get(key)
    return float(value) if value is not None and math.isfinite(value) else None


def _short(reason: str) -> str:
    reason = reason.strip().partition("\n")[0].rstrip(".")
    return reason if len(reason) <= 120 else f"{reason[:119]}…"
