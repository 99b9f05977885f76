"""Which strategy a comparison finds best, and in which words.

The words follow the intervals: where the 95 % interval of the paired difference includes 0, the seeds do not tell two
strategies apart, and the sentence says so.  A seed that diverged or failed is lost: what is left are the lucky ones, so
a strategy that has lost seeds neither wins over one that has all of them nor counts as good as it.  Intervals are of one comparison each, not corrected for their number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedsign.comparison.labels import Scale, enumerate_words, short_label
from fedsign.comparison.summary import Entry, Summary
from fedsign.intervals import Interval, paired_difference
from fedsign.report.wording import NARROW_SPACE, plural


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What is said of one condition."""

    condition: str
    best: str  # label; empty where nothing has finished
    value: str
    remark: str  # what the value is
    sentences: tuple[str, ...]


def ranked(entries: Sequence[Entry], *, higher_is_better: bool) -> list[Entry]:
    """Best first.  The fewer seeds a strategy has lost, the further ahead it is, whatever the mean of the others."""
    with_mean = [(entry, entry.mean) for entry in entries if entry.mean is not None]
    sign = -1 if higher_is_better else 1
    return [entry for entry, mean in sorted(with_mean, key=lambda pair: (pair[0].num_lost, sign * pair[1]))]


def as_good_as_best(entries: Sequence[Entry], *, higher_is_better: bool) -> list[Entry]:
    """The best and all that the seeds do not tell apart from it; with one seed the best alone."""
    order = ranked(entries, higher_is_better=higher_is_better)
    if not order:
        return []
    best, *others = order
    tied = [entry for entry in others if not entry.num_lost and includes_zero(_between(entry, best))]
    return [best, *tied]


def includes_zero(interval: Interval | None) -> bool:
    """Whether there is an interval and 0 lies in it."""
    return (
        interval is not None
        and interval.low is not None
        and interval.high is not None
        and interval.low <= 0 <= interval.high
    )


def verdict(summary: Summary, condition: Mapping[str, Any]) -> Verdict:
    """Who is best under a condition, by how much, and how sure that is."""
    entries, scale = summary.entries_of(condition), summary.scale
    order = ranked(entries, higher_is_better=summary.higher_is_better)
    title = short_label(condition)
    unfinished = sum(entry.unfinished for entry in entries)
    if not order:
        said = f"No cell of this condition has ended with a number{' yet' if unfinished else ''}."
        lost = [_troubles(entry, is_best=False) for entry in entries if entry.num_lost]
        return Verdict(condition=title, best="", value="", remark="", sentences=(said, *lost))
    best = order[0]
    sentences = [_comparison(summary, order, scale), _also(summary, order)]
    sentences += [_troubles(entry, is_best=entry is best) for entry in entries if entry.num_lost]
    if unfinished:
        have = "has" if unfinished == 1 else "have"
        sentences.append(f"{plural(unfinished, 'cell')} of this condition {have} not finished; the others say this.")
    return Verdict(
        condition=title,
        best=best.label,
        value=scale.with_unit(best.mean),
        remark=f"test {summary.metric_name}, mean of {best.seeds_of_all or plural(best.num_seeds, 'seed')}",
        sentences=tuple(filter(None, sentences)),
    )


def _comparison(summary: Summary, order: Sequence[Entry], scale: Scale) -> str:
    """The best against the reference; the reference, where it is the best, against the next."""
    best, reference = order[0], summary.reference_label
    if best.strategy == summary.reference:
        if len(order) == 1:
            return f"Nothing to compare {best.label} with has ended yet."
        other = order[1]
        difference = other.difference
        start = f"{best.label}, the reference, has the best mean; {other.label} comes next"
        pair = (other.label, best.label)
    else:
        other, difference = best, best.difference
        start = f"{best.label} has the best mean"
        pair = (best.label, reference)
    if difference is None:
        return f"{start}. No seed has ended for both {pair[0]} and {pair[1]}, so there is no difference to report."
    return f"{start}: {_measured(difference, scale, than=pair[1])} {_certainty(difference, pair)}"


def _measured(difference: Interval, scale: Scale, *, than: str) -> str:
    amount = scale.number(abs(difference.mean)) + (" points" if scale.percent else "")
    way = "above" if difference.mean >= 0 else "below"
    interval = ""
    if difference.low is not None and difference.high is not None:
        interval = (
            f" (95{NARROW_SPACE}% interval of the paired difference: {scale.signed(difference.low)} to "
            f"{scale.signed(difference.high)})"
        )
    wins = f", better in {difference.wins} of {difference.num_pairs} seeds" if difference.num_pairs > 1 else ""
    return f"{amount} {way} {than}{interval}{wins}."


def _certainty(difference: Interval, pair: tuple[str, str]) -> str:
    if difference.low is None:
        return "One seed has no interval: another seed may turn this around."
    if includes_zero(difference):
        return f"The interval includes 0: these seeds do not tell {pair[0]} and {pair[1]} apart."
    return ""


def _also(summary: Summary, order: Sequence[Entry]) -> str:
    """Those that the seeds do not tell apart from the best, beside the one that `_comparison` speaks of."""
    best, *tied = as_good_as_best(order, higher_is_better=summary.higher_is_better)
    spoken_of = order[1].strategy if best.strategy == summary.reference and len(order) > 1 else summary.reference
    names = [entry.label for entry in tied if entry.strategy != spoken_of]
    either = " either" if len(names) < len(tied) else ""
    return f"The seeds do not tell {best.label} apart from {enumerate_words(names)}{either}." if names else ""


def _troubles(entry: Entry, *, is_best: bool) -> str:
    ends = [(entry.num_diverged, "diverged"), (entry.num_failed, "failed")]
    said = " and ".join(f"{what} with {count}" for count, what in ends if count)
    said = f"{entry.label} {said} of {plural(entry.num_seeds, 'seed')}"
    if entry.mean is None:
        return f"{said}."
    if is_best:
        return f"{said}; its mean is of the others alone."
    return f"{said}; its mean is of the others, so it does not count as the best."


def _between(entry: Entry, best: Entry) -> Interval | None:
    ours, theirs = (dict(zip(each.seeds, each.values, strict=True)) for each in (entry, best))
    return paired_difference(ours, theirs, higher_is_better=True)
