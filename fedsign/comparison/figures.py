"""The figures of a comparison for a paper, one column wide.

To be drawn within `fedsign.report.figures.style()`, which sets type and lines.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from fedsign.comparison.bars import Bar, bytes_bars, rounds_bars
from fedsign.comparison.forest import rows_of
from fedsign.comparison.labels import metric_name, reference_label, scale_of, short_label
from fedsign.comparison.lines import Line, extent, lines_of
from fedsign.comparison.summary import Summary, values_label
from fedsign.report.figures import COLOURS, Draw, dash, empty, label_plainly
from fedsign.report.population import Population
from fedsign.report.svg import LARGEST
from fedsign.report.wording import is_share, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CURVES_HEIGHT = 2.2
_LONGEST_NAME = 22


def all_figures(summary: Summary) -> dict[str, tuple[str, Draw]]:
    """File stem -> (caption, what draws it), for every figure of which there is something to see.

    Drawing has to be done within `style()`.
    """
    found: dict[str, tuple[str, Draw]] = {}
    names = {summary.metric: f"Test {metric_name(summary)}", "loss": "Test loss", "train_loss": "Training loss"}
    for key, title in {**names, "client_drift": "Client drift"}.items():
        for condition in summary.conditions:
            lines = lines_of(summary, condition, key)
            if any(line.points() for line in lines):
                draw = partial(draw_curves, lines, title=title, key=key, last=summary.last, focus=key == summary.metric)
                found[_stem(key, condition)] = (_captioned(f"{title} over the rounds", condition), draw)
    if rows_of(summary):
        said = (
            f"Paired differences of the test {metric_name(summary)} to {reference_label(summary)}, with 95 % intervals"
        )
        found["differences"] = (said, partial(draw_differences, summary))
    target = "the target" if summary.target is None else scale_of(summary).with_unit(summary.target)
    for stem, unit, bars in (
        ("rounds-to-target", "rounds", rounds_bars(summary)),
        ("bytes-to-target", "bytes (down and up)", bytes_bars(summary)),
    ):
        if bars:
            found[stem] = (f"{unit.capitalize()} to {target}", partial(draw_bars, bars, name=f"{unit} to {target}"))
    for condition in summary.conditions:
        partition = summary.population.get(values_label(condition)) or {}
        if partition.get("counts"):
            population = Population.of(partition)
            caption = _captioned("Samples of the clients", condition)
            found[_stem("clients", condition)] = (caption, partial(draw_clients, population))
    return found


def _captioned(said: str, condition: Mapping[str, Any]) -> str:
    return f"{said}, {short_label(condition)}" if condition else said


def _stem(key: str, condition: Mapping[str, Any]) -> str:
    """A file's name that every system and LaTeX take."""
    text = "-".join([key.replace("_", "-"), *(short_label(condition).replace(", ", " ").split())])
    return "".join(character if character.isascii() and character.isalnum() else "-" for character in text)


def draw_curves(lines: Sequence[Line], *, title: str, key: str, last: int, focus: bool) -> "Figure":
    """Means with bands of one standard deviation over the seeds."""
    figure, axes = _new(_CURVES_HEIGHT)
    factor = 100.0 if is_share(key) else 1.0
    smooth = [line.smooth(last) for line in lines]
    for line in smooth:
        points = {round: (mean, std) for round, mean, std in line.points()}
        rows = [points.get(round, (float("nan"), 0.0)) for round in line.curve.rounds]
        means, stds = [factor * mean for mean, _ in rows], [factor * std for _, std in rows]
        colour = COLOURS[line.look % 8]
        axes.plot(line.curve.rounds, means, color=colour, linestyle=dash(line.look), label=_plain(line.name))
        if any(stds):
            low = [mean - std for mean, std in zip(means, stds, strict=True)]
            high = [mean + std for mean, std in zip(means, stds, strict=True)]
            axes.fill_between(line.curve.rounds, low, high, color=colour, alpha=0.14, linewidth=0)
    rounds = sorted({round for line in smooth for round in line.curve.rounds})
    _limits(axes, [factor * value for value in extent(smooth, rounds, percent=is_share(key), focus=focus)])
    axes.set_xlim(rounds[0], rounds[-1]) if len(rounds) > 1 else None
    axes.set_xlabel("round")
    axes.set_ylabel(title + (" (%)" if is_share(key) else ""))
    _legend(figure, axes)
    return figure


def draw_differences(summary: Summary) -> "Figure":
    """The paired differences with their intervals; full where the interval lies on one side of 0."""
    rows, scale = rows_of(summary), scale_of(summary)
    figure, axes = _new(0.55 + 0.19 * (len(rows) + _num_groups([row.group for row in rows])))
    heights = _heights(axes, [row.group for row in rows], [row.name for row in rows])
    for row, height in zip(rows, heights, strict=True):
        colour, interval = COLOURS[row.look % 8], row.difference
        if interval.low is not None and interval.high is not None:
            ends = [scale.factor * interval.low, scale.factor * interval.high]
            axes.plot(ends, [height, height], color=colour, linewidth=1.3, marker="|", markersize=5)
        face = colour if row.is_clear else "white"
        axes.plot([scale.factor * interval.mean], [height], "o", color=colour, markerfacecolor=face, markersize=4)
    axes.axvline(0, color="black", linewidth=0.7, zorder=1)
    unit = "points" if scale.percent else metric_name(summary)
    axes.set_xlabel(f"difference to {_plain(reference_label(summary))} ({unit}; {_better(summary)})")
    return figure


