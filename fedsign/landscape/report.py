"""The valleys of a run on its page, where `fedsign analyse valley` has left some."""

from fedsign.report.sections import Section
from fedsign.report.summary import Run


def section(run: Run) -> Section | None:
    """A chart for each scale."""
    path = run.path / "analysis" / "valley.json"
    if not path.exists():
        return None
    from fedsign.landscape.figures import measures, valley_charts
    from fedsign.report.analysis import read_found  # only now, since they take NumPy

    found = read_found(path)
    return Section(title="Loss valley", charts=valley_charts(found, measures(found)[0]))
