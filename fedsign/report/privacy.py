"""What a run's page says of differential privacy: the budget spent, the clipping norm, and what may be published."""

from dataclasses import dataclass
from typing import Any

from fedsign.report import wording
from fedsign.report.curves import Curve, chart
from fedsign.report.run_charts import Chart
from fedsign.report.summary import Run

_OF = {
    "local": "Clients clip their updates and add noise before they reply, so that the server sees nothing else of them.",
    "": "The server, which is trusted, clips every update and adds noise to their mean.",
}
_NEIGHBOURS = (
    "(ε, δ) is for one client whose data are replaced by any others; which clients there are, and that one of them failed, is not "
    "hidden."
)
_PUBLISH = {
    "local": "What clients have sent may be published, with all that was made of it. The split of the data on this page may not.",
    "": "The models may be published, and figures on test samples that are nobody’s. This page, rounds.jsonl and partition.json are the "
    "operator’s: they say who took part, and what data the clients hold.",
}
_SECRET = "ε counts on nobody knowing which clients took part in a round."


@dataclass(frozen=True, kw_only=True, slots=True)
class Privacy:
    """A section of the page."""

    figure: str  # the budget in words
    sentences: list[str]
    charts: list[Chart]


def privacy(run: Run) -> Privacy | None:
    """None for a run without."""
    part = run.section("privacy")
    name = str(part.get("name", "none"))
    if name == "none" or not run.rounds:
        return None
    which = name if name in _OF else ""
    sentences = [_OF[which], _NEIGHBOURS]
    if part.get("sampling") == "secret":
        sentences.append(_SECRET)
    return Privacy(
        figure=_budget(run, part),
        sentences=[*sentences, _PUBLISH[which]],
        charts=[*_chart(run, "epsilon", "ε spent so far"), *_chart(run, "clip_norm", "Clipping norm")],
    )


def _budget(run: Run, part: dict[str, Any]) -> str:
    spent = run.rounds[-1].get("epsilon")
    epsilon = "no guarantee, as there is no noise" if spent is None else f"ε = {wording.figure(spent)}"
    total = run.releases[-1].get("epsilon") if run.releases else None
    more = f" (ε = {wording.figure(total)} with rounds that were dropped)" if spent and total and total > spent else ""
    return f"{epsilon}, δ = {part.get('delta', wording.MISSING)}{more}"


def _chart(run: Run, key: str, title: str) -> list[Chart]:
    if not run.has(key):
        return []
    numbers, values = [int(line["round"]) for line in run.rounds], run.values(key)
    label = f"{title} over {wording.plural(len(numbers), 'round')}, up to {wording.figure(values[-1])}"
    return [
        Chart(title=title, svg=chart(numbers, [Curve(name=title, values=values, style="first")], label=label), key=[])
    ]
