"""The clients in one picture: samples, classes, and how often each took part in training.

Each column is a client.  Shades of a single color, instead of one color per class, also work in grayscale, for
color-blind readers, and with a hundred classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from fedsign.report.chart import COLORS, Axis, nice_ticks
from fedsign.report.figures import COLUMN, PAGE, empty, one_line
from fedsign.report.plots import ticks
from fedsign.report.wording import middle, plural

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_COLUMNS = 60
SHADES = 6

_NAMED_CLASSES = 5
_LONGEST_NAME = 12
_LINE = 14.0  # height of a class name in pixels


@dataclass(frozen=True, kw_only=True, slots=True)
class Population:
    """The clients' samples: `counts` is [clients][classes]; `class_names` is empty for regression.

    `times_sampled` is empty if there was no training.  If only some of the `num_clients` clients were counted,
    `clients` holds their numbers.  Hardly any of them was ever sampled then, so `times_sampled` covers those that took
    part and appears in the text only.  `is_shared`: clients share samples.
    """

    class_names: Sequence[str]
    counts: Sequence[Sequence[int]]
    clients: Sequence[int] = ()
    num_clients: int = 0
    is_shared: bool = False
    times_sampled: Sequence[int] = ()
    num_rounds: int = 0
    max_columns: int = MAX_COLUMNS

    @classmethod
    def of(cls, record: Mapping[str, Any], *, sampled: Mapping[int, int] | None = None, num_rounds: int = 0) -> Self:
        """Create from the content of partition.json, and after training the number of times each client was sampled."""
        clients = record.get("counted_clients", ())
        times: Sequence[int] = ()
        if sampled is not None:
            times = [*sampled.values()] if clients else [sampled.get(row, 0) for row in range(len(record["counts"]))]
        return cls(
            class_names=record.get("class_names", ()),
            counts=record["counts"],
            clients=clients,
            num_clients=record.get("num_clients", 0),
            is_shared=record.get("samples_are_shared", False),
            times_sampled=times,
            num_rounds=num_rounds,
        )

    @property
    def size(self) -> int:
        """The number of clients."""
        return self.num_clients or len(self.counts)

    def number_of(self, row: int) -> int:
        """The client of a row of `counts`."""
        return self.clients[row] if self.clients else row

    @property
    def sizes(self) -> list[int]:
        """Samples per client."""
        return [sum(row) for row in self.counts]

    def shown(self) -> list[int]:
        """The clients to draw, in order; if there are too many, an even selection by size."""
        sizes = self.sizes
        by_size = sorted(range(len(self.counts)), key=lambda client: -sizes[client])
        if len(by_size) > self.max_columns:
            last = len(by_size) - 1
            by_size = [by_size[round(i * last / (self.max_columns - 1))] for i in range(self.max_columns)]
        return sorted(by_size, key=self._main_class) if self.class_names else by_size

    def _main_class(self, client: int) -> tuple[int, float]:
        row = self.counts[client]
        largest = max(row, default=0)
        # within a class the purest clients come first; empty clients come last
        return (row.index(largest), -largest / sum(row)) if largest else (len(row), 0.0)

    def caption(self) -> str:
        """The caption: what a column means, and which clients are shown."""
        text = (
            "Each column is a client; clients are sorted by "
            f"{'their most common class' if self.class_names else 'size'}."
        )
        num = len(self.counts)
        if num > self.max_columns:
            counted = " that were counted" if self.clients else ""
            text += (
                f" Shown are {self.max_columns} of the {num:,}{counted}, taken evenly from the largest to the smallest."
            )
        return text

    def size_sentence(self) -> str:
        """A sentence about the numbers of samples and classes."""
        sizes = self.sizes
        if self.is_shared:
            text = f"{plural(self.size, 'client')} that draw their samples from the same ones. "
        else:
            text = f"{plural(self.size, 'client')} with {plural(sum(sizes), 'training sample')} in all: "
        if self.clients:
            text += f"{plural(len(sizes), 'client')} were counted, evenly spaced from the first to the last: "
        text += (
            f"{'The' if self.is_shared and not self.clients else 'the'} smallest has {min(sizes):,}, "
            f"the median {middle(sizes)}, the largest {max(sizes):,}."
        )
        if self.class_names:
            held = sum(sum(count > 0 for count in row) for row in self.counts) / len(sizes)
            text += f" A client holds {held:.1f} of the {plural(len(self.class_names), 'class')} on average."
        return text

    def participation_sentence(self) -> str:
        """A sentence about how often clients were sampled."""
        times = self.times_sampled
        if not self.num_rounds:
            return "No round was run."
        if self.clients:
            most = max(times, default=0)
            often = f"the one that did most often {most:,} times" if most > 1 else "none of them twice"
            return f"In {plural(self.num_rounds, 'round')} {len(times):,} of {self.size:,} clients took part, {often}."
        fewest, most, never = min(times), max(times), sum(count == 0 for count in times)
        span = f"{fewest:,} to {most:,} times" if fewest < most else plural(fewest, "time")
        text = f"In {plural(self.num_rounds, 'round')} a client was sampled {span}, the median {middle(list(times))}."
        return text + (f" {plural(never, 'client')} never took part." if never else "")

    @property
    def is_trained(self) -> bool:
        """Whether to draw how often each client took part."""
        return bool(self.times_sampled) and not self.clients

    def description(self, row: int) -> str:
        """A text about one client: samples, most common classes, and participation."""
        counts = self.counts[row]
        text = f"client {self.number_of(row)}: {plural(sum(counts), 'sample')}"
        if self.is_trained:
            text += f", sampled {plural(self.times_sampled[row], 'time')}"
        held = sorted(zip(counts, self.class_names, strict=False), key=lambda pair: -pair[0])
        held = [pair for pair in held if pair[0]]
        if held:
            text += "\n" + ", ".join(f"{name}: {count:,}" for count, name in held[:_NAMED_CLASSES])
            rest = len(held) - _NAMED_CLASSES
            text += f", {plural(rest, 'class')} more" if rest > 0 else ""
        return text


def panels(population: Population) -> list[dict[str, Any]]:
    """The panels of a page from top to bottom, in boxes with one unit per column."""
    shown, names = population.shown(), population.class_names
    drawn = [_bars("samples", [population.sizes[row] for row in shown], 90 if names else 150, "bar")]
    if names:
        drawn.append(_classes(population, shown))
    if population.is_trained:
        drawn.append(_bars("times sampled", [population.times_sampled[row] for row in shown], 50, "bar often"))
    return drawn


def _bars(title: str, values: Sequence[int], height: int, class_: str) -> dict[str, Any]:
    axis = Axis(limits=(0.0, nice_ticks(0, max([*values, 2]), at_most=4)[-1]))
    # .86 of a column's width, .07 of space on each side
    path = "".join(
        f"M{column}.07 1000h.86v-{1000 * axis.position(value):.0f}h-.86z"
        for column, value in enumerate(values)
        if value
    )
    return {
        "title": title,
        "height": height,
        "box": 1000,
        "ticks": ticks(axis, 4),
        "paths": [(class_, path)],
        "most": "",
    }


def _classes(population: Population, shown: Sequence[int]) -> dict[str, Any]:
    """The panel of classes; one path per shade keeps a page with a hundred classes small."""
    names = population.class_names
    row_height = min(18.0, max(3.0, 300.0 / len(names)))
    stride = -(-_LINE // row_height)
    full, is_clipped = _full_share(population.counts)
    by_shade: dict[int, list[str]] = {}
    for column, client in enumerate(shown):
        counts = population.counts[client]
        for row, count in enumerate(counts):
            if count:
                # at least the lightest shade: a class that a client holds must not look absent
                shade = min(SHADES, max(1, round(SHADES * count / sum(counts) / full)))
                by_shade.setdefault(shade, []).append(f"M{column}.07 {row}.06h.86v.88h-.86z")
    return {
        "title": "share of each class",
        "height": row_height * len(names),
        "box": len(names),
        "ticks": [
            (100 - 100 * (row + 0.5) / len(names), _short(name, _LONGEST_NAME))
            for row, name in enumerate(names)
            if row % stride == 0
        ],
        "paths": [(f"cell s{shade}", "".join(cells)) for shade, cells in sorted(by_shade.items())],
        "most": f"{'≥ ' if is_clipped else ''}{100 * full:.0f}\u202f%",
    }


def draw_clients(population: Population, *, title: str = "") -> "Figure":
    """Draw samples above and classes below; call it within `fedsign.report.figures.style()`."""
    shown, names = population.shown(), population.class_names
    height = (2.4 if names else 1.5) + 0.14 * len(title.splitlines())
    figure = empty(height, width=PAGE if title else COLUMN)
    bars, *below = figure.subplots(2 if names else 1, 1, squeeze=False, height_ratios=(1, 2) if names else (1,))[:, 0]
    bars.bar(range(len(shown)), [population.sizes[client] for client in shown], width=0.8, color=COLORS[0])
    bars.set(xticks=[], ylabel="samples", xlim=(-0.5, len(shown) - 0.5))
    bars.grid(visible=False, axis="x")
    for axes in below:
        counts = [population.counts[client] for client in shown]
        shares = [[row[index] / max(1, sum(row)) for row in counts] for index in range(len(names))]
        axes.imshow(shares, aspect="auto", cmap="Blues", vmin=0, interpolation="nearest")
        axes.grid(visible=False)
        stride = -(-len(names) // 12)
        axes.set_yticks(range(0, len(names), stride), [one_line(name) for name in names[::stride]])
        axes.set(xticks=[], ylabel="class")
    num = f"{len(shown):,} of {population.size:,} clients" if len(shown) < population.size else "clients"
    [bars, *below][-1].set_xlabel(num)
    if title:
        figure.suptitle(title)
    figure.set_label(population.size_sentence())
    return figure


def _full_share(counts: Sequence[Sequence[int]]) -> tuple[float, bool]:
    """The share of the darkest shade, and whether outliers exceed it, which would wash out the rest."""
    most = sorted(max(row) / sum(row) for row in counts if sum(row))
    if not most:
        return 1.0, False
    full = most[int(0.9 * (len(most) - 1))]
    return full, most[-1] > full


def _short(name: str, at_most: int) -> str:
    """Cut out the middle of a name, since names often differ only at their ends.

    >>> _short("class number 12", 9)
    'clas…r 12'
    """
    half = (at_most - 1) // 2
    return name if len(name) <= at_most else f"{name[:half]}…{name[-half:]}"
