"""report.html, one run in one self-contained file, and the run's card for notebooks.

The page loads nothing: styles and pictures are inlined, so it can be mailed, archived, and opened years later.  It is
rendered from results on disk alone, without torch, Flower, or matplotlib, and renders the same every time.
"""

import shlex
from pathlib import Path

from fedsign.naming import run_name
from fedsign.report import run_charts, summary, template
from fedsign.report.findings import finding_row, findings_facts
from fedsign.report.sections import sections
from fedsign.storage.disk import write_text
from fedsign.storage.results import RunFolder

TEMPLATE, CARD_TEMPLATE = "page.html.jinja", "card.html.jinja"
_NUM_CARD_FACTS = 7


def write_report(folder: RunFolder, *, live: bool = False) -> Path:
    """Write the page of a run into its folder and return its path; a `live` page reloads itself in the browser.

    Raises:
        ResultsError: the run cannot be read.
    """
    path = folder.path / "report.html"
    write_text(path, render(summary.read(folder), live=live))
    return path


def render(run: summary.Run, *, live: bool = False) -> str:
    """Render the page."""
    added = sections(run)
    return template.render(
        TEMPLATE,
        live=live,
        name=run_name(run.config),
        seed=run.config.get("seed", 0),
        outcome=run.outcome,
        strategy=summary.strategy(run),
        headline=summary.headline(run),
        facts=summary.facts(
            run, [*(fact for section in added for fact in section.facts), *findings_facts(len(run.findings))]
        ),
        findings=[finding_row(each) for each in run.findings],
        charts=run_charts.charts(run),
        sections=[section for section in added if section.title],
        population=summary.population(run),
        private_counts=summary.private_counts(run),
        failures=summary.failures(run),
        configuration=summary.settings_by_section(run.config),
        changed=summary.settings_changed(run),
        config_toml=run.config_toml,
        # as it was started: a data set's path in it may be relative
        config_path=shlex.quote(
            str(Path(run.section("results").get("root", "runs"), *run.path.parts[-2:], "config.toml"))
        ),
        environment=run.environment,
    )


def render_card(folder: RunFolder) -> str:
    """Render the main metrics of a run and its first learning curve as a few lines of HTML.

    The picture is the page's static one, in colors for light and dark notebooks, independent of the surrounding page.

    Raises:
        ResultsError: the run cannot be read.
    """
    run = summary.read(folder)
    added = [*(fact for section in sections(run) for fact in section.facts), *findings_facts(len(run.findings))]
    return template.render(
        CARD_TEMPLATE,
        name=run_name(run.config),
        seed=run.config.get("seed", 0),
        outcome=run.outcome,
        strategy=summary.strategy(run),
        figures=[summary.headline(run), *summary.facts(run, added)][:_NUM_CARD_FACTS],
        chart=run_charts.charts(run)[0],
        path=str(folder.path),
    )
