"""The section of a run's page with its valleys, if `fedsign analyze` has been run."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedsign.report.sections import Picture, Section, Table
from fedsign.report.summary import Run
from fedsign.report.wording import figure

if TYPE_CHECKING:
    from fedsign.report.analysis import Analysis

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
    first, *rest = valley_charts(valley, measures(valley)[0])
    # below the first chart, the text would leave a hole beside it
    return Section(
        title="Loss valley",
        lead=first.text,
        charts=[replace(first, text=""), *rest],
        pictures=pictures,
        table=_table(valley, measures(valley)[0]),
    )


def _table(valley: "Analysis", measure: str) -> Table:
    """Means, asymmetry, and widths, as `fedsign analyze valley` prints them."""
    from fedsign.landscape.figures import asymmetry_in_words

    means, widths = ([f"{what}_{side}" for side in ("negative", "positive")] for what in ("mean", "width"))
    return Table(
        heads=[
            "direction",
            "s",
            f"mean {measure}, λ < 0",
            f"mean {measure}, λ > 0",
            "asymmetry",
            "width, λ < 0",
            "width, λ > 0",
        ],
        rows=[
            (
                row["label"],
                [
                    f"{row['scale']:g}",
                    *(figure(row[mean], percent=measure == "error") for mean in means),
                    asymmetry_in_words(row).replace("-", "−"),
                    *(figure(row[width]) for width in widths),
                ],
            )
            for row in valley.summary
        ],
        total=len(valley.summary),
        file="analysis/valley.json",
    )


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
