"""The section of a run's page with its valleys, if `fedsign analyze` has been run."""

from pathlib import Path

from fedsign.report.sections import Picture, Section
from fedsign.report.summary import Run

_PICTURES = {"surface": "Surface", "trajectory": "Trajectory of the training"}


def section(run: Run) -> Section | None:
    """A chart per scale of a valley; surface and trajectory as pictures."""
    folder = run.path / "analysis"
    found = {kind: path for kind in ("valley", *_PICTURES) if (path := folder / f"{kind}.json").exists()}
    if not found:
        return None
    from fedsign.landscape.figures import measures, valley_charts
    from fedsign.report.analysis import read_found  # imported late: needs NumPy

    pictures = [picture for kind, path in found.items() if kind in _PICTURES for picture in _pictures(kind, path)]
    if "valley" not in found:
        return Section(title="Loss valley", pictures=pictures)
    valley = read_found(found["valley"])
    return Section(title="Loss valley", charts=valley_charts(valley, measures(valley)[0]), pictures=pictures)


def _pictures(kind: str, path: Path) -> list[Picture]:
    """The picture of the error, otherwise of the loss; for a trajectory of the loss, which training minimizes."""
    from fedsign.landscape.figures import measures
    from fedsign.landscape.surfaces import in_words_of
    from fedsign.report.analysis import read_found

    found = read_found(path)
    what = "loss" if kind == "trajectory" else measures(found)[0]
    drawn = path.with_name(f"{kind}-{what}.svg")
    if not drawn.exists() or "center" not in found.facts:
        return []
    return [Picture(title=f"{_PICTURES[kind]}: test {what}", path=drawn, text=in_words_of(found, what))]
