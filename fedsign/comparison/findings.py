"""What looks wrong with the runs of a comparison: the findings of its cells, each text once."""

from collections import Counter
from collections.abc import Sequence

from fedsign.comparison.labels import short_label
from fedsign.comparison.summary import Entry, Summary
from fedsign.report.findings import FindingRow, finding_row
from fedsign.report.wording import plural
from fedsign.storage.results import Record

_MOST = 4  # runs named one by one


def finding_rows(summary: Summary) -> list[FindingRow]:
    """One row per text, in the order of the table: runs on the same data have the same findings about them."""
    found: dict[tuple[str, str, str, int], list[tuple[Entry, int, Record]]] = {}
    for entry in summary.entries:
        for seed, record in entry.findings:
            key = (record["rule"], record["message"], record["remedy"], record["round"])
            found.setdefault(key, []).append((entry, seed, record))
    return [
        finding_row(group[0][2], runs=_runs(summary, [(entry, seed) for entry, seed, _ in group]))
        for group in found.values()
    ]


def num_findings(summary: Summary) -> int:
    """The findings of all runs in the table."""
    return sum(len(entry.findings) for entry in summary.entries)


def finding_line(summary: Summary) -> str:
    """The findings on one line: `Findings in 2 of 10 runs: loss-rising (2), updates (1); the page has them.`"""
    runs = {(at, seed) for at, entry in enumerate(summary.entries) for seed, _ in entry.findings}
    if not runs:
        return ""
    rules = Counter(record["rule"] for entry in summary.entries for _, record in entry.findings)
    counts = ", ".join(f"{rule} ({count})" for rule, count in rules.items())
    return f"Findings in {len(runs)} of {plural(_num_runs(summary), 'run')}: {counts}; the page has them."


def _runs(summary: Summary, runs: Sequence[tuple[Entry, int]]) -> str:
    """`FedDyn, seeds 0 and 2`, or how many there are."""
    total = _num_runs(summary)
    if len(runs) > _MOST:
        return "All runs" if len(runs) == total else f"{len(runs)} of {total} runs"
    names = []
    for entry in summary.entries:
        seeds = [str(seed) for of, seed in runs if of is entry]
        if seeds:
            where = short_label(entry.condition) if len(summary.conditions) > 1 else ""
            seed = f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(seeds)}"
            names.append(f"{entry.label}{f' under {where}' if where else ''}, {seed}")
    return "; ".join(names)


def _num_runs(summary: Summary) -> int:
    return sum(entry.num_seeds for entry in summary.entries)
