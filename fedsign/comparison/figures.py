"""The figures of a comparison for a paper, one column wide."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from fedsign.comparison import charts
from fedsign.comparison.labels import metric_name, reference_label, short_label
from fedsign.comparison.summary import Summary, values_label
from fedsign.report.figures import Draw, draw
from fedsign.report.population import Population, draw_clients


def all_figures(summary: Summary) -> dict[str, tuple[str, Draw]]:
    """File stem -> (caption, what draws it), for every figure of which there is something to see."""
    found: dict[str, tuple[str, Draw]] = {}
    names = {summary.metric: f"Test {metric_name(summary)}", "loss": "Test loss", "train_loss": "Training loss"}
    for key, title in {**names, "client_drift": "Client drift"}.items():
        for condition in summary.conditions:
            chart = charts.curves(summary, condition, key, title=title)
            if chart is not None:
                found[_stem(key, condition)] = (_captioned(f"{title} over the rounds", condition), partial(draw, chart))
    differences = charts.differences(summary)
    if differences is not None:
        said = (
            f"Paired differences of the test {metric_name(summary)} to {reference_label(summary)}, with 95 % intervals"
        )
        found["differences"] = (said, partial(draw, differences))
    found |= {stem: (chart.title, partial(draw, chart)) for stem, chart in charts.to_target(summary).items()}
    for condition in summary.conditions:
        partition = summary.population.get(values_label(condition)) or {}
        if partition.get("counts"):
            caption = _captioned("Samples of the clients", condition)
            found[_stem("clients", condition)] = (caption, partial(draw_clients, Population.of(partition)))
    return found


def _captioned(said: str, condition: Mapping[str, Any]) -> str:
    return f"{said}, {short_label(condition)}" if condition else said


def _stem(key: str, condition: Mapping[str, Any]) -> str:
    """A file's name that every system and LaTeX take."""
    text = "-".join([key.replace("_", "-"), *(short_label(condition).replace(", ", " ").split())])
    return "".join(character if character.isascii() and character.isalnum() else "-" for character in text)
