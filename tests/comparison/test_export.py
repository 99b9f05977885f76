"""The export: LaTeX that compiles, numbers that can be read back, figures with the same bytes every time."""

import csv
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsign.comparison.export import export
from fedsign.comparison.latex import details_table, document, escape, results_table
from fedsign.comparison.summary import Summary
from fedsign.comparison.verdict import standings
from fedsign.errors import ResultsError
from tests.unit.report_samples import ALPHAS, STRATEGIES, a_comparison

HOSTILE = r"50% of $x_1^2 & #{3}~\\ \input{/etc/passwd} [a] <b> 'α' Ω é 中 " + '"q"'

CASES: dict[str, dict[str, Any]] = {
    "usual": {"grid": {"strategy.gamma": [0.001, 0.01]}, "rounds": 12},
    "one seed": {"seeds": 1, "rounds": 3},
    "eight by two": {"strategies": list(STRATEGIES), "conditions": ALPHAS[:2], "rounds": 4, "seeds": 2},
    "diverged": {"metric": "rmse", "diverged": [("feddyn", 0)], "unfinished": [("fedsign", 1)], "rounds": 3},
    "failed": {
        "failed": [("feddyn", 0), ("fedprox", 1)],
        "unfinished": [("fedsign", 1)],
        "grid": {"strategy.gamma": [0.01]},
    },
    "nothing finished": {"unfinished": [(name, seed) for name in STRATEGIES for seed in range(5)]},
    "hostile": {"labels": dict.fromkeys(STRATEGIES, HOSTILE), "name": HOSTILE, "rounds": 2, "seeds": 2},
}


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def assert_is_latex(text: str) -> None:
    """Braces and environments are balanced, and every row of a table has as many cells as it has columns."""
    bare = re.sub(r"(?<!\\)%.*", "", text.replace(r"\\", "\n"))
    depth = 0
    for brace in re.findall(r"(?<!\\)[{}]", bare):
        depth += 1 if brace == "{" else -1
        assert depth >= 0
    assert depth == 0
    opened = []
    for what, name in re.findall(r"\\(begin|end){(\w+)}", bare):
        if what == "begin":
            opened.append(name)
        else:
            assert opened.pop() == name
    assert not opened
    for columns, body in re.findall(r"\\begin{tabular}{@{}(\w+)@{}}(.*?)\\end{tabular}", text, re.DOTALL):
        rows = [line for line in body.splitlines() if line.endswith(r"\\") and "multicolumn" not in line]
        assert len(rows) > 1
        assert {len(re.findall(r"(?<!\\)&", row)) + 1 for row in rows} == {len(columns)}


@pytest.mark.parametrize("name", CASES)
def test_tables_are_latex(name: str, tmp_path: Path) -> None:
    summary = a_comparison(tmp_path, **CASES[name])
    for text in (results_table(summary), details_table(summary)):
        assert_is_latex(text)
        assert text.isascii() or name == "hostile"
    assert_is_latex(document(summary, ["table.tex"], {"a.pdf": HOSTILE}))


@given(st.text(max_size=40))
def test_any_name_is_escaped_to_balanced_latex(text: str) -> None:
    """Beside the commands that `escape` writes itself, no character is left that means something to LaTeX."""
    escaped = escape(text)
    commands = r"\\(?:text\w+{}|dots{}|[&%$#_{},])|\$\\?\w+\$|\$-\$|{\[}|{\]}"
    assert not set(re.sub(commands, "", escaped)) & set('\\&%$#_^{}<>|[]"\n')
    assert all(character.isascii() or "À" <= character <= "ÿ" for character in escaped)


def test_bold_are_those_that_are_shown_to_be_better_than_one_and_worse_than_none(tmp_path: Path) -> None:
    """FedProx and FedDyn are 5 points ahead of FedAvg and 46 ahead of FedSign in each seed, within a tenth of a point.

    The two are not told apart.
    """
    summary = a_comparison(tmp_path, rounds=60)
    given = [(0.90, 0.91, 0.92), (0.95, 0.961, 0.97), (0.951, 0.96, 0.97), (0.5, 0.51, 0.52)]
    entries = [
        replace(entry, seeds=(0, 1, 2), values=values, mean=sum(values) / 3, std=0.01)
        for entry, values in zip(summary.entries, given, strict=True)
    ]
    table = details_table(replace(summary, entries=tuple(entries)))
    assert re.findall(r"\\textbf{(\w+)}", table) == ["FedProx", "FedDyn"]
    assert "Bold: shown to be better than at least one strategy and worse than none." in table


