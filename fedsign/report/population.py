"""The clients in one picture: how many samples each has, of which classes, and how often it took part.

Before anything was trained the last part is left out.

A column is a client.  Shades of one colour instead of a colour for each class: this reads the same
for every kind of eye, in grey and with a hundred classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from markupsafe import Markup

from fedsign.report.svg import boxes, nice_ticks, number, picture, tag
from fedsign.report.wording import middle, plural, tick_label

MAX_COLUMNS = 60
SHADES = 6

_FIRST_HEAD, _HEAD = 30.0, 46.0  # room for the name of a panel
_CHARACTER = 6.8  # of the 12-unit type
_NAMED_CLASSES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Population:
    """What the clients hold: `counts` is [clients][classes]; `class_names` is empty for a regression.

    `times_sampled` is empty for a split that was not trained on.  Where not all clients were counted, `clients` are the
    numbers of those that were, of `num_clients`; of such a population hardly any that is drawn was ever sampled, so
    `times_sampled` is then of those that took part, and is told but not drawn.  `is_shared`: clients share samples.
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
        """From what partition.json holds, and how often each client that took part was sampled, if it was trained."""
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
        """How many clients there are."""
        return self.num_clients or len(self.counts)

    def number_of(self, row: int) -> int:
        """The client that a row of `counts` is of."""
        return self.clients[row] if self.clients else row

    @property
    def sizes(self) -> list[int]:
        """Samples of each client."""
        return [sum(row) for row in self.counts]

    def shown(self) -> list[int]:
        """The clients to draw, in drawing order: evenly taken by size where there are too many."""
        sizes = self.sizes
        by_size = sorted(range(len(self.counts)), key=lambda client: -sizes[client])
        if len(by_size) > self.max_columns:
            last = len(by_size) - 1
            by_size = [by_size[round(i * last / (self.max_columns - 1))] for i in range(self.max_columns)]
        return sorted(by_size, key=self._main_class) if self.class_names else by_size

    def _main_class(self, client: int) -> tuple[int, float]:
        row = self.counts[client]
        largest = max(row, default=0)
        return (row.index(largest), -largest / sum(row)) if largest else (len(row), 0.0)

    def caption(self) -> str:
        """What a column is, and which are shown."""
        said = f"Each column is a client; clients are sorted by {'their most common class' if self.class_names else 'size'}."
        num = len(self.counts)
        if num > self.max_columns:
            counted = " that were counted" if self.clients else ""
            said += (
                f" Shown are {self.max_columns} of the {num:,}{counted}, taken evenly from the largest to the smallest."
            )
        return said

    def size_sentence(self) -> str:
        """Numbers of samples and classes."""
        sizes = self.sizes
        if self.is_shared:
            said = f"{plural(self.size, 'client')} that draw their samples from the same ones. "
        else:
            said = f"{plural(self.size, 'client')} with {plural(sum(sizes), 'training sample')} in all: "
        if self.clients:
            said += f"{plural(len(sizes), 'client')} were counted, evenly spaced from the first to the last: "
        said += f"{'The' if self.is_shared and not self.clients else 'the'} smallest has {min(sizes):,}, the median {middle(sizes)}, the largest {max(sizes):,}."
        if self.class_names:
            held = sum(sum(count > 0 for count in row) for row in self.counts) / len(sizes)
            said += f" A client holds {held:.1f} of the {plural(len(self.class_names), 'class')} on average."
        return said

    def participation_sentence(self) -> str:
        """How often clients were sampled."""
        times = self.times_sampled
        if not self.num_rounds:
            return "No round was played."
        if self.clients:
            most = max(times, default=0)
            often = f"the one that did most often {most:,} times" if most > 1 else "none of them twice"
            return f"In {plural(self.num_rounds, 'round')} {len(times):,} of {self.size:,} clients took part, {often}."
        fewest, most, never = min(times), max(times), sum(count == 0 for count in times)
        span = f"{fewest:,} to {most:,} times" if fewest < most else plural(fewest, "time")
        said = f"In {plural(self.num_rounds, 'round')} a client was sampled {span}, the median {middle(list(times))}."
        return said + (f" {plural(never, 'client')} never took part." if never else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Panel:
    top: float
    height: float

    @property
    def bottom(self) -> float:
        return self.top + self.height


class _Drawing:
    """The geometry of one picture of a given width."""

    def __init__(self, population: Population, width: int) -> None:
        self.population = population
        self.width = width
        self.clients = population.shown()
        names = [_short(name, 12 if width > 600 else 7) for name in population.class_names]
        longest = max(map(len, names), default=0)
        self.names = names
        self.left = 10 + _CHARACTER * max(longest, 5)
        self.column = min(44.0, (width - self.left - 2) / len(self.clients))
        self.gap = min(3.0, 0.16 * self.column)
        self.row = min(18.0, max(3.0, 300.0 / len(names))) if names else 0.0
        self.sizes = _Panel(top=_FIRST_HEAD, height=90.0 if names else 150.0)
        self.classes = _Panel(top=self.sizes.bottom + (_HEAD if names else 0.0), height=self.row * len(names))
        has_times = population.times_sampled and not population.clients
        self.times = _Panel(top=self.classes.bottom + _HEAD, height=50.0) if has_times else None
        self.bottom = self.times.bottom if self.times else self.classes.bottom
        self.full_share, self.is_clipped = _full_share(population.counts)

    @property
    def right(self) -> float:
        return self.left + self.column * len(self.clients)

    @property
    def edge(self) -> float:
        """Where rules and names of panels end: a drawing of few clients still has its full head."""
        return max(self.right, min(self.width - 2.0, self.left + 260))

    @property
    def height(self) -> float:
        """With the clients' numbers below."""
        return self.bottom + 24

    def draw(self) -> Markup:
        population = self.population
        said = [population.size_sentence(), population.participation_sentence() if population.times_sampled else ""]
        return picture(
            self.content(),
            width=self.width,
            height=self.height,
            label=" ".join(filter(None, said)),
            class_="picture " + ("wide" if self.width > 600 else "narrow"),
        )

    def content(self) -> Markup:
        population, sizes, times = self.population, self.population.sizes, self.population.times_sampled
        size_ticks = nice_ticks(0, max([sizes[client] for client in self.clients] + [1]), at_most=4)
        drawn = self._bar_frame(self.sizes, "samples", size_ticks)
        if self.names:
            drawn += self._class_frame()
        if self.times:
            time_ticks = nice_ticks(0, max([times[client] for client in self.clients] + [1]), at_most=3, min_step=1)
            drawn += self._bar_frame(self.times, "times sampled", time_ticks)
        for index, client in enumerate(self.clients):
            x = self.left + index * self.column
            height = self.bottom - _FIRST_HEAD
            column = [
                tag("title", self._description(client)),
                tag("rect", x=x, y=_FIRST_HEAD, width=self.column, height=height, class_="band"),
                self._bar(self.sizes, x, sizes[client] / size_ticks[-1]),
                *self._cells(x, population.counts[client] if self.names else []),
            ]
            if self.times:
                column.append(self._bar(self.times, x, times[client] / time_ticks[-1], "often"))
            drawn.append(tag("g", *column, *self._client_name(index, x, client), class_="client"))
        return Markup("").join(drawn)

    def _bar_frame(self, panel: _Panel, name: str, ticks: Sequence[float]) -> list[Markup]:
        drawn = [tag("text", name, x=self.left, y=panel.top - 12, class_="panel")]
        for tick in ticks:
            y = panel.bottom - panel.height * tick / ticks[-1]
            class_ = "grid" if tick else "grid base"
            drawn.append(tag("path", d=f"M{number(self.left)} {number(y)}H{number(self.edge)}", class_=class_))
            name = tick_label(tick, step=ticks[1] - ticks[0])
            drawn.append(tag("text", name, x=self.left - 8, y=y, class_="tick left"))
        return drawn

    def _class_frame(self) -> list[Markup]:
        """Names of the classes, as many as there is room for, and the key of the shades."""
        y = self.classes.top - 12
        drawn = [tag("text", "share of each class", x=self.left, y=y, class_="panel")]
        stride = -(-14 // int(self.row)) if self.row < 14 else 1
        for index in range(0, len(self.names), stride):
            middle_of_row = self.classes.top + (index + 0.5) * self.row
            drawn.append(tag("text", self.names[index], x=self.left - 8, y=middle_of_row, class_="tick left"))
        most = f"{'≥ ' if self.is_clipped else ''}{100 * self.full_share:.0f}\u202f%"
        x = self.edge - _CHARACTER * len(most) - 6
        drawn.append(tag("text", most, x=self.edge, y=y, class_="panel last"))
        for shade in range(SHADES, 0, -1):
            x -= 13
            drawn.append(tag("rect", x=x, y=y - 9, width=12, height=10, class_=f"cell s{shade}"))
        drawn.append(tag("text", "0", x=x - 5, y=y, class_="panel last"))
        return drawn

    def _bar(self, panel: _Panel, x: float, share: float, class_: str = "") -> Markup:
        height = share * panel.height
        return tag(
            "rect",
            x=x + self.gap / 2,
            y=panel.bottom - height,
            width=self.column - self.gap,
            height=height,
            class_=f"bar {class_}".strip(),
        )

    def _cells(self, x: float, row: Sequence[int]) -> list[Markup]:
        """One path for all cells of a shade, which keeps a page of a hundred classes small."""
        by_shade: dict[int, list[tuple[float, float]]] = {}
        for index, count in enumerate(row):
            if count:
                shade = min(SHADES, max(1, round(SHADES * count / sum(row) / self.full_share)))
                corner = (x + self.gap / 2, self.classes.top + index * self.row)
                by_shade.setdefault(shade, []).append(corner)
        height = self.row - min(1.5, 0.2 * self.row)
        return [
            tag("path", d=boxes(corners, self.column - self.gap, height), class_=f"cell s{shade}")
            for shade, corners in sorted(by_shade.items())
        ]

    def _client_name(self, index: int, x: float, client: int) -> list[Markup]:
        """The client's number, where it has room."""
        number_of = self.population.number_of
        if self.column < _CHARACTER * len(str(max(map(number_of, self.clients)))) + 4:
            return []
        return [tag("text", str(number_of(client)), x=x + self.column / 2, y=self.bottom + 16, class_="tick below")]

    def _description(self, client: int) -> str:
        row = self.population.counts[client]
        said = f"client {self.population.number_of(client)}: {plural(sum(row), 'sample')}"
        if self.times:
            said += f", sampled {plural(self.population.times_sampled[client], 'time')}"
        held = sorted(zip(row, self.population.class_names, strict=False), key=lambda pair: -pair[0])
        held = [pair for pair in held if pair[0]]
        if held:
            said += "\n" + ", ".join(f"{name}: {count:,}" for count, name in held[:_NAMED_CLASSES])
            rest = len(held) - _NAMED_CLASSES
            said += f", {plural(rest, 'class')} more" if rest > 0 else ""
        return said


def draw_population(population: Population, *, width: int) -> Markup:
    """Draw the clients in a picture of a width in units, which a browser scales."""
    return _Drawing(population, width).draw()


def population_content(population: Population, *, width: int) -> tuple[Markup, float]:
    """The same without the <svg> around it, and its height: for a picture with more in it."""
    drawing = _Drawing(population, width)
    return drawing.content(), drawing.height


def _full_share(counts: Sequence[Sequence[int]]) -> tuple[float, bool]:
    """The share with the darkest shade, and whether a few clients exceed it, who would pale the rest."""
    most = sorted(max(row) / sum(row) for row in counts if sum(row))
    if not most:
        return 1.0, False
    full = most[int(0.9 * (len(most) - 1))]
    return full, most[-1] > full


def _short(name: str, at_most: int) -> str:
    """Cut out of the middle: names often differ at their ends only.

    >>> _short("class number 12", 9)
    'clas…r 12'
    """
    half = (at_most - 1) // 2
    return name if len(name) <= at_most else f"{name[:half]}…{name[-half:]}"