def draw_bars(bars: Sequence[Bar], *, name: str) -> "Figure":
    """What it took to the target, with the number behind the bar."""
    figure, axes = _new(0.5 + 0.18 * (len(bars) + _num_groups([bar.group for bar in bars])))
    heights = _heights(axes, [bar.group for bar in bars], [bar.name for bar in bars])
    largest = max((bar.value for bar in bars if bar.value), default=1.0)
    for bar, height in zip(bars, heights, strict=True):
        if bar.value is not None:
            axes.barh(height, bar.value / largest, height=0.62, color=COLOURS[bar.look % 8])
        colour = "black" if bar.value is not None else "#666666"
        axes.text(
            (bar.value or 0.0) / largest + 0.015,
            height,
            " ".join(bar.text.split()),
            va="center",
            fontsize=7.5,
            color=colour,
        )
    axes.set_xlim(0, 1.3)  # the numbers stand behind the bars, so an axis would say nothing new
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.set_xlabel(" ".join(name.split()))
    return figure


def draw_clients(population: Population) -> "Figure":
    """How many samples each client has, above, and of which classes, below: darker is a larger share."""
    shown = population.shown()
    names = list(population.class_names)
    figure = empty(2.4 if names else 1.5)
    grid = figure.add_gridspec(2 if names else 1, 1, height_ratios=(1, 2) if names else (1,))
    sizes = [population.sizes[client] for client in shown]
    bars = figure.add_subplot(grid[0])
    if names:
        below = figure.add_subplot(grid[1])
        shares = [
            [population.counts[client][row] / max(1, sum(population.counts[client])) for client in shown]
            for row in range(len(names))
        ]
        below.imshow(shares, aspect="auto", cmap="Blues", vmin=0, interpolation="nearest")
        below.grid(visible=False)
        stride = -(-len(names) // 12)
        below.set_yticks(range(0, len(names), stride), [_plain(name) for name in names[::stride]])
        below.set_xticks([])
        below.set_xlabel(
            f"{len(shown):,} of {population.size:,} clients" if len(shown) < population.size else "clients"
        )
        below.set_ylabel("class")
        bars.set_xlim(-0.5, len(shown) - 0.5)
    else:
        bars.set_xlabel("clients")
    bars.bar(range(len(shown)), sizes, width=0.8, color=COLOURS[0])
    bars.set_xticks([])
    bars.set_ylabel("samples")
    bars.grid(visible=False, axis="x")
    return figure


def _new(height: float) -> tuple["Figure", "Axes"]:
    figure = empty(height)
    return figure, figure.add_subplot()


def _limits(axes: "Axes", values: Sequence[float]) -> None:
    """The axis of the page: logarithmic where one value dwarfs the rest."""
    ordered = sorted(value for value in values if abs(value) <= LARGEST)
    if not ordered:
        return
    low, high = ordered[0], ordered[-1]
    if low > 0 and high > 50 * ordered[len(ordered) // 2]:
        axes.set_yscale("log")
        label_plainly(axes.yaxis)
        axes.set_ylim(low / 1.3, high * 1.3)
    else:
        margin = 0.04 * (high - low) or 0.05 * abs(high) or 1.0
        axes.set_ylim(low - margin, high + margin)


def _legend(figure: "Figure", axes: "Axes") -> None:
    """Above the axes, so that it hides no curve; the figure grows with it."""
    handles, names = axes.get_legend_handles_labels()
    longest = max(map(len, names), default=0)
    columns = max(1, min(len(names), 4 if longest <= 8 else 3 if longest <= 16 else 2))
    figure.set_figheight(_CURVES_HEIGHT + 0.14 * -(-len(names) // columns))
    figure.legend(handles, names, loc="outside upper center", ncols=columns, columnspacing=1.2)


def _num_groups(groups: Sequence[str]) -> float:
    """Rows that the names of conditions take up."""
    return 1.35 * len({group for group in groups if group})


def _heights(axes: "Axes", groups: Sequence[str], names: Sequence[str]) -> list[float]:
    """Rows from top to bottom, with the name of a condition above its own, as labels of the axis."""
    heights: list[float] = []
    ticks: list[tuple[float, str]] = []
    heads = set()
    y, former = 0.0, ""
    for group, name in zip(groups, names, strict=True):
        if group != former:
            y += 0.35 if former else 0.0
            heads.add(len(ticks))
            ticks.append((-y, group))
            y, former = y + 1, group
        heights.append(-y)
        ticks.append((-y, name))
        y += 1
    axes.set_yticks([tick for tick, _ in ticks], [_plain(name) for _, name in ticks])
    for index in heads:
        axes.get_yticklabels()[index].set_fontweight("bold")
    axes.set_ylim(-y + 0.4, 0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    return heights


def _plain(text: str) -> str:
    """A name on one line, cut where it is long, and without the narrow space, which the font does not have."""
    return shortened(" ".join(text.split()), _LONGEST_NAME)


def _better(summary: Summary) -> str:
    return "right is better" if summary.higher_is_better else "left is better"