def test_of_several_conditions_only_their_mean_has_verdicts(tmp_path: Path) -> None:
    summary = a_comparison(tmp_path, conditions=ALPHAS[:2], rounds=30)
    table = results_table(summary)
    (row,) = [line for line in table.splitlines() if line.strip().startswith(r"\textbf{FedDyn}")]
    assert [("textbf" in cell) for cell in row.split(" & ")] == [True, False, False, True, False]
    assert r"better, p \textless{} 0.001" in row
    assert "textbf" not in details_table(summary)


def test_the_caption_names_the_rows_that_lack_seeds(tmp_path: Path) -> None:
    """In what is printed: nothing of it in a comment of LaTeX's."""
    summary = a_comparison(tmp_path, conditions=ALPHAS[:2], failed=[("feddyn", 0)], rounds=3)
    for table in (details_table(summary), results_table(summary)):
        printed = re.sub(r"(?<!\\)%.*", "", table)
        (caption,) = re.findall(r"\\caption{(.*?)}\n", printed)
        assert "FedDyn, alpha 10.0: 4 of 5 seeds (1 failed); FedDyn, alpha 1.0: 4 of 5 seeds (1 failed)." in caption
        assert "ranks below those that have all" in caption and "FedAvg" not in caption.partition("not of all seeds")[2]
        assert printed.count("(4 of 5 seeds)") == 2
    whole = details_table(a_comparison(tmp_path / "whole", rounds=3))
    assert "seeds for" not in whole and "of 5 seeds" not in whole


def test_csv_holds_the_numbers_in_full(tmp_path: Path) -> None:
    summary = a_comparison(tmp_path / "cells", conditions=ALPHAS[:2], rounds=5, seeds=3)
    export(summary, tmp_path / "out")
    rows = rows_of(tmp_path / "out" / "table.csv")
    assert len(rows) == len(summary.entries) == 8
    for row, entry in zip(rows, summary.entries, strict=True):
        assert row["strategy"] == entry.strategy and row["partition.alpha"] == str(entry.condition["partition.alpha"])
        assert float(row["mean"]) == entry.mean and float(row["std"]) == entry.std
        assert tuple(map(float, row["values"].split())) == entry.values
        if entry.difference is None:
            assert row["difference"] == row["difference_low"] == ""
        else:
            found = [float(row[key]) for key in ("difference", "difference_low", "difference_high")]
            assert found == [entry.difference.mean, entry.difference.low, entry.difference.high]
    rows = rows_of(tmp_path / "out" / "statistics.csv")
    for row, standing in zip(rows, standings(summary).rows, strict=True):
        assert (row["strategy"], row["verdict"], row["bold"]) == (
            standing.strategy, standing.says, str(int(standing.is_bold)),
        )  # fmt: skip
        assert row["p_corrected"] == ("" if standing.p is None else repr(standing.p))
        low, high = float(row["interquartile_mean_low"]), float(row["interquartile_mean_high"])
        assert low <= float(row["interquartile_mean"]) <= high
    assert len(rows_of(tmp_path / "out" / "pairs.csv")) == 4 * 3 / 2
    by_round = rows_of(tmp_path / "out" / "rounds.csv")
    assert len(by_round) == 8 * 5
    curve = summary.entries[0].curves["accuracy"]
    assert [float(row["accuracy_mean"]) for row in by_round[:5]] == list(curve.mean)
    assert [float(row["accuracy_std"]) for row in by_round[:5]] == list(curve.std)


