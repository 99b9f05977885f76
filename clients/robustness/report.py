"""Attackers in the head of a run's page."""

from fedsign.report.sections import Section
from fedsign.report.summary import Fact, Run, named
from fedsign.report.wording import figure


def section(run: Run) -> Section | None:
    """How many sent something else than what they had learnt; None where nobody did."""
    counts = [line["malicious"] for line in run.rounds if "malicious" in line]
    if not counts:
        return None
    remark = f"a round, {named(run.section('attack'), without={'fraction'})}"
    return Section(facts=[Fact(name="malicious clients", value=figure(sum(counts) / len(counts)), remark=remark)])
