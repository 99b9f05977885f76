"""The headline of a comparison: sentences about the tests of `fedsign.comparison.verdict`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fedsign.comparison.labels import Scale, enumerate_words, short_label
from fedsign.comparison.summary import Entry, Summary
from fedsign.comparison.verdict import UNDECIDED, Standing, Standings, corrected_p, failed_searches, ranked, standings
from fedsign.intervals import Interval
from fedsign.report.wording import NARROW_SPACE, plural


@dataclass(frozen=True, kw_only=True, slots=True)
class Headline:
    """The headline of a comparison, or the description of one condition."""

    condition: str
    # Labels of the best strategies; "Too few seeds to tell" if no test is significant.  Empty if nothing has finished,
    # and for a single condition among several.
    best: str
    value: str
    remark: str  # what the value measures
    sentences: tuple[str, ...]


def headline(summary: Summary) -> Headline:
    """The best strategies over all conditions, their differences, and what the tests show."""
    table, scale = standings(summary), summary.scale
    sign = -1 if summary.higher_is_better else 1
    order = sorted(
        (row for row in table.rows if row.mean is not None), key=lambda row: (row.num_lost, sign * (row.mean or 0.0))
    )
    if not order:
        where = " under every condition" if len(summary.conditions) > 1 else ""
        sentence = f"No strategy has ended with a number{where}{' yet' if summary.num_pending else ''}."
        return Headline(condition="", best="", value="", remark="", sentences=(sentence, *_all_troubles(summary, "")))
    top, is_alone = order[0], len(summary.labels) == 1
    leaders = order if is_alone else [row for row in order if row.is_bold]
    sentences = [] if is_alone else [_leader(summary, order, table)]
    if not is_alone:
        sentences += [_shown(summary, row) for row in leaders] if table.tells else [_nothing(summary, table)]
        sentences += failure_sentences(summary)
    counts = [(len(top.values), "seed"), (len(summary.conditions), "condition")]
    several = [plural(count, noun) for count, noun in counts if count > 1]
    remark = f"test {summary.metric_name}, {f'mean of {enumerate_words(several)}' if several else 'one seed'}"
    return Headline(
        condition="",
        best=enumerate_words([row.label for row in leaders]) or f"{UNDECIDED[0].upper()}{UNDECIDED[1:]}",
        value=scale.with_unit(leaders[0].mean) if len(leaders) == 1 else "",
        remark=remark if len(leaders) == 1 else "",
        sentences=tuple(filter(None, [*sentences, *_all_troubles(summary, top.strategy)])),
    )


def described(summary: Summary, condition: Mapping[str, Any]) -> Headline:
    """One condition among several: the best mean and its difference to the reference.  No test, no verdict."""
    order = ranked(summary.entries_of(condition), higher_is_better=summary.higher_is_better)
    sentence = f"No cell of this condition has ended with a number{' yet' if summary.num_pending else ''}."
    if order:
        best, tied = order[0], _tied(summary, order)
        other = tied[0] if tied else best
        of = f" of {best.seeds_of_all}" if best.seeds_of_all else ""
        start = _tie(summary, tied) if tied else f"{best.label} has the best mean"
        sentence = f"{start}, {summary.scale.with_unit(best.mean)}{of}"
        if other.strategy == summary.reference or other.difference is None or len(tied) > 1:
            sentence += "."
        else:
            than = summary.reference_label
            sentence += _measured(other.difference, summary.scale, than=than, is_tie=bool(tied))
    return Headline(condition=short_label(condition), best="", value="", remark="", sentences=(sentence,))


def _leader(summary: Summary, order: Sequence[Standing], table: Standings) -> str:
    """The best mean against the reference; if the reference is best, the runner-up against it."""
    best, reference = order[0], summary.reference_label
    other, than, start = best, reference, f"{best.label} has the best mean"
    if best.strategy == summary.reference:
        if len(order) == 1:
            return f"Nothing to compare {best.label} with has ended yet."
        other, than = order[1], best.label
        start = f"{best.label}, the reference, has the best mean; {other.label} comes next"
    tied = _tied(summary, order)
    if len(tied) > 1:
        return f"{_tie(summary, tied)}."
    if tied:
        other, start = tied[0], _tie(summary, tied)
    if other.difference is None or other.p is None:
        return f"{start}. No seed has ended for both {other.label} and {than}, so no difference can be reported."
    sentence = f"{start}{_measured(other.difference, summary.scale, than=than, is_tie=bool(tied))}"
    if table.tells and other.says == UNDECIDED:
        sentence += f" That is {UNDECIDED} the two apart (corrected {corrected_p(other.p)})."
    return sentence


def _shown(summary: Summary, row: Standing) -> str:
    """What the tests show of a strategy in bold."""
    others = [summary.labels[name] for name in summary.labels if name != row.strategy and name not in row.better_than]
    sentence = (
        f"{row.label} is shown to be better than {enumerate_words([summary.labels[name] for name in row.better_than])}"
    )
    return f"{sentence}; beside {enumerate_words(others)}, {UNDECIDED}." if others else f"{sentence}."


def _nothing(summary: Summary, table: Standings) -> str:
    """Why no strategy is in bold."""
    if not table.pairs:
        return ""
    if all(pair.difference.num_pairs < 2 for pair in table.pairs):
        return "With one seed there is no interval and no test; another seed may reverse this."
    least = corrected_p(min(pair.p for pair in table.pairs))
    tests = f"none of {len(table.pairs)} tests" if len(table.pairs) > 1 else "the test"
    shows = "shows" if len(table.pairs) > 1 else "does not show"
    return (
        f"No strategy is shown to be better than another: {tests} {shows} a difference "
        f"(the smallest corrected {least})."
    )


def failure_sentences(summary: Summary) -> list[str]:
    """For each search that failed, what it missed."""
    return [
        f"The search of {summary.labels[name]} failed"
        f"{_measured(difference, summary.scale, than=summary.labels[other], is_tie=False)} {summary.labels[name]} "
        f"contains {summary.labels[other]}, so this is no result; search with more trials."
        for name, (other, difference) in failed_searches(summary).items()
    ]


def _all_troubles(summary: Summary, best: str) -> list[str]:
    """A sentence for every entry that lost seeds, and one for pending cells."""
    sentences = [_troubles(entry, is_best=entry.strategy == best) for entry in summary.entries if entry.num_lost]
    if summary.num_pending:
        have = "has" if summary.num_pending == 1 else "have"
        sentences.append(f"{plural(summary.num_pending, 'cell')} {have} not finished; the others say this.")
    return sentences


_Row = TypeVar("_Row", Standing, Entry)


def _tied(summary: Summary, order: Sequence[_Row]) -> list[_Row]:
    """The strategies that tie with the reference for the best mean, to the decimals that are shown."""
    number = summary.scale.number
    best = [row for row in order if number(row.mean) == number(order[0].mean)]
    if all(row.strategy != summary.reference for row in best):
        return []
    return [row for row in best if row.difference and number(abs(row.difference.mean)) == number(0.0)]


def _tie(summary: Summary, tied: Sequence[Standing | Entry]) -> str:
    labels = [*(row.label for row in tied), f"the reference, {summary.reference_label},"]
    return f"{enumerate_words(labels)} tie for the best mean"


def _measured(difference: Interval, scale: Scale, *, than: str, is_tie: bool) -> str:
    amount = scale.number(abs(difference.mean)) + (" points" if scale.percent else "")
    way = "above" if difference.mean >= 0 else "below"
    said = "" if is_tie else f": {amount} {way} {than}"
    if difference.low is not None and difference.high is not None:
        said += (
            f" (95{NARROW_SPACE}% interval of the paired difference: {scale.signed(difference.low)} to "
            f"{scale.signed(difference.high)})"
        )
    if difference.num_pairs > 1:
        is_equal = difference.mean == 0.0 and difference.low is None  # and so is each seed's
        wins = f"better in {difference.wins} of {difference.num_pairs} seeds"
        said += f", equal in all {difference.num_pairs} seeds" if is_equal else f", {wins}"
    return f"{said}."


def _troubles(entry: Entry, *, is_best: bool) -> str:
    ends = [(entry.num_diverged, "diverged"), (entry.num_failed, "failed")]
    sentence = " and ".join(f"{outcome} with {count}" for count, outcome in ends if count)
    where = short_label(entry.condition)
    sentence = f"{entry.label} {sentence} of {plural(entry.num_seeds, 'seed')}{f' under {where}' if where else ''}"
    if entry.mean is None:
        return f"{sentence}."
    if is_best:
        return f"{sentence}; its mean is of the others alone."
    return f"{sentence}; its mean is of the others, so it does not count as the best."
