"""The section of a run's page with its valleys, if `fedsign analyze` has been run."""

from pathlib import Path

from fedsign.report.sections import Picture, Section
from fedsign.report.summary import Run

_PICTURES = {"surface": "Surface", "trajectory": "Trajectory of the training"}


def section(run: Run) -> Section | None:
    """A chart per scale of a valley; surface and trajectory as pictures."""
    folder = run.path / "analysis"
    files = {kind: path for kind in ("valley", *_PICTURES) if (path := folder / f"{kind}.json").exists()}
    if not files:
        return None
    from fedsign.landscape.figures import measures, valley_charts
    from fedsign.report.analysis import read_analysis  # imported late: needs NumPy

    pictures = [picture for kind, path in files.items() if kind in _PICTURES for picture in _pictures(kind, path)]
    if "valley" not in files:
        return Section(title="Loss valley", pictures=pictures)
    valley = read_analysis(files["valley"])
    return Section(title="Loss valley", charts=valley_charts(valley, measures(valley)[0]), pictures=pictures)


def _pictures(kind: str, path: Path) -> list[Picture]:
    """The picture of the error, otherwise of the loss; for a trajectory of the loss, which training minimizes."""
    from fedsign.landscape.figures import measures
    from fedsign.landscape.surfaces import caption_of
    from fedsign.report.analysis import read_analysis

    analysis = read_analysis(path)
    measure = "loss" if kind == "trajectory" else measures(analysis)[0]
    drawn = path.with_name(f"{kind}-{measure}.svg")
    if not drawn.exists() or "center" not in analysis.facts:
        return []
    return [Picture(title=f"{_PICTURES[kind]}: test {measure}", path=drawn, text=caption_of(analysis, measure))]
