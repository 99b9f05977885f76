"""What was learnt, step by step: the loss after the rounds, and each setting."""

from functools import partial

from fedsign.report.analysis import Found
from fedsign.report.chart import Axis, Chart, Series
from fedsign.report.figures import Draw, draw

_COLUMNS = 3


def learning_figures(found: Found) -> dict[str, Draw]:
    """What -> what draws it: a panel each; settings of several numbers have a line for each."""
    charts = []
    for name in ("loss", *found.facts["names"]):
        lines = found.arrays[name].reshape(len(found.arrays[name]), -1).T.tolist()
        series = [Series(name=name, x=range(len(line)), y=line, color=color) for color, line in enumerate(lines)]
        charts.append(Chart(title=name, series=series, x=Axis(label="step"), y=Axis()))
    return {"trajectory": partial(draw, *charts, height=1.7, columns=min(_COLUMNS, len(charts)))}
