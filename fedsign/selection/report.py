"""Facts of model selection in the head of a run's page."""

from fedsign.report.sections import Section
from fedsign.report.summary import Fact, Run
from fedsign.report.wording import figure, is_share
from fedsign.storage.results import RunFolder, read_metadata


def section(run: Run) -> Section | None:
    """The round of the best model, and why the run stopped early."""
    facts = []
    best = RunFolder(run.path).best
    if run.section("results").get("keep_best", False) is not False and best.exists():
        held = read_metadata(best)
        name, value = held["metric"], figure(float(held["value"]), percent=is_share(held["metric"]))
        facts.append(
            Fact(name="best model", value=f"round {held['round']}", remark=f"{name.replace('_', ' ')} {value}")
        )
    if stopped := run.outcome.get("stopped"):
        at, _, reason = str(stopped).partition(": ")
        facts.append(Fact(name="stopped early", value=at, remark=reason))
    return Section(facts=facts) if facts else None
