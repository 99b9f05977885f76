"""Comparison: strategies compared over seeds and conditions, with statistics and pages."""

from fedsign.capability import Capability

CAPABILITY = Capability(
    purpose="strategies compared over seeds and conditions, with statistics and pages",
    modules=(
        "fedsign.capabilities.comparison",
        "fedsign.comparison*",
        "fedsign.over_seeds",
        "fedsign.report.bars",
        "fedsign.report.comparison*",
        "fedsign.report.export",
        "fedsign.report.forest",
        "fedsign.report.labels",
        "fedsign.report.latex",
        "fedsign.report.lines",
        "fedsign.report.rows",
        "fedsign.report.tables",
        "fedsign.report.verdict",
        "simulations.comparison",
    ),
    commands={
        "compare": "simulations.comparison.command:compare",
    },
    api={
        "Comparison": "fedsign.comparison_folder:Comparison",
        "compare": "simulations.comparison.play:compare",
        "load_comparison": "fedsign.comparison_folder:load_comparison",
    },
    files=("docs/how-to/compare.md",),
)
