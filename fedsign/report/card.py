"""A run as a notebook shows it: the main figures and the first learning curve, in a few lines of HTML.

The picture is the static one of report.html, with colors that go with light and dark notebooks alike: nothing is
asked of the page around it, and nothing of it is changed.
"""

from fedsign.report import run_charts, summary
from fedsign.report.sections import sections
from fedsign.report.template import render
from fedsign.storage.results import RunFolder

TEMPLATE = "card.html.jinja"
_NUM_FACTS = 7


def render_card(folder: RunFolder) -> str:
    """The card of a run.

    Raises:
        ResultsError: the run cannot be read.
    """
    run = summary.read(folder)
    added = [fact for section in sections(run) for fact in section.facts]
    return render(
        TEMPLATE,
        name=str(run.config.get("name", "run")),
        seed=run.config.get("seed", 0),
        outcome=run.outcome,
        strategy=summary.strategy(run),
        figures=[summary.headline(run), *summary.facts(run, added)][:_NUM_FACTS],
        chart=run_charts.charts(run)[0],
        path=str(folder.path),
    )
