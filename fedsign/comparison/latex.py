r"""A comparison in LaTeX: booktabs tables, and a document that compiles as is.

Bold and verdicts follow [Note: verdicts] in fedsign.comparison.verdict; with several conditions, only their mean has
them.  The caption says so, and lists rows that lack seeds.

Names come from the user.  Special characters are escaped, Greek letters become math, and characters that pdflatex does
not support become question marks.
"""

from collections.abc import Mapping, Sequence

from fedsign.comparison.headline import failure_sentences
from fedsign.comparison.labels import short_label
from fedsign.comparison.summary import Summary
from fedsign.comparison.tables import ResultRow, pooled, ratio_text, results
from fedsign.comparison.verdict import LOST, UNDECIDED
from fedsign.report.wording import NARROW_SPACE

_GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau "
    "upsilon phi chi psi omega"
)
_GREEK_CAPITALS = "Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega"  # the others look like Latin letters

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
    "[": "{[}",  # after \\ a bracket would start an optional length
    "]": "{]}",
    "ο": "o",
    **{letter: rf"$\{name}$" for letter, name in zip("αβγδεζηθικλμνξπρστυφχψω", _GREEK.split(), strict=True)},
    **{letter: rf"$\{name}$" for letter, name in zip("ΓΔΘΛΞΠΣΥΦΨΩ", _GREEK_CAPITALS.split(), strict=True)},
}

_NOTE = "% Written by FedSign (fedsign compare --export); needs \\usepackage{booktabs}.\n"


def escape(text: str) -> str:
    r"""Escape a text for LaTeX.

    >>> print(escape("fed_sign, 5 % & α"))
    fed\_sign, 5 \% \& $\alpha$
    """
    return "".join(_character(character) for character in text)


def results_table(summary: Summary) -> str:
    """The main table: strategies by conditions; with one condition, the detailed table."""
    return _by_condition(summary) if len(summary.conditions) > 1 else details_table(summary)


def details_table(summary: Summary) -> str:
    """The detailed table: all values of every strategy, grouped by condition."""
    scale = summary.scale
    unit = r" (\%)" if scale.percent else ""
    has_target = any(entry.to_target for entry in summary.entries)
    heads = [f"{escape(summary.metric_name.capitalize())}{unit}", f"Difference from {escape(summary.reference_label)}"]
    heads += ["Verdict"] if len(summary.conditions) == 1 else []
    heads += ["Rounds to target", "Speed-up", "Bytes to target"] if has_target else []
    heads += ["Bytes up"]
    lines: list[str] = []
    for number, table in enumerate(results(summary)):
        if table.condition:
            lines += [r"\addlinespace"] if number else []
            head = escape(table.condition + (f"; target {table.target}" if table.target else ""))
            lines.append(rf"\multicolumn{{{1 + len(heads)}}}{{l}}{{\textit{{{head}}}}} \\")
        lines += [_row(_cells(row, has_target, has_verdict=len(summary.conditions) == 1)) for row in table.rows]
    return _table(summary, heads, lines, is_detailed=True)


def document(summary: Summary, tables: Sequence[str], figures: Mapping[str, str]) -> str:
    """A document that compiles as is, with the tables, and the figures by file and caption."""
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
    """Strategies as rows, conditions as columns, then the mean over conditions with its verdict."""
    tables = results(summary)
    rows = {row.standing.strategy: row for row in pooled(summary)}
    lines, columns = [], [{row.entry.strategy: row for row in table.rows} for table in tables]
    for strategy, label in summary.labels.items():
        row = rows[strategy]
        values = [escape(column[strategy].whole_value) for column in columns]
        mean_cells = [_bold(escape(row.value), row.standing.is_bold), escape(_short(row.verdict))]
        lines.append(_row([_bold(escape(label), row.standing.is_bold), *values, *mean_cells]))
    heads = [*(escape(table.condition) for table in tables), "Mean", f"Beside {escape(summary.reference_label)}"]
    return _table(summary, heads, lines, is_detailed=False)


