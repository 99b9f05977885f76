"""The privacy section of a run's report: budget spent, clipping norm, and what may be published."""

from typing import Any

from markupsafe import Markup

from fedsign.report import wording
from fedsign.report.run_charts import round_chart
from fedsign.report.sections import Section
from fedsign.report.summary import Fact, Run
from fedsign.storage.results import RunFolder

_OF = {
    "local": (
        "Clients clip their updates and add noise before they reply, so that the server sees nothing else of them."
    ),
    "": "The server, which is trusted, clips every update and adds noise to their mean.",
}
_NEIGHBORS = (
    "(ε, δ) is for one client whose data are replaced by any others; which clients there are, "
    "and that one of them failed, is not "
    "hidden."
)
_PUBLISH = {
    "local": (
        "What clients have sent may be published, with all that was made of it. "
        "The split of the data on this page may not."
    ),
    "": (
        "The models may be published, and figures on test samples that are nobody’s. "
        "This page, rounds.jsonl and partition.json are the operator’s: "
        "they say who took part, and what data the clients hold."
    ),
}
_SECRET = "ε counts on nobody knowing which clients took part in a round."


def section(run: Run) -> Section | None:
    """The section; None for a run without privacy."""
    part = run.section("privacy")
    name = str(part.get("name", "none"))
    if name == "none" or not run.rounds:
        return None
    mechanism = name if name in _OF else ""
    sentences = [_OF[mechanism], _NEIGHBORS]
    if part.get("sampling") == "secret":
        sentences.append(_SECRET)
    spent = run.rounds[-1].get("epsilon")
    return Section(
        title="Privacy",
        lead=Markup("<b>{}.</b> {}").format(_budget(run, part), " ".join([*sentences, _PUBLISH[mechanism]])),
        facts=[
            Fact(
                name="epsilon",
                value="infinite" if spent is None else f"{spent:.4g}",
                remark=f"at delta {part.get('delta', wording.MISSING)}",
            )
        ],
        charts=[
            round_chart(run, title, {title: run.values(key)})
            for key, title in (("epsilon", "ε spent so far"), ("clip_norm", "Clipping norm"))
            if run.has(key)
        ],
    )


def _budget(run: Run, part: dict[str, Any]) -> str:
    spent = run.rounds[-1].get("epsilon")
    epsilon = "no guarantee, as there is no noise" if spent is None else f"ε = {wording.figure(spent)}"
    releases = RunFolder(run.path).records("privacy.jsonl")
    total = releases[-1].get("epsilon") if releases else None
    more = f" (ε = {wording.figure(total)} with rounds that were dropped)" if spent and total and total > spent else ""
    return f"{epsilon}, δ = {part.get('delta', wording.MISSING)}{more}"
