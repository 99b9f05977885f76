"""A comparison as a notebook shows it: the final table and the differences to the reference, in a few lines of HTML.

As the card of a run (card.py): nothing is asked of the page around it, and nothing of it is changed.
"""

from fedsign.comparison import charts, tables
from fedsign.comparison.labels import last_rounds, metric_name, reference_label, scale_of
from fedsign.comparison.summary import Summary
from fedsign.report.template import render

TEMPLATE = "comparison_card.html.jinja"


def render_comparison_card(summary: Summary) -> str:
    """The card of a comparison."""
    unit = scale_of(summary).unit
    return render(
        TEMPLATE,
        package=__package__,
        name=summary.name,
        summary=summary,
        metric=f"{metric_name(summary)}{f' ({unit})' if unit else ''}",
        last_rounds=last_rounds(summary),
        reference=reference_label(summary),
        results=tables.results(summary),
        differences=charts.differences(summary),
        path=str(summary.path),
    )
