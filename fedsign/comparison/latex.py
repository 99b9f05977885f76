r"""A comparison as LaTeX: booktabs tables, and a document that compiles as it is.

Bold are the best mean and all strategies that the seeds do not tell apart from it: those of which the 95 % interval of
the paired difference to the best includes 0.  The caption says so, and which rows lack seeds.

Names are a user's.  What LaTeX gives a meaning is escaped, Greek letters become mathematics, and a character that
pdflatex does not know becomes a question mark.
"""

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from fedsign.comparison.bars import bytes_to_target
from fedsign.comparison.labels import (
    Scale,
    entries_of,
    last_rounds,
    metric_name,
    num_seeds,
    reference_label,
    scale_of,
    seeds_of_all,
    short_label,
    strategies_of,
)
from fedsign.comparison.summary import Entry, Summary
from fedsign.comparison.tables import mean_and_spread, seed_troubles, target_text
from fedsign.comparison.verdict import as_good_as_best
from fedsign.report.wording import MISSING, NARROW_SPACE, byte_count

_SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{character: "\\" + character for character in "&%$#_{}"},
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''",
    NARROW_SPACE: r"\,",
    "\u00a0": "~",
    "–": "--",
    "−": "$-$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "·": r"$\cdot$",
    "…": r"\dots{}",
    "[": "{[}",  # after \\ a bracket would be taken for a length
    "]": "{]}",
}

_NOTE = "% Written by FedSign (fedsign compare --export); needs \\usepackage{booktabs}.\n"


def escape(text: str) -> str:
    r"""A text as LaTeX prints it.

    >>> print(escape("fed_sign, 5 % & α"))
    fed\_sign, 5 \% \& $\alpha$
    """
    return "".join(_character(character) for character in text)


def results_table(summary: Summary) -> str:
    """The table of a paper: strategies by conditions; with one condition, all that is known of it."""
    return _by_condition(summary) if len(summary.conditions) > 1 else details_table(summary)


def details_table(summary: Summary) -> str:
    """Every figure of every strategy, condition below condition."""
    scale = scale_of(summary)
    unit = r" (\%)" if scale.percent else ""
    has_target = any(entry.to_target for entry in summary.entries)
    heads = [f"{escape(metric_name(summary).capitalize())}{unit}", f"Difference to {escape(reference_label(summary))}"]
    heads += ["Rounds to target", "Bytes to target"] if has_target else []
    heads += ["Bytes up"]
    lines = [_row(["Strategy", *heads]), r"\midrule"]
    for number, condition in enumerate(summary.conditions):
        entries = entries_of(summary, condition)
        if condition:
            lines += [r"\addlinespace"] if number else []
            lines.append(
                rf"\multicolumn{{{1 + len(heads)}}}{{l}}{{\textit{{{_condition(entries, condition, scale)}}}}} \\"
            )
        best = as_good_as_best(entries, higher_is_better=summary.higher_is_better)
        lines += [_row(_cells(summary, entry, entry in best, has_target)) for entry in entries]
    return _table(
        summary,
        "l" + "r" * len(heads),
        lines,
        caption=_caption(summary, all_figures=True),
        label="tab:comparison-details",
    )


def document(summary: Summary, tables: Sequence[str], figures: Mapping[str, str]) -> str:
    """A document with the tables and the figures, by file and caption, that compiles as it is."""
    parts = [
        r"\documentclass{article}",
        r"\usepackage[utf8]{inputenc}",
        r"\usepackage[a4paper,margin=20mm]{geometry}",
        r"\usepackage{booktabs}",
        r"\usepackage{graphicx}",
        r"\begin{document}",
        rf"\section*{{{escape(summary.name)}}}",
        *(rf"\input{{{table}}}" for table in tables),
    ]
    for file, caption in figures.items():
        parts += [
            r"\begin{figure}[htbp]",
            r"  \centering",
            rf"  \includegraphics{{{file}}}",
            rf"  \caption{{{escape(caption)}}}",
            r"\end{figure}",
        ]
    return "\n".join([*parts, r"\end{document}", ""])


def _by_condition(summary: Summary) -> str:
    """Strategies below each other, conditions side by side."""
    scale, lines = scale_of(summary), []
    lines += [_row(["Strategy", *(escape(short_label(condition)) for condition in summary.conditions)]), r"\midrule"]
    columns = [
        {entry.strategy: (entry, entry in best) for entry in entries}
        for entries in (entries_of(summary, condition) for condition in summary.conditions)
        for best in [as_good_as_best(entries, higher_is_better=summary.higher_is_better)]
    ]
    for strategy, label in strategies_of(summary).items():
        cells = [escape(label)]
        for column in columns:
            entry, is_best = column[strategy]
            cells.append(_bold(escape(mean_and_spread(entry, scale)), is_best))
        lines.append(_row(cells))
    caption = _caption(summary, all_figures=False)
    return _table(summary, "l" + "r" * len(columns), lines, caption=caption, label="tab:comparison")


