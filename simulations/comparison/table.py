"""The table of `fedsign compare`, printed and as JSON."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape

from fedsign.comparison import tuning_page
from fedsign.comparison.charts import taken_text
from fedsign.comparison.findings import finding_line
from fedsign.comparison.folder import Comparison
from fedsign.comparison.headline import headline
from fedsign.comparison.summary import Entry, Summary, ToTarget, values_label
from fedsign.comparison.tables import speed_up_text, verdict_text
from fedsign.comparison.target import TARGET_SHARE
from fedsign.comparison.verdict import Standings, standings
from fedsign.intervals import Interval
from fedsign.report.wording import byte_count, plural
from simulations.printing import print_table, print_text

_MAX_FAILED = 3


def print_summary(comparison: Comparison, summary: Summary) -> None:
    """Print a block per condition, then the notes."""
    console = Console(soft_wrap=True, highlight=False)
    verdicts = standings(summary)
    is_one = len(summary.conditions) == 1
    if not is_one:
        console.print("[bold]all conditions[/]")
        print_table(_pooled_rows(summary, verdicts), wide=True)
        console.print()
    for condition in summary.conditions:
        if condition:
            console.print(f"[bold]{escape(values_label(condition))}[/]")
        print_table(_rows(summary, condition, verdicts if is_one else None), wide=True)
        console.print()
    for section in tuning_page.sections(summary):
        if section.condition:
            console.print(f"[bold]{escape(section.condition)}[/]")
        print_table([_tuned_row(summary, section, row) for row in section.rows], wide=True)
        console.print()
    print_text(" ".join(_headline(summary)))
    if line := finding_line(summary):
        print_text(line)
    print_text(" ".join(_remarks(summary, is_given=comparison.plan.target is not None)))
    for id, error in list(summary.failed.items())[:_MAX_FAILED]:
        console.print(f"failed: {escape(id)}: {escape(error)}")
    if summary.failed:
        num_failed = len(summary.failed)
        them = "it" if num_failed == 1 else "them"
        console.print(f"{plural(num_failed, 'cell')} failed; --retry-failed runs {them} again.")


def as_json(comparison: Comparison, summary: Summary) -> dict[str, Any]:
    """Return the summary for programs, without curves; these are in the runs and in the export."""
    content = asdict(summary)
    for entry, of in zip(content["entries"], summary.entries, strict=True):
        # thousands of numbers per entry
        del entry["curves"]
        if of.to_target:
            entry["to_target"] |= {"num_reached": of.to_target.num_reached, "num_seeds": of.to_target.num_seeds}
        entry["folders"] = [str(folder) for folder in entry["folders"]]
    return {**content, "path": str(comparison.path), "standings": asdict(standings(summary))}


def _headline(summary: Summary) -> list[str]:
    """Return the page's headline."""
    found = headline(summary)
    value = f": {found.value}, {found.remark}" if found.value else ""
    return [f"{found.best}{value}." if found.best else "", *found.sentences]


def _pooled_rows(summary: Summary, verdicts: Standings) -> list[dict[str, Any]]:
    return [
        {
            "strategy": row.label,
            f"mean {summary.metric}": _spread(row.mean, row.std),
            f"difference from {summary.reference_label}": _difference(row.difference),
            "verdict": verdict_text(row) or None,
            "wins": row.difference and f"{row.difference.wins}/{row.difference.num_pairs}",
        }
        for row in verdicts.rows
    ]


def _rows(summary: Summary, condition: Mapping[str, Any], verdicts: Standings | None) -> list[dict[str, Any]]:
    """Return the rows of a condition, with verdicts if it is the only one."""
    entries = summary.entries_of(condition)
    target = next((entry.to_target.target for entry in entries if entry.to_target), None)
    reaching = "-" if target is None else f"{target:.4g}"
    has_choices = any(entry.choice for entry in summary.entries) and not summary.tuning
    return [
        {
            "strategy": entry.label,
            **({"choice": values_label(entry.choice) or None} if has_choices else {}),
            summary.metric: _mean(entry),
            f"difference from {summary.reference_label}": _difference(entry.difference),
            **({"verdict": verdict_text(verdicts.row(entry.strategy)) or None} if verdicts else {}),
            "wins": entry.difference and f"{entry.difference.wins}/{entry.difference.num_pairs}",
            f"rounds to {reaching}": _rounds(entry.to_target),
            "speed-up": entry.to_target and (speed_up_text(entry.to_target.speed_up) or None),
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
    missing = entry.seeds_of_all
    return f"{_spread(entry.mean, entry.std)}{f' ({missing})' if missing else ''}"


def _spread(mean: float | None, std: float | None) -> str:
    return ("-" if mean is None else f"{mean:.4f}") + ("" if mean is None or std is None else f" ± {std:.4f}")


def _difference(interval: Interval | None) -> str | None:
    if interval is None:
        return None
    if interval.low is None or interval.high is None:
        return f"{interval.mean:+.4f}"
    return f"{interval.mean:+.4f} [{interval.low:+.4f}, {interval.high:+.4f}]"


def _rounds(reached: ToTarget | None) -> str | None:
    return None if reached is None or reached.rounds is None else taken_text(reached, f"{reached.rounds:g}")


def _bytes(reached: ToTarget | None) -> str | None:
    if reached is None or reached.bytes_down is None or reached.bytes_up is None:
        return None
    more = "> " if reached.is_bound else ""
    return f"{more}{byte_count(int(reached.bytes_down))} down, {byte_count(int(reached.bytes_up))} up"


def _remarks(summary: Summary, *, is_given: bool) -> list[str]:
    """Yield notes on how the numbers were computed."""
    direction = "" if summary.higher_is_better else f" A small {summary.metric} is a good one."
    remarks = [f"{summary.metric}: mean ± standard deviation over seeds of the {summary.last_rounds}.{direction}"]
    if len(summary.labels) > 1:
        remarks.append(
            "Differences are paired by seed, with individual 95 % intervals (Student's t); verdicts are tests of "
            "all pairs of strategies, Holm-corrected (familywise error rate 5 %)."
        )
    if any(entry.to_target for entry in summary.entries):
        origin = "" if is_given else f", which is {100 * TARGET_SHARE:g} % of what the reference ends at"
        remarks.append(
            f"Rounds and bytes to the target{origin}: medians over all seeds, of the smoothed metric, sustained."
        )
    if summary.tuning:
        remarks.append(tuning_page.lead(summary))
    elif summary.trials:
        remarks.append("Hyperparameters were selected on held-out training samples, never on the test set.")
    if any(entry.num_lost for entry in summary.entries):
        remarks.append("A strategy with diverged or failed seeds is never called better than one without.")
    if summary.num_pending:
        are = "is" if summary.num_pending == 1 else "are"
        remarks.append(f"{summary.num_pending} of {summary.num_cells} cells {are} pending.")
    return remarks
