"""Shared helpers for the sections of docs/benchmarks.md."""

from collections.abc import Iterable, Sequence
from typing import Any

from fedsign.former_names import RECORDS, current_record
from fedsign.report.wording import figure, plural

Result = dict[str, Any]
FORMER = dict(RECORDS, work="workload", player="competitor", players="competitors", not_played="not_measured")
MISSING = "–"


def metrics_of(result: Result) -> Result:
    """What was measured, also under the former key."""
    found: Result = result["metrics"] if "metrics" in result else result["figures"]  # the former key
    renamed: Result = current_record(found)
    return renamed


def measured_on(result: Result) -> str:
    machine = result["machine"]
    gpu = f", {machine['gpu']}" if "gpu" in machine and result.get("device") == "cuda" else ""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    peers = {
        f"{name} {version}"
        for row in result.get("rows", [])
        for name, version in row.get("versions", {}).items()
        if name not in machine["versions"]
    }
    busy = machine["load_before"] > 0.5
    load = (
        f" **The machine was busy (load {machine['load_before']} before it began): preliminary figures.**"
        if busy
        else ""
    )
    kept = "" if result.get("warm_up", {}).get("repetitions", 1) else " (the first one kept)"
    return (
        f"*{result['date']}, {plural(result['repetitions'], 'repetition')}{kept}, {machine['processor']}, "
        f"{machine['cores']} cores, {machine['memory_gb']} GB{gpu}; "
        f"{versions}{''.join(', ' + each for each in sorted(peers))}.*{load}"
    )


def ms(seconds: float) -> str:
    return figure(1000 * seconds)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, left: int) -> str:
    """Format a Markdown table; the first `left` columns are left-aligned, the others right-aligned."""
    rule = ["---" if column < left else "---:" for column in range(len(head))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *rows))
