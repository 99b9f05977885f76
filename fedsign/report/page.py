"""report.html: one run on one page, in one file.

The page loads nothing: style and pictures stand in it, so that it can be mailed, archived and opened
years later.  It is made from results on disk only, without torch, Flower or matplotlib, and looks the
same whenever it is made again.
"""

from pathlib import Path

from fedsign.disk import write_text
from fedsign.report import privacy, run_charts, sites, summary, template
from fedsign.results import RunFolder

TEMPLATE = "page.html.jinja"


def write_report(folder: RunFolder, *, live: bool = False) -> Path:
    """Write the page of a run into its folder and return its path; `live`: a browser that shows it loads it again.

    Raises:
        ResultsError: the run cannot be read.
    """
    path = folder.path / "report.html"
    write_text(path, render(summary.read(folder), live=live))
    return path


def render(run: summary.Run, *, live: bool = False) -> str:
    """The page as text."""
    return template.render(
        TEMPLATE,
        live=live,
        name=str(run.config.get("name", "run")),
        seed=run.config.get("seed", 0),
        outcome=run.outcome,
        strategy=summary.strategy(run),
        headline=summary.headline(run),
        facts=summary.facts(run),
        charts=run_charts.charts(run),
        privacy=privacy.privacy(run),
        valleys=_valleys(run),
        population=summary.population(run),
        private_counts=summary.private_counts(run),
        sites=sites.sites(run),
        failures=summary.failures(run),
        configuration=summary.configuration(run),
        config_toml=run.config_toml,
        environment=run.environment,
    )


def _valleys(run: summary.Run) -> list[run_charts.Chart]:
    if run.valley is None:
        return []
    from fedsign.report.valley_charts import valley_charts  # only where there is one, since it takes NumPy

    return valley_charts(run.valley)
