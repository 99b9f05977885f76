"""Comparison: strategies over seeds and conditions, with statistics and pages."""

from fedsign.capability import Capability

CAPABILITY = Capability(
    purpose="strategies compared over seeds and conditions, with statistics, tables, and figures",
    modules=(
        "fedsign.comparison",
        "simulations.comparison",
    ),
    commands={
        "compare": "simulations.comparison.command:compare",
    },
    api={
        "Comparison": "fedsign.comparison.folder:Comparison",
        "compare": "simulations.comparison.execution:compare",
        "load_comparison": "fedsign.comparison.folder:load_comparison",
    },
    extras=("tune",),
    extends={"verify": "fedsign.comparison.folder:verify"},
    files=("docs/how-to/compare.md", "docs/tuned.md", "benchmarks/tuned/*"),
)
