"""The number of attackers, for the head of a run's report."""

from fedsign.report.sections import Section
from fedsign.report.summary import Fact, Run, named
from fedsign.report.wording import figure


def section(run: Run) -> Section | None:
    """The mean number of malicious clients per round; None without an attack."""
    counts = [record["malicious"] for record in run.rounds if "malicious" in record]
    if not counts:
        return None
    remark = f"a round, {named(run.section('attack'), without={'fraction'})}"
    return Section(facts=[Fact(name="malicious clients", value=figure(sum(counts) / len(counts)), remark=remark)])
