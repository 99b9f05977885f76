"""`fedsign estimate sharding`: the plan of `fedsign.sharding.plan`, as a table, a picture and JSON."""

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from fedsign.errors import ConfigError
from fedsign.report import figures
from fedsign.report.chart import Axis, Chart, Series, decades
from fedsign.report.wording import byte_count, duration, figure
from fedsign.sharding.layout import Grouping
from fedsign.sharding.plan import Estimate, Standing, Task, rank
from fedsign.sharding.strategy import PAPER, STRATEGIES
from fedsign.sharding.traffic import Link, Network, Rings
from simulations.printing import escaped
from simulations.sharding.quantities import bits_per_second, bytes_of, fraction

DEFAULT_PATH = Path("sharding.svg")
_CANDIDATES = {"all": tuple(STRATEGIES), "paper": PAPER}
_LEGEND: dict[Standing, tuple[str, str]] = {
    "near": ("fits, near the fastest", "o"),
    "slower": ("fits, slower", "o"),
    "too_large": ("does not fit", "x"),
}
_REMARKS: dict[Standing, str] = {"near": "fast", "slower": "", "too_large": "too large"}
E_ = TypeVar("E_", bound=StrEnum)


_MEASURED = ("ranks", "intra", "inter", "link")


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """The command's options, as they were typed."""

    params: float
    per_group: int
    memory: str
    ranks: int | None
    intra: str | None
    inter: str | None
    link: str | None
    trainable: str
    accumulate: int
    compute_s: float
    collectives: str
    candidates: str


