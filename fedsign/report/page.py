"""report.html: one run on one page, in one file; and its card, as a notebook shows it.

The page loads nothing: style and pictures stand in it, so that it can be mailed, archived and opened
years later.  It is made from results on disk only, without torch, Flower or matplotlib, and looks the
same whenever it is made again.
"""

from pathlib import Path

from fedsign.report import run_charts, summary, template
from fedsign.report.sections import sections
from fedsign.storage.disk import write_text
from fedsign.storage.results import RunFolder

TEMPLATE, CARD_TEMPLATE = "page.html.jinja", "card.html.jinja"
_NUM_CARD_FACTS = 7


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
    added = sections(run)
    return template.render(
        TEMPLATE,
        live=live,
        name=str(run.config.get("name", "run")),
        seed=run.config.get("seed", 0),
        outcome=run.outcome,
        strategy=summary.strategy(run),
        headline=summary.headline(run),
        facts=summary.facts(run, [fact for section in added for fact in section.facts]),
        charts=run_charts.charts(run),
        sections=[section for section in added if section.title],
        population=summary.population(run),
        private_counts=summary.private_counts(run),
        failures=summary.failures(run),
        configuration=summary.settings_by_section(run.config),
        config_toml=run.config_toml,
        environment=run.environment,
    )


def render_card(folder: RunFolder) -> str:
    """The main figures of a run and its first learning curve, in a few lines of HTML.

    The picture is the static one of the page, with colors that go with light and dark notebooks alike: nothing is asked of
    the page around it, and nothing of it is changed.

    Raises:
        ResultsError: the run cannot be read.
    """
    run = summary.read(folder)
    added = [fact for section in sections(run) for fact in section.facts]
    return template.render(
        CARD_TEMPLATE,
        name=str(run.config.get("name", "run")),
        seed=run.config.get("seed", 0),
        outcome=run.outcome,
        strategy=summary.strategy(run),
        figures=[summary.headline(run), *summary.facts(run, added)][:_NUM_CARD_FACTS],
        chart=run_charts.charts(run)[0],
        path=str(folder.path),
    )
