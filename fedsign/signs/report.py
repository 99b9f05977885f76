"""How far the signs of a round's clients agreed, on a run's page."""

from fedsign.report.curves import Curve, Style, chart
from fedsign.report.run_charts import Chart, described
from fedsign.report.sections import Section
from fedsign.report.summary import Run

_ABOUT = (
    "The share of parameters whose signs are equal, of those where both have one. Of signs without any relation half are: "
    "below 0.5, clients pull against each other."
)


_CURVES: dict[str, tuple[str, Style]] = {  # figure of a round -> name, style
    "signs_models_global": ("models, global", "first"),
    "signs_models": ("models", "faint"),
    "signs_updates": ("updates", "second"),
    "signs_updates_global": ("updates, global", "third"),
}
_KEY = [
    ("client’s and received model", "first"),
    ("two clients’ models", "faint"),
    ("two clients’ updates", "second"),
    ("client’s update and received model", "third"),
]


def section(run: Run) -> Section | None:
    """The agreement of signs over all layers, where it was watched."""
    shown = {key: value for key, value in _CURVES.items() if run.has(key)}
    if not shown:
        return None
    curves = [Curve(name=name, values=run.values(key), style=style) for key, (name, style) in shown.items()]
    label = "; ".join(described(run, key, name) for key, (name, _) in shown.items())
    svg = chart(run.round_numbers, curves, label=label)
    return Section(title="Signs", charts=[Chart(title="Agreement of signs", svg=svg, key=_KEY, text=_ABOUT)])
