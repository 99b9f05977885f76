"""`fedsign estimate sharding`: the plan of `fedsign.sharding.plan`, as a table, a figure and JSON."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

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

_DEFAULT_PATH = Path("sharding.svg")
_CANDIDATES = {"all": tuple(STRATEGIES), "paper": PAPER}
_LEGEND: dict[Standing, tuple[str, str, str]] = {
    "near": ("fast", "fits, near the fastest", "o"),
    "slower": ("", "fits, slower", "o"),
    "too_large": ("too large", "does not fit", "x"),
}
_MEASURED = ("ranks", "intra", "inter", "link")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The command's options as typed."""

    params: float
    per_group: int
    memory: str
    ranks: int | None
    intra: str | None
    inter: str | None
    measure: bool
    trainable: str
    accumulate: int
    t_comp: float
    link: str | None
    collectives: str
    candidates: str
    out: str | None
    json: bool

    @property
    def picture(self) -> Path | None:
        """The path of the figure, if any."""
        default = None if self.json else _DEFAULT_PATH
        return default if self.out is None else Path(self.out)

    @property
    def title(self) -> str:
        """The title: what is estimated."""
        return (
            f"{_count(self.params)} parameters, {self.trainable} of them trained, "
            f"on {self.ranks} ranks in groups of {self.per_group}"
        )

    @property
    def subtitle(self) -> str:
        """The subtitle: network and step."""
        return (
            f"{self.intra} within a group, {self.inter} between groups for each {self.link}, {self.collectives} "
            f"collectives; {self.accumulate} micro-batches a step"
        )


def with_network(requested: Options) -> Options | None:
    """Fill in ranks and network as given or measured; None on ranks that do not print.

    Raises:
        ConfigError: something is missing, or was given although it is measured.
    """
    given = [name for name in _MEASURED if getattr(requested, name) is not None]
    if not requested.measure:
        missing = [f"--{name}" for name in _MEASURED if name not in given and name != "link"]
        if missing:
            raise ConfigError(
                f"{', '.join(missing)} {'was' if len(missing) == 1 else 'were'} not given; say what your ranks have, "
                "such as --ranks 32 --intra 2000Gbps --inter 80Gbps, or start them with torchrun and --measure."
            )
        return replace(requested, link=requested.link or Link.RANK)
    if given:
        options = ", ".join(f"--{name}" for name in given)
        raise ConfigError(f"--measure was given with {options}, which it measures; leave one of them out.")
    from fedsign.sharding.probe import measured  # imports torch

    network_measured = measured(requested.per_group)
    if network_measured is None:
        return None
    # measured values are put in the options' places, in their format, so that both ways print and plot alike
    network, ranks = network_measured
    intra, inter = (f"{bps / 1e9:.4g}Gbps" for bps in (network.intra_bps, network.inter_bps))
    return replace(requested, ranks=ranks, intra=intra, inter=inter, link=network.link)


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimated:
    """The ranked strategies."""

    options: Options
    limit_bytes: int
    rows: list[tuple[Standing, Estimate]]

    def as_json(self) -> dict[str, Any]:
        """Return the numbers in the order of the table."""
        standing, first = self.rows[0]
        return {
            **{name: getattr(self.options, name) for name in _MEASURED},
            "memory_limit_bytes": self.limit_bytes,
            "recommended": None if standing == "too_large" else first.strategy.name,
            "picture": None if self.options.picture is None else str(self.options.picture),
            "strategies": [_as_json(standing, each) for standing, each in self.rows],
        }


def estimate(options: Options) -> Estimated:
    """Estimate, and draw a figure if requested.

    Raises:
        FedSignError: an option is invalid, or the figure cannot be written.
    """
    if options.picture is not None:
        figures.check_name(options.picture)
    intra, inter, link = options.intra or "", options.inter or "", options.link or ""
    choices: dict[str, tuple[str, Iterable[str]]] = {
        "candidates": (options.candidates, _CANDIDATES),
        "link": (link, Link),
        "collectives": (options.collectives, Rings),
    }
    for option, (text, known) in choices.items():
        if text not in list(known):
            raise ConfigError(f"--{option} {text} was given; expected one of {', '.join(known)}.")
    if options.t_comp < 0:
        raise ConfigError(f"--t-comp {options.t_comp:g} was given; expected seconds, 0 or more.")
    # `not ... >=`: NaN is refused, too
    if not options.params >= 1:
        raise ConfigError(f"--params {options.params:g} was given; expected a number of parameters, such as 65e9.")
    grouping = Grouping.of(ranks=options.ranks or 0, per_group=options.per_group)
    network = Network(
        intra_bps=bits_per_second(intra, option="--intra"),
        inter_bps=bits_per_second(inter, option="--inter"),
        link=Link(link),
        rings=Rings(options.collectives),
    )
    share = fraction(options.trainable, option="--trainable")
    task = Task(params=options.params, trainable=share * options.params, accumulate=options.accumulate)
    limit_bytes = bytes_of(options.memory, option="--memory")
    rows = rank(
        task,
        grouping=grouping,
        network=network,
        memory_bytes=limit_bytes,
        compute_s=options.t_comp,
        names=_CANDIDATES[options.candidates],
    )
    estimated = Estimated(options=options, limit_bytes=limit_bytes, rows=rows)
    if options.picture is not None:
        figures.write_picture(
            partial(figures.draw, chart_of(estimated), height=4.0, width=figures.PAGE, titled=True), options.picture
        )
    return estimated


