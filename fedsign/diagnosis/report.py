"""The findings section of a run's report."""

from fedsign.diagnosis.finding import FILE
from fedsign.report.sections import Section, Table
from fedsign.report.summary import Run
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
        table=Table(heads=["Rule", "Round", "Finding"], rows=rows, total=len(findings), file=FILE),
    )
