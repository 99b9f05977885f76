"""The table that `fedsign compare` prints, and the same as JSON."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape

from fedsign.comparison import tuning_page
from fedsign.comparison.folder import Comparison
from fedsign.comparison.over_seeds import TARGET_SHARE
from fedsign.comparison.summary import Entry, Summary, ToTarget, values_label
from fedsign.intervals import Interval
from fedsign.report.wording import byte_count, plural
from simulations.printing import print_table

_MAX_FAILED = 3


def print_summary(comparison: Comparison, summary: Summary) -> None:
    """One block for each condition, then what the reader has to know about it."""
    console = Console(soft_wrap=True, highlight=False)
    for condition in summary.conditions:
        if condition:
            console.print(f"[bold]{escape(values_label(condition))}[/]")
        print_table(_rows(summary, condition), wide=True)
        console.print()
    for section in tuning_page.sections(summary):
        if section.condition:
            console.print(f"[bold]{escape(section.condition)}[/]")
        print_table([_tuned_row(summary, section, row) for row in section.rows], wide=True)
        console.print()
    console.print(escape(" ".join(_remarks(summary, is_given=comparison.plan.target is not None))))
    for id, error in list(summary.failed.items())[:_MAX_FAILED]:
        console.print(f"failed: {escape(id)}: {escape(error)}")
    if summary.failed:
        num_failed = len(summary.failed)
        them = "it" if num_failed == 1 else "them"
        console.print(f"{plural(num_failed, 'cell')} failed; --retry-failed plays {them} again.")


def as_json(comparison: Comparison, summary: Summary) -> dict[str, Any]:
    """The summary for programs; curves are left out, they are in the runs and in the export."""
    content = asdict(summary)
    for entry in content["entries"]:
        del entry["curves"]
        entry["folders"] = [str(folder) for folder in entry["folders"]]
    return {**content, "path": str(comparison.path)}


def _rows(summary: Summary, condition: Mapping[str, Any]) -> list[dict[str, Any]]:
    entries = summary.entries_of(condition)
    target = next((entry.to_target.target for entry in entries if entry.to_target), None)
    reaching = "-" if target is None else f"{target:.4g}"
    has_choices = any(entry.choice for entry in summary.entries) and not summary.tuning
    return [
        {
            "strategy": entry.label,
            **({"choice": values_label(entry.choice) or None} if has_choices else {}),
            summary.metric: _mean(entry),
            f"difference to {summary.reference_label}": _difference(entry.difference),
            "wins": entry.difference and f"{entry.difference.wins}/{entry.difference.num_pairs}",
            f"rounds to {reaching}": _rounds(entry.to_target),
            f"bytes to {reaching}": _bytes(entry.to_target),
        }
        for entry in entries
    ]


def _tuned_row(summary: Summary, section: tuning_page.Tuned, row: tuning_page.Row) -> dict[str, Any]:
    chosen = dict(zip(section.keys, (cell.value for cell in row.cells), strict=True))
    judged = f"validation {summary.metric}"
    return {
        "tuned": row.label,
        "budget": row.budget,
        **chosen,
        judged: row.after,
        "as given": row.before,
        "trial": row.trial,
        "time": row.time,
    }


def _mean(entry: Entry) -> str:
    mean = "-" if entry.mean is None else f"{entry.mean:.4f}"
    std = "" if entry.mean is None or entry.std is None else f" ± {entry.std:.4f}"
    missing = entry.seeds_of_all
    return f"{mean}{std}{f' ({missing})' if missing else ''}"


def _difference(interval: Interval | None) -> str | None:
    if interval is None:
        return None
    if interval.low is None or interval.high is None:
        return f"{interval.mean:+.4f}"
    return f"{interval.mean:+.4f} [{interval.low:+.4f}, {interval.high:+.4f}]"


def _rounds(reached: ToTarget | None) -> str | None:
    if reached is None:
        return None
    rounds = "-" if reached.rounds is None else f"{reached.rounds:g}"
    return f"{rounds} ({reached.num_reached}/{reached.num_seeds})"


def _bytes(reached: ToTarget | None) -> str | None:
    if reached is None or reached.bytes_down is None or reached.bytes_up is None:
        return None
    return f"{byte_count(int(reached.bytes_down))} down, {byte_count(int(reached.bytes_up))} up"


def _remarks(summary: Summary, *, is_given: bool) -> list[str]:
    """How the figures were made."""
    direction = "" if summary.higher_is_better else f" A small {summary.metric} is a good one."
    remarks = [
        f"{summary.metric}: mean ± standard deviation over seeds of the {summary.last_rounds}.{direction}",
        "Differences are paired by seed, with a 95 % interval of Student's t.",
    ]
    if any(entry.to_target for entry in summary.entries):
        origin = "" if is_given else f", which is {100 * TARGET_SHARE:g} % of what the reference ends at"
        remarks.append(f"Rounds and bytes to the target{origin}: medians over the seeds that reached it.")
    if summary.tuning:
        remarks.append(tuning_page.lead(summary))
    elif summary.trials:
        remarks.append("Choices were made by samples held out of training, never by the test samples.")
    if any(entry.num_lost for entry in summary.entries):
        remarks.append(
            "A strategy of which seeds diverged or failed does not count as best beside those that have all."
        )
    if summary.num_pending:
        are = "is" if summary.num_pending == 1 else "are"
        remarks.append(f"{summary.num_pending} of {summary.num_cells} cells {are} still to be played.")
    return remarks
