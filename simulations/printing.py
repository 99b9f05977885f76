"""Printing for commands: a run's metrics, tables, JSON, files.

Importing this module imports neither torch nor Flower nor NumPy, so that `--help` stays fast.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

_WIDEST = 100_000  # columns
_GAP = 2  # columns between two columns, and after the last


def print_summary(run: Any) -> None:
    """Print a run's metrics and its path."""
    from fedsign.report import summary
    from fedsign.report.findings import findings_facts
    from fedsign.report.sections import sections
    from fedsign.storage.results import RunFolder

    config = run.config
    rows = []
    for metric in (*config.metrics, "loss"):
        # a metric of the user's own is configured as "module:name" and recorded as "name"
        value = run.final(metric.rpartition(":")[2])
        shown = "diverged" if value is None else f"{value:.4f}"
        rows.append((metric, f"[bold]{shown}[/]  mean of the last {min(5, config.rounds)} rounds"))
    read = summary.read(RunFolder(run.path))
    # findings, too: the warnings may be in the log of another process
    facts = [*(fact for each in sections(read) for fact in each.facts), *findings_facts(len(read.findings))]
    rows += [(fact.name, f"[bold]{fact.value}[/]  {fact.remark}") for fact in facts]
    failures = sum(len(record["failures"]) for record in run.rounds)
    if failures:
        rows.append(("failures", f"[bold]{failures}[/]  client replies that could not be used, see failures.jsonl"))
    rows.append(("run", escaped(str(run.path))))
    if (run.path / "report.html").exists():
        rows.append(("report", escaped(str(run.path / "report.html"))))
    print_facts(rows)


def print_facts(rows: list[tuple[str, str]], *, title: str = "") -> None:
    """Print names and texts in a column; texts may contain Rich markup."""
    console = Console(soft_wrap=True, highlight=False)
    if title:
        console.print(f"[bold]{escaped(title)}[/]")
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        console.print(f"{name:<{width}}  {text}")


def columns() -> int | None:
    """The width to print in: that of the terminal, or COLUMNS; None in a pipe or a file."""
    console = Console()
    return console.width if console.is_terminal or os.environ.get("COLUMNS", "").isdecimal() else None


def print_table(rows: list[dict[str, Any]], *, wide: bool = False) -> None:
    """Print rows with equal columns.

    Cells are folded to fit a terminal, but not those of runs, nor if `wide`: there, rows that do not fit become blocks.
    """
    table = Table(box=None, padding=(0, _GAP, 0, 0))
    for column in rows[0]:
        table.add_column(column, overflow="fold", no_wrap=column == "run")  # keeps a path in one piece for copying
    for row in rows:
        table.add_row(*(escaped(_cell(value)) for value in row.values()))
    available = columns()
    if available is not None and not wide and "run" not in rows[0]:
        Console(soft_wrap=True, highlight=False).print(table)
    elif available is None or _needed(table) - _GAP <= available:
        print_wide(table)
    else:
        for row in rows:
            _print_block(row)


def _print_block(row: dict[str, Any]) -> None:
    """Print a row as lines of names and values, below its first value."""
    console = Console(soft_wrap=True, highlight=False)
    title, *others = [(name, _cell(value)) for name, value in row.items()]
    width = max((len(name) for name, _ in others), default=0)
    console.print(escaped(title[1]))
    for name, text in others:
        if text != "-":
            console.print(f"  {escaped(name):<{width}}  {escaped(text)}")


def print_text(text: str) -> None:
    """Print a paragraph, wrapped at words in a terminal."""
    Console(soft_wrap=columns() is None, highlight=False).print(escaped(text))


def print_wide(table: Table) -> None:
    """Print a table as wide as its content, however narrow the terminal is."""
    Console(soft_wrap=True, highlight=False, width=max(Console().width, _needed(table))).print(table)


def _needed(table: Table) -> int:
    console = Console()
    return Measurement.get(console, console.options.update(max_width=_WIDEST), table).maximum


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def print_json(value: Any) -> None:
    """Print a value for programs."""
    typer.echo(json.dumps(value, indent=1))


def escaped(text: str) -> str:
    """Escape Rich markup."""
    return escape(text)


def print_analysis(
    analysis: Any, written: list[Path], row: Callable[[Any], dict[str, Any]], remark: str, *, as_json: bool
) -> None:
    """Print an analysis: as JSON, or a summary table, a remark and the written files."""
    if as_json:
        print_json(analysis.as_json() | {"files": [str(file) for file in written]})
        return
    print_table([row(each) for each in analysis.summary])
    Console(soft_wrap=True, highlight=False).print(remark, style="dim")
    print_files(written, None)


def print_files(written: list[Path], page: Path | None) -> None:
    """Print the written files, pictures last."""
    console = Console(soft_wrap=True, highlight=False)
    pictures = [file for file in written if file.suffix == ".svg"]
    for file in [file for file in written if file.suffix in (".json", ".npz")] + pictures:
        console.print(f"{file.suffix[1:]:<8}{escaped(str(file))}")
    if page is not None:
        console.print(f"report  {escaped(str(page))}")