def _cells(summary: Summary, entry: Entry, is_best: bool, has_target: bool) -> list[str]:
    scale, taken = scale_of(summary), entry.to_target
    choice = f" ({short_label(entry.choice)})" if entry.choice else ""
    difference = MISSING if entry.difference is None else scale.interval(entry.difference)
    cells = [
        _bold(escape(entry.label), is_best) + escape(choice),
        _bold(escape(mean_and_spread(entry, scale)), is_best),
        escape("reference" if entry.strategy == summary.reference else difference),
    ]
    if has_target:
        rounds = taken.rounds if taken else None
        total = bytes_to_target(taken) if taken else None
        cells.append(escape(target_text(entry, rounds, f"{rounds or 0:,.1f}".removesuffix(".0"))))
        cells.append(escape(target_text(entry, total, byte_count(round(total or 0)))))
    return [*cells, escape(MISSING if entry.bytes_up is None else byte_count(round(entry.bytes_up)))]


def _condition(entries: Sequence[Entry], condition: Mapping[str, Any], scale: Scale) -> str:
    target = next((entry.to_target.target for entry in entries if entry.to_target), None)
    return escape(short_label(condition) + ("" if target is None else f"; target {scale.with_unit(target)}"))


def _caption(summary: Summary, *, all_figures: bool) -> str:
    seeds, scale = num_seeds(summary.entries), scale_of(summary)
    said = f"Test {metric_name(summary)}{' in %' if scale.percent else ''}, {last_rounds(summary)}"
    if seeds < 2:
        said += ", one seed. Bold: the best."
    else:
        said += (
            f"; mean ± standard deviation over {seeds} seeds. Bold: the best mean and all whose paired difference to it has "
            "a 95 % interval (Student's t) that includes 0."
        )
    if all_figures:
        unit = ", in percentage points" if scale.percent else ""
        said += f" Differences are paired by seed{', with their 95 % intervals' if seeds > 1 else ''}{unit}."
        if summary.target is not None:
            said += f" Target: {scale.with_unit(summary.target)}; medians over the seeds that reached it."
    return escape(said + _lacking(summary))


def _lacking(summary: Summary) -> str:
    """Which means are not of all seeds, and what that does to their rank."""
    partly = [entry for entry in summary.entries if seeds_of_all(entry)]
    if not partly:
        return ""
    rows = "; ".join(
        f"{', '.join(filter(None, [entry.label, short_label(entry.condition)]))}: {seeds_of_all(entry)} ({seed_troubles(entry)})"
        for entry in partly
    )
    rank = (
        " A row of which seeds diverged or failed ranks below those that have all."
        if any(entry.num_lost for entry in partly)
        else ""
    )
    return f" Means are not of all seeds for {rows}.{rank}"


def _table(summary: Summary, columns: str, lines: Sequence[str], *, caption: str, label: str) -> str:
    body = "\n".join(f"    {line}" for line in lines)
    size = "footnotesize" if any(seeds_of_all(entry) for entry in summary.entries) else "small"  # wider cells
    return (
        f"{_NOTE}\\begin{{table}}[htbp]\n  \\centering\n  \\{size}\n  \\setlength{{\\tabcolsep}}{{4pt}}\n  \\setlength{{\\belowcaptionskip}}{{6pt}}\n"
        f"  \\caption{{{caption}}}\n  \\label{{{label}}}\n"
        f"  \\begin{{tabular}}{{@{{}}{columns}@{{}}}}\n    \\toprule\n{body}\n    \\bottomrule\n  \\end{{tabular}}\n\\end{{table}}\n"
    )


def _row(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def _bold(text: str, is_bold: bool) -> str:
    return rf"\textbf{{{text}}}" if is_bold else text


def _character(character: str) -> str:
    if character in _SPECIAL:
        return _SPECIAL[character]
    if character.isascii():
        return character if character.isprintable() else " "
    name = unicodedata.name(character, "")
    if name.startswith(("GREEK SMALL LETTER ", "GREEK CAPITAL LETTER ")):
        return _greek(character, name)
    return character if "À" <= character <= "ÿ" and character not in "×÷ðþÐÞ" else "?"


def _greek(character: str, name: str) -> str:
    """A plain Greek letter as mathematics; capitals that look like Latin ones have no command."""
    letter = name.rsplit(" ", 1)[-1].lower().replace("lamda", "lambda")
    if len(name.split()) != 4 or letter not in _GREEK:
        return "?"
    if character.islower():
        return "o" if letter == "omicron" else rf"$\{letter}$"
    return rf"$\{letter.capitalize()}$" if letter in _CAPITALS else "?"


_GREEK = frozenset(
    [
        *("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu"),
        *("nu", "xi", "omicron", "pi", "rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega"),
    ]
)
_CAPITALS = frozenset(["gamma", "delta", "theta", "lambda", "xi", "pi", "sigma", "upsilon", "phi", "psi", "omega"])