def _cells(row: ResultRow, has_target: bool, *, has_verdict: bool) -> list[str]:
    choice = f" ({row.choice})" if row.choice else ""
    verdict = [_short(row.verdict)] if has_verdict else []
    speed_up = ratio_text(row.entry.to_target.speed_up) if row.entry.to_target else ""
    taken = [row.rounds, speed_up, row.bytes_to_target] if has_target else []
    return [
        _bold(escape(row.entry.label), row.is_bold) + escape(choice),
        _bold(escape(row.whole_value), row.is_bold),
        *map(escape, [row.difference, *verdict, *taken, row.bytes_up]),
    ]


def _short(verdict: str) -> str:
    """A short form for narrow columns, explained in the caption."""
    return verdict.replace(UNDECIDED, "undecided").replace(LOST, "lost seeds")


def _caption(summary: Summary, *, is_detailed: bool) -> str:
    seeds, scale = summary.num_seeds, summary.scale
    caption = f"Test {summary.metric_name}{' in %' if scale.percent else ''}, {summary.last_rounds}"
    if seeds < 2:
        caption += ", one seed."
    else:
        caption += f"; mean ± standard deviation over {seeds} seeds."
        if not is_detailed or len(summary.conditions) == 1:
            over = "" if is_detailed else "over all conditions, "
            caption += (
                f" Verdicts are paired t-tests of all pairs of strategies, {over}Holm-corrected together "
                f"(5 % for one false verdict or more); undecided: {UNDECIDED}. "
                f"Bold: shown to be better than at least one strategy and worse than none."
            )
    if is_detailed:
        unit = ", in percentage points" if scale.percent else ""
        caption += f" Differences are paired by seed{', each with its own 95 % interval' if seeds > 1 else ''}{unit}."
        if summary.target is not None:
            caption += (
                f" Target: {scale.with_unit(summary.target)}; medians over all seeds, of the smoothed metric, "
                "sustained; in brackets how many reached it."
            )
    return escape(" ".join([caption, *failure_sentences(summary)]) + _lacking(summary))


def _lacking(summary: Summary) -> str:
    """Which means lack seeds, and what that does to their rank."""
    partly = [entry for entry in summary.entries if entry.seeds_of_all]
    if not partly:
        return ""
    rows = "; ".join(
        f"{', '.join(filter(None, [entry.label, short_label(entry.condition)]))}: {entry.seeds_of_all} "
        f"({entry.seed_troubles})"
        for entry in partly
    )
    rank = (
        " A row of which seeds diverged or failed ranks below those that have all."
        if any(entry.num_lost for entry in partly)
        else ""
    )
    return f" Means are not of all seeds for {rows}.{rank}"


def _table(summary: Summary, heads: Sequence[str], lines: Sequence[str], *, is_detailed: bool) -> str:
    body = "\n".join(f"    {line}" for line in [_row(["Strategy", *heads]), r"\midrule", *lines])
    label = "tab:comparison-details" if is_detailed else "tab:comparison"
    is_wide = len(heads) > 5 or any(entry.seeds_of_all for entry in summary.entries)
    size = "scriptsize" if len(heads) > 6 else "footnotesize" if is_wide else "small"
    return (
        f"{_NOTE}\\begin{{table}}[htbp]\n  \\centering\n  \\{size}\n"
        f"  \\setlength{{\\tabcolsep}}{{4pt}}\n  \\setlength{{\\belowcaptionskip}}{{6pt}}\n"
        f"  \\caption{{{_caption(summary, is_detailed=is_detailed)}}}\n  \\label{{{label}}}\n"
        f"  \\begin{{tabular}}{{@{{}}l{'r' * len(heads)}@{{}}}}\n"
        f"    \\toprule\n{body}\n    \\bottomrule\n  \\end{{tabular}}\n\\end{{table}}\n"
    )


def _row(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def _bold(text: str, is_bold: bool) -> str:
    return rf"\textbf{{{text}}}" if is_bold else text


def _character(character: str) -> str:
    if character.isascii():
        character = character if character.isprintable() else " "
    elif character not in _SPECIAL and not ("À" <= character <= "ÿ" and character not in "×÷ðþÐÞ"):
        return "?"
    return _SPECIAL.get(character, character)
