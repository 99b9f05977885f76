"""Export a comparison for a paper: tables, numbers, figures, and a document that includes them.

DIR/
    table.tex      the table of results (booktabs)
    details.tex    all values of every strategy, if table.tex has only the means of several conditions
    table.csv      one row per condition and strategy, all numbers in full precision
    statistics.csv one row per strategy over all conditions: verdicts and descriptive statistics
    pairs.csv      one row per test of two strategies
    trials.csv     hyperparameters tried, with their validation metrics
    tuning.json    for a hyperparameter search: budgets, seeds and search spaces
    rounds.csv     one row per condition, strategy and round: means and standard deviations over seeds
    cells.csv      one row per run and round
    figures/       every figure as .pdf and .svg
    paper.tex      a document with the tables and the figures
    README.txt
    .fedsign.json  marks these files as FedSign's, so that the next export replaces them
The same summary gives the same bytes.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fedsign.comparison import charts, latex, statistics_charts
from fedsign.comparison.labels import short_label
from fedsign.comparison.statistics_charts import Statistics, statistics
from fedsign.comparison.summary import Summary, values_label
from fedsign.comparison.tables import frame_of, names, pair_rows, statistics_rows, table_rows
from fedsign.report import figures
from fedsign.report.population import Population, draw_clients
from fedsign.storage.disk import write_text
from fedsign.storage.owned import MARK, check_writable, writing
from fedsign.storage.results import Record, RunFolder

PRODUCT = "export"
_ALWAYS = (
    "table.tex",
    "table.csv",
    "statistics.csv",
    "pairs.csv",
    "rounds.csv",
    "cells.csv",
    "paper.tex",
    "README.txt",
)

_README = """\
{name}

table.tex    \\input this in a paper that has \\usepackage{{booktabs}}
paper.tex    tables and figures in one document: pdflatex paper.tex
table.csv    one line for each condition and strategy
statistics.csv   one line for each strategy over all conditions: verdict, interquartile mean, probability of
             improvement, mean rank
pairs.csv    one line for each test of two strategies
trials.csv   hyper-parameters that were tried, with their validation figures
tuning.json  with a search of settings: budgets, seeds, and where was looked
rounds.csv   one line for each condition, strategy and round, over the seeds
cells.csv    one line for each run and round
figures/     the figures, 3.3 inches wide, as PDF and SVG

