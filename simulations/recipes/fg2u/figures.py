"""Charts of the recipes of (FG)²U: memory and time by the depth of the training, and coefficients as they are found."""

from collections.abc import Mapping, Sequence

from fedsign.report.chart import Axis, Chart, Series

_GRAY = 7


def depth_charts(
    depths: Sequence[int], megabytes: Mapping[str, Sequence[float]], seconds: Mapping[str, Sequence[float]]
) -> list[Chart]:
    """Both axes logarithmic: what grows with the depth is a slope, what does not is level."""
    return [
        Chart(
            title=title,
            series=[
                Series(name=name, x=depths, y=values, marker="o", color=color)
                for color, (name, values) in enumerate(lines.items())
            ],
            x=Axis(label="steps of the training", scale="log"),
            y=Axis(label=title, scale="log"),
        )
        for title, lines in (("peak, MB", megabytes), ("time, s", seconds))
    ]


def discovery_charts(
    errors: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    points: Sequence[float],
    solutions: Mapping[str, Sequence[float]],
) -> list[Chart]:
    """A line of (times, errors) for each method, the errors logarithmic; and the solutions at the last time."""
    colors = {name: color for color, name in enumerate(errors)}
    error = Chart(
        title="error of the coefficients",
        series=[Series(name=name, x=times, y=found, color=colors[name]) for name, (times, found) in errors.items()],
        x=Axis(label="time, share of the longest"),
        y=Axis(label="error", scale="log"),
    )
    solution = Chart(
        title="u at the last time",
        series=[Series(name=name, x=points, y=u, color=colors.get(name, _GRAY)) for name, u in solutions.items()],
        x=Axis(label="x"),
        y=Axis(label="u"),
    )
    return [error, solution]