def with_network(asked: Asked, *, measure: bool) -> Asked | None:
    """With ranks and network as they are said, or measured; None on ranks that have nothing to say.

    Raises:
        ConfigError: something is missing, or was said although it is measured.
    """
    given = [name for name in _MEASURED if getattr(asked, name) is not None]
    if not measure:
        missing = [f"--{name}" for name in _MEASURED if name not in given and name != "link"]
        if missing:
            raise ConfigError(
                f"{', '.join(missing)} {'was' if len(missing) == 1 else 'were'} not given; say what your ranks have, such as --ranks 32 "
                "--intra 2000Gbps --inter 80Gbps, or start them with torchrun and --measure."
            )
        return replace(asked, link=asked.link or Link.RANK)
    if given:
        options = ", ".join(f"--{name}" for name in given)
        raise ConfigError(f"--measure was given with {options}, which it measures; leave one of them out.")
    from simulations.sharding.probing import measured  # torch

    found = measured(asked.per_group)
    if found is None:
        return None
    network, ranks = found
    intra, inter = (f"{bps / 1e9:.4g}Gbps" for bps in (network.intra_bps, network.inter_bps))
    return replace(asked, ranks=ranks, intra=intra, inter=inter, link=network.link)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The strategies in their order, and where their picture lies."""

    asked: Asked
    limit_bytes: int
    rows: list[tuple[Standing, Estimate]]
    picture: Path | None

    @property
    def title(self) -> str:
        """What was estimated, in a line."""
        asked = self.asked
        return (
            f"{_count(asked.params)} parameters, {asked.trainable} of them trained, "
            f"on {asked.ranks} ranks in groups of {asked.per_group}"
        )

    @property
    def subtitle(self) -> str:
        """Network and step, in a line."""
        asked = self.asked
        return (
            f"{asked.intra} within a group, {asked.inter} between groups for each {asked.link}, {asked.collectives} collectives; "
            f"{asked.accumulate} micro-batches a step"
        )

    def as_json(self) -> dict[str, Any]:
        """The numbers, in the order of the table."""
        standing, first = self.rows[0]
        return {
            **{name: getattr(self.asked, name) for name in _MEASURED},
            "memory_limit_bytes": self.limit_bytes,
            "recommended": None if standing == "too_large" else first.strategy.name,
            "picture": None if self.picture is None else str(self.picture),
            "strategies": [_as_json(standing, each) for standing, each in self.rows],
        }


def look(asked: Asked, picture: Path | None) -> Found:
    """Estimate, and draw what was found into `picture`, if one is given.

    Raises:
        FedSignError: an option has no meaning, or the picture cannot be written.
    """
    if picture is not None:
        figures.check_name(picture)
    if asked.candidates not in _CANDIDATES:
        raise ConfigError(f"--candidates {asked.candidates} was given; expected is one of {', '.join(_CANDIDATES)}.")
    if asked.compute_s < 0:
        raise ConfigError(f"--t-comp {asked.compute_s:g} was given; expected are seconds, 0 or more.")
    if not asked.params >= 1:
        raise ConfigError(f"--params {asked.params:g} was given; expected is a number of parameters, such as 65e9.")
    grouping = Grouping.of(ranks=asked.ranks or 0, per_group=asked.per_group)
    network = Network(
        intra_bps=bits_per_second(asked.intra or "", option="--intra"),
        inter_bps=bits_per_second(asked.inter or "", option="--inter"),
        link=_choice(Link, asked.link or "", option="--link"),
        rings=_choice(Rings, asked.collectives, option="--collectives"),
    )
    share = fraction(asked.trainable, option="--trainable")
    task = Task(params=asked.params, trainable=share * asked.params, accumulate=asked.accumulate)
    limit_bytes = bytes_of(asked.memory, option="--memory")
    rows = rank(
        task,
        grouping=grouping,
        network=network,
        memory_bytes=limit_bytes,
        compute_s=asked.compute_s,
        names=_CANDIDATES[asked.candidates],
    )
    found = Found(asked=asked, limit_bytes=limit_bytes, rows=rows, picture=picture)
    if picture is not None:
        figures.write(partial(figures.draw, chart_of(found), height=4.0, width=figures.PAGE, titled=True), picture)
    return found


def chart_of(found: Found) -> Chart:
    """Memory against time; a step without communication, which takes no time, stands at the lower edge."""
    rows, limit = found.rows, found.limit_bytes / 1e9
    memory = [each.memory_bytes / 1e9 for _, each in rows]
    times = [each.step_s for _, each in rows if each.step_s > 0] or [1.0]
    y, x = decades(min(times), max(times)), decades(min(*memory, limit), max(*memory, limit))
    series = [
        Series(
            name=name,
            x=[each.memory_bytes / 1e9 for of_row, each in rows if of_row == standing],
            y=[max(each.step_s, y[0]) for of_row, each in rows if of_row == standing],
            labels=[each.strategy.name for of_row, each in rows if of_row == standing],
            mark="point",
            marker=marker,
            is_open=standing == "slower",
        )
        for standing, (name, marker) in _LEGEND.items()
    ]
    said = (f"{each.strategy.name}: {duration(each.step_s)}, {_LEGEND[standing][0]}" for standing, each in rows)
    return Chart(
        title=f"{found.title}\n{found.subtitle}",
        series=series,
        x=Axis(label="model states of a rank, GB", scale="log", limits=(x[0], x[-1])),
        y=Axis(label="communication of a step, s", scale="log", limits=(y[0], y[-1])),
        rules=[(limit, byte_count(found.limit_bytes))],
        description="; ".join(said),
    )


def _count(params: float) -> str:
    for name, size in (("billion", 1e9), ("million", 1e6)):
        if params >= size:
            return f"{params / size:g} {name}"
    return f"{params:g}"


def _choice(kind: type[E_], text: str, *, option: str) -> E_:
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{option} {text} was given; expected is one of {', '.join(kind)}.") from None


def _as_json(standing: Standing, each: Estimate) -> dict[str, Any]:
    seconds = ("param_s", "gradient_s", "sync_gradient_s", "sync_param_s", "communication_s", "step_s")
    return {
        "strategy": each.strategy.name,
        "known_as": each.strategy.known_as,
        "standing": standing,
        "memory_bytes": round(each.memory_bytes),
        **{name: getattr(each, name) for name in seconds},
    }


def show(found: Found) -> None:
    """Print the table, what to take, and where the picture is."""
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"[bold]{escaped(found.title)}[/]\n{escaped(found.subtitle)}\nmodel states of a rank; seconds a step")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("strategy", "known as"):
        table.add_column(heading, no_wrap=True)
    for heading in ("memory", "params", "gradients", "sync", "step"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for standing, each in found.rows:
        sync_s = each.sync_gradient_s + each.sync_param_s
        times = (figure(value) for value in (each.param_s, each.gradient_s, sync_s, each.step_s))
        table.add_row(
            each.strategy.name, each.strategy.known_as, byte_count(round(each.memory_bytes)), *times, _REMARKS[standing]
        )
    console.print(table)
    console.print(_advice(found))
    if found.picture is not None:
        console.print(f"picture: {escaped(str(found.picture))}")


def _advice(found: Found) -> str:
    limit = byte_count(found.limit_bytes)
    standing, first = found.rows[0]
    if standing == "too_large":
        return (
            f"nothing fits {limit}: the least is {first.strategy.name} with {byte_count(round(first.memory_bytes))}; "
            "take more ranks, or train a smaller part."
        )
    return f"take [bold]{first.strategy.name}[/]: of those within 5 % of the fastest that fits {limit} (fast), it needs the least memory."
