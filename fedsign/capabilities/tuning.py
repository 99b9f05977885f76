"""Tuning: hyperparameter search, and gradient-based tuning at equal compute."""

from fedsign.capability import Capability

CAPABILITY = Capability(
    purpose="hyperparameter search for one experiment, and gradient-based tuning at equal compute",
    modules=("simulations.tuning",),
    requires={
        "comparison": "the search, its runs on disk and the page",
        "bilevel": "the gradients that a search is set beside",
    },
    commands={
        "tune search": "simulations.tuning.command:search",
    },
    files=("docs/how-to/tune.md",),
)