def chart_of(estimated: Estimated) -> Chart:
    """Plot memory against time. On the logarithmic axis, a step without communication is at the lower edge."""
    rows, limit = estimated.rows, estimated.limit_bytes / 1e9
    memory = [each.memory_bytes / 1e9 for _, each in rows]
    times = [each.step_s for _, each in rows if each.step_s > 0] or [1.0]
    y, x = decades(min(times), max(times)), decades(min(*memory, limit), max(*memory, limit))
    series = [
        Series(
            name=name,
            x=[each.memory_bytes / 1e9 for of_row, each in rows if of_row == standing],
            # 0 has no place on a logarithmic axis
            y=[max(each.step_s, y[0]) for of_row, each in rows if of_row == standing],
            labels=[each.strategy.name for of_row, each in rows if of_row == standing],
            mark="point",
            marker=marker,
            is_open=standing == "slower",
        )
        for standing, (_, name, marker) in _LEGEND.items()
    ]
    texts = (f"{each.strategy.name}: {duration(each.step_s)}, {_LEGEND[standing][1]}" for standing, each in rows)
    return Chart(
        title=f"{estimated.options.title}\n{estimated.options.subtitle}",
        series=series,
        x=Axis(label="model states of a rank, GB", scale="log", limits=(x[0], x[-1])),
        y=Axis(label="communication of a step, s", scale="log", limits=(y[0], y[-1])),
        rules=[(limit, byte_count(estimated.limit_bytes))],
        description="; ".join(texts),
    )


def _count(params: float) -> str:
    for name, size in (("billion", 1e9), ("million", 1e6)):
        if params >= size:
            return f"{params / size:g} {name}"
    return f"{params:g}"


def _as_json(standing: Standing, each: Estimate) -> dict[str, Any]:
    seconds = ("param_s", "gradient_s", "sync_gradient_s", "sync_param_s", "communication_s", "step_s")
    return {
        "strategy": each.strategy.name,
        "known_as": each.strategy.known_as,
        "standing": standing,
        "memory_bytes": round(each.memory_bytes),
        **{name: getattr(each, name) for name in seconds},
    }


def show(estimated: Estimated) -> None:
    """Print the table, the recommended strategy, and the figure's path."""
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"[bold]{escaped(estimated.options.title)}[/]\n"
        f"{escaped(estimated.options.subtitle)}\n"
        "model states of a rank; seconds a step"
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("strategy", "known as"):
        table.add_column(heading, no_wrap=True)
    for heading in ("memory", "params", "gradients", "sync", "step"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for standing, each in estimated.rows:
        sync_s = each.sync_gradient_s + each.sync_param_s
        times = (figure(value) for value in (each.param_s, each.gradient_s, sync_s, each.step_s))
        table.add_row(
            each.strategy.name,
            each.strategy.known_as,
            byte_count(round(each.memory_bytes)),
            *times,
            _LEGEND[standing][0],
        )
    console.print(table)
    console.print(_advice(estimated))
    if estimated.options.picture is not None:
        console.print(f"picture: {escaped(str(estimated.options.picture))}")


def _advice(estimated: Estimated) -> str:
    limit = byte_count(estimated.limit_bytes)
    standing, first = estimated.rows[0]
    if standing == "too_large":
        return (
            f"nothing fits {limit}: the least is {first.strategy.name} with {byte_count(round(first.memory_bytes))}; "
            "take more ranks, or train a smaller part."
        )
    return (
        f"take [bold]{first.strategy.name}[/]: of those within 5 % of the fastest that fits {limit} (fast), it needs "
        "the least memory."
    )
