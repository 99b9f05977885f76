"""The sign-agreement section of a run's report."""

from fedsign.report.run_charts import round_chart
from fedsign.report.sections import Section
from fedsign.report.summary import Run

_ABOUT = (
    "The share of parameters whose signs are equal, of those where both have one. "
    "Of signs without any relation half are: "
    "below 0.5, clients pull against each other."
)

_CURVES = {
    "client’s and received model": "signs_models_global",
    "two clients’ models": "signs_models",
    "two clients’ updates": "signs_updates",
    "client’s update and received model": "signs_updates_global",
}


def section(run: Run) -> Section | None:
    """Charts of the sign agreement over all layers, if it was recorded."""
    shown = {name: run.values(key) for name, key in _CURVES.items() if run.has(key)}
    if not shown:
        return None
    return Section(title="Signs", charts=[round_chart(run, "Agreement of signs", shown, text=_ABOUT)])