Numbers in the .csv files are as measured: an accuracy of 0.95 is 95 %, bytes are bytes. An empty field: no number,
since a run diverged, failed, or has not ended. "difference" is to {reference}, paired by seed, with a 95 % confidence
interval (Student's t) of each by itself. "verdict" and "bold" come from the tests of all pairs, "p_corrected" (Holm):
among equal strategies one false verdict or more has a probability of at most 5 %. Intervals of the interquartile mean
and of the probability of improvement are of a stratified bootstrap, and describe. "rounds_to_target" is a median over
all seeds; with "to_target_is_bound" it is more than that, since runs have not reached the target.
"""


def export(summary: Summary, folder: Path) -> list[Path]:
    """Write all files into a folder, which is created if needed, in place of an earlier export; returns their paths.

    Raises:
        ResultsError: the folder cannot be written, a file in it is not FedSign's, or a run cannot be read.
    """
    folder = folder.expanduser()
    results = statistics(summary)
    texts = {
        "table.tex": latex.results_table(summary),
        **({"details.tex": latex.details_table(summary)} if len(summary.conditions) > 1 else {}),
        "table.csv": _csv(table_rows(summary)),
        "statistics.csv": _csv(statistics_rows(summary, results)),
        "pairs.csv": _csv(pair_rows(summary)),
        **({"trials.csv": _csv(_trial_rows(summary))} if summary.trials else {}),
        **({"tuning.json": json.dumps(summary.tuning, indent=1) + "\n"} if summary.tuning else {}),
        "rounds.csv": _csv(_round_rows(summary)),
        "cells.csv": _csv(_cell_rows(summary)),
    }
    drawn = _figures(summary, results)
    tables = [name for name in texts if name.endswith(".tex")]
    shown = {f"figures/{stem}.pdf": caption for stem, (caption, _) in drawn.items()}
    texts["paper.tex"] = latex.document(summary, tables, shown)
    texts["README.txt"] = _README.format(name=summary.name, reference=summary.reference)
    with writing(folder, PRODUCT) as staged:
        written = [staged / name for name in texts]
        for path, text in zip(written, texts.values(), strict=True):
            write_text(path, text)
        for stem, (_, draw) in drawn.items():
            written += figures.write(draw, *(staged / "figures" / f"{stem}.{format}" for format in ("pdf", "svg")))
    return [*(folder / path.relative_to(staged) for path in written), folder / MARK]


def check_export(folder: Path) -> None:
    """Raise ResultsError if `export` would refuse the folder, as far as its files are known before the runs."""
    check_writable(folder, *_ALWAYS)


def _trial_rows(summary: Summary) -> list[Record]:
    return [
        {
            **trial.condition,
            "strategy": trial.strategy,
            **({} if trial.number is None else {"trial": trial.number + 1, "num_lost": trial.num_lost}),
            "choice": json.dumps(dict(trial.choice)),
            "validation_mean": trial.validation_mean,
            "validation_std": trial.validation_std,
            "chosen": int(trial.chosen),
        }
        for trial in summary.trials
    ]


def _round_rows(summary: Summary) -> list[Record]:
    rows: list[Record] = []
    for entry in summary.entries:
        rounds = next((curve.rounds for curve in entry.curves.values()), ())  # the same for all curves
        for position, round in enumerate(rounds):
            row = {**names(entry), "round": round}
            for name, curve in entry.curves.items():
                row |= {f"{name}_mean": curve.mean[position], f"{name}_std": curve.std[position]}
            rows.append(row)
    return rows


def _cell_rows(summary: Summary) -> list[Record]:
    rows: list[Record] = []
    for entry in summary.entries:
        for seed, path in zip(entry.seeds, entry.folders, strict=True):
            for record in RunFolder(path).rounds():
                metrics_of_round = {key: value for key, value in record.items() if not isinstance(value, list)}
                num_failures = len(record.get("failures") or ())
                rows.append({**names(entry), "seed": seed, **metrics_of_round, "num_failures": num_failures})
    return rows


def _csv(rows: Sequence[Record]) -> str:
    """CSV text: floats in full precision, None as an empty field."""
    # pandas would write the system's line ends, and bytes would depend on it
    return str(frame_of(rows).to_csv(index=False, lineterminator="\n"))


def _figures(summary: Summary, statistics: Statistics) -> dict[str, tuple[str, figures.Draw]]:
    """File stem -> (caption, drawing function), for every figure with data."""
    drawings: dict[str, tuple[str, figures.Draw]] = {}
    names = {summary.metric: f"Test {summary.metric_name}", "loss": "Test loss", "train_loss": "Training loss"}
    for key, title in {**names, "client_drift": "Client drift"}.items():
        for condition in summary.conditions:
            chart = charts.curves(summary, condition, key, title=title)
            if chart is not None:
                drawings[_stem(key, condition)] = (
                    _captioned(f"{title} over the rounds", condition),
                    partial(figures.draw, chart),
                )
    differences = charts.differences(summary)
    if differences is not None:
        text = f"Paired differences of the test {summary.metric_name} to {summary.reference_label}, with 95 % intervals"
        drawings["differences"] = (text, partial(figures.draw, differences))
    drawings |= {stem: (chart.title, partial(figures.draw, chart)) for stem, chart in charts.to_target(summary).items()}
    drawings |= {
        stem: (f"{chart.title}. {chart.text}", partial(figures.draw, chart))
        for stem, chart in statistics_charts.charts(summary, statistics).items()
    }
    for condition in summary.conditions:
        partition = summary.population.get(values_label(condition)) or {}
        if partition.get("counts"):
            caption = _captioned("Samples of the clients", condition)
            drawings[_stem("clients", condition)] = (caption, partial(draw_clients, Population.of(partition)))
    return drawings


def _captioned(caption: str, condition: Mapping[str, Any]) -> str:
    return f"{caption}, {short_label(condition)}" if condition else caption


def _stem(key: str, condition: Mapping[str, Any]) -> str:
    """A file name that every file system and LaTeX accept."""
    text = "-".join([key.replace("_", "-"), *(short_label(condition).replace(", ", " ").split())])
    return "".join(character if character.isascii() and character.isalnum() else "-" for character in text)