def test_cells_are_the_lines_of_the_runs(tmp_path: Path) -> None:
    """From rounds.jsonl of each run: the mean over the seeds is the curve."""
    summary = a_comparison(tmp_path / "cells", strategies=["fedavg", "feddyn"], rounds=4, seeds=3)
    export(summary, tmp_path / "out")
    rows = rows_of(tmp_path / "out" / "cells.csv")
    assert len(rows) == 2 * 3 * 4 and {row["seed"] for row in rows} == {"0", "1", "2"}
    last = [float(row["accuracy"]) for row in rows if row["strategy"] == "feddyn" and row["round"] == "4"]
    assert sum(last) / 3 == pytest.approx(summary.entries[1].curves["accuracy"].mean[-1])
    lines = (summary.entries[0].folders[0] / "rounds.jsonl").read_text().splitlines()
    assert float(rows[0]["loss"]) == json.loads(lines[0])["loss"]


def test_a_run_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    summary = a_comparison(tmp_path / "cells", rounds=2, seeds=1)
    (summary.entries[0].folders[0] / "rounds.jsonl").write_text("{\n")
    with pytest.raises(ResultsError, match=r"rounds\.jsonl"):
        export(summary, tmp_path / "out")


@pytest.mark.parametrize(
    "name", [name if name == "hostile" else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_every_figure_is_there_twice_and_the_document_compiles(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    written = export(a_comparison(tmp_path / "cells", **CASES[name]), folder)
    assert {path for path in folder.rglob("*") if path.is_file()} == set(written)  # and nothing half-written
    stems = [{path.stem for path in written if path.suffix == suffix} for suffix in (".pdf", ".svg")]
    assert stems[0] - {"paper"} == stems[1]
    if name == "usual":
        curves = {"accuracy", "loss", "train-loss", "client-drift"}
        described = {"interquartile-mean", "performance-profile", "probability-of-improvement", "critical-difference"}
        assert stems[1] == curves | {"differences", "rounds-to-target", "bytes-to-target", "clients"} | described
    for path in written:
        if path.suffix == ".svg":
            ElementTree.parse(path)
        if path.suffix == ".pdf":
            assert path.read_bytes().startswith(b"%PDF") and b"/Type3" not in path.read_bytes()
        if path.suffix == ".tex":
            assert_is_latex(path.read_text(encoding="utf-8"))
    if shutil.which("pdflatex"):
        command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", "paper.tex"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=120)
        assert done.returncode == 0, done.stdout[-2000:]
        assert "Overfull \\hbox" not in done.stdout or name == "hostile"


@pytest.mark.slow
def test_the_same_summary_gives_the_same_bytes(tmp_path: Path) -> None:
    summary = a_comparison(tmp_path / "cells", rounds=12, seeds=2)
    folders = [tmp_path / name for name in ("one", "two")]
    first, second = (
        {path.relative_to(folder): path.read_bytes() for path in export(summary, folder)} for folder in folders
    )
    assert first == second and len(first) > 10


def test_figures_are_a_column_wide(tmp_path: Path) -> None:
    """3.3 inches are 237.6 points of a PDF; the white around the drawing is cut off."""
    written = export(a_comparison(tmp_path / "cells", rounds=12), tmp_path / "out")
    widths = {
        path.stem: float(re.findall(rb"/MediaBox \[ 0 0 ([\d.]+)", path.read_bytes())[0])
        for path in written
        if path.suffix == ".pdf"
    }
    assert widths and all(220 < width <= 241 for width in widths.values()), widths


def test_settings_of_matplotlib_are_neither_changed_nor_obeyed(tmp_path: Path) -> None:
    summary = a_comparison(tmp_path / "cells", strategies=["fedavg", "feddyn"], rounds=3, seeds=2)
    export(summary, tmp_path / "plain")
    with matplotlib.rc_context({"font.size": 30, "lines.linewidth": 9, "axes.facecolor": "red"}):
        before = dict(matplotlib.rcParams)
        export(summary, tmp_path / "styled")
        assert dict(matplotlib.rcParams) == before
    plain, styled = (tmp_path / name / "figures" / "accuracy.svg" for name in ("plain", "styled"))
    assert plain.read_bytes() == styled.read_bytes()


def test_matplotlib_is_loaded_by_an_export_only() -> None:
    code = (
        "import sys, fedsign.comparison.export, fedsign.comparison.report; print({'torch', 'flwr', 'matplotlib'} & "
        "set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_folder_that_cannot_be_written_is_a_results_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    summary: Summary = a_comparison(tmp_path / "cells", rounds=2, seeds=1)
    with pytest.raises(ResultsError, match="taken"):
        export(summary, tmp_path / "taken")
