"""UI: runs and comparisons in the browser."""

from fedsign.capability import Capability

CAPABILITY = Capability(
    purpose="runs and comparisons in the browser, live while they run",
    modules=("simulations.ui",),
    requires={"client_metrics": "a client's accuracy is computed there"},
    commands={
        "ui": "simulations.ui.command:ui",
    },
    files=("docs/how-to/browse-runs.md", "benchmarks/alone/browsing.py"),
)
