"""The findings section of a run's report."""

from fedsign.diagnosis.finding import FILE
from fedsign.report.sections import Section, Table
from fedsign.report.summary import Fact, Run
from fedsign.storage.results import RunFolder

_MOST = 50


def section(run: Run) -> Section | None:
    """A table of the findings, if there are any."""
    findings = RunFolder(run.path).records(FILE)
    if not findings:
        return None
    rows = [
        (each["rule"], (f"{each['round'] or 'start'}", f"{each['message']}; {each['remedy']}."))
        for each in findings[:_MOST]
    ]
    return Section(
        title="Findings",
        lead="Likely mistakes in the data or in the course of the run.",
        # also printed at the end of a run, whose warnings may be in the log of another process
        facts=[Fact(name="findings", value=str(len(findings)), remark="likely mistakes, see findings.jsonl")],
        table=Table(heads=["Rule", "Round", "Finding"], rows=rows, total=len(findings), file=FILE),
    )
