"""`fedsign tune transfer`: does a setting tuned on a small dense proxy hold for wider and sparser models?

Paper: Dey et al. 2024 (arXiv 2405.15743), Figures 6, 7, 9, 13 and 14.  Under each scheme, the same values of one
setting are tried at every width and density from the same seeds; the first width at the first density is the proxy.
Losses are those of held-out samples.

By default, values are a factor of two apart. The move of an optimum is counted in factors of two, called bins.  A
diverged training has a loss that is not finite, and its value is never the best one.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise, product
from math import log2, nan, prod
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsign.config import ExperimentConfig
from fedsign.errors import ConfigError
from fedsign.parameterization.roles import roles_of_model
from fedsign.parameterization.section import ParameterizationPart
from fedsign.registry import one_of
from fedsign.report.analysis import Analysis
from fedsign.report.chart import Axis, Chart, Series
from fedsign.report.figures import Draw, draw
from fedsign.workload import Workload
from simulations.sparsity import training
from simulations.sparsity.cells import Cell, losses_of
from simulations.sparsity.coordinates import check_sweep, facts_of, variant

# Losses are [schemes, widths, densities, values, seeds]; conditions = widths x densities.
SETTINGS = {"rate": "client.lr", "init": "parameterization.init_std"}
_AROUND = [2.0**power for power in range(-4, 5)]  # times the experiment's value
_WIDTHS = ("width", "hidden", "channels")  # settings that determine a model's width; the first one present counts
_SCALED = (*_WIDTHS, "num_heads", "num_kv_heads", "ffn_width")  # heads keep their width
_FEWEST_INPUTS = 4  # of a sparse unit; with fewer, the rules' averages no longer apply

_SHOWN = 1.6  # times the lowest loss; larger ones are not plotted
_NAMES = {"client.lr": "learning rate", "parameterization.init_std": "standard deviation of the start"}

_log = logging.getLogger("fedsign")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What to try, by the command's options. By default nine values around the experiment's, at its own width.

    For `steps` and `samples` see Cell.
    """

    setting: str = "rate"
    values: Sequence[float] = ()
    schemes: Sequence[str] = ("sp", "mup", "smupar")
    densities: Sequence[float] = (1.0, 0.25, 0.0625)
    widths: Sequence[int] = ()
    seeds: int = 3
    steps: int = 0
    samples: int = 0


def check(options: Options) -> None:
    """Raise ConfigError if it cannot be tried for any model."""
    if options.setting not in SETTINGS:
        raise ConfigError(f"'{options.setting}' cannot be tuned.{one_of(options.setting, SETTINGS)}.")
    check_sweep(options.schemes, options.densities)
    for option, given in (
        ("--schemes", options.schemes),
        ("--densities", options.densities),
        ("--widths", options.widths),
    ):
        if len(set(given)) < len(given) or not (given or option == "--widths"):
            raise ConfigError(f"{option} was given as {list(given)}, but expected one at least, and each once.")
    if options.values and (options.values[0] <= 0 or any(low >= high for low, high in pairwise(options.values))):
        raise ConfigError(
            f"--values was given as {list(options.values)}, but expected numbers above 0 that "
            "ascend, such as 2^-9..2^-3."
        )
    if options.seeds < 1 or min(options.steps, options.samples, *options.widths, 0) < 0:
        raise ConfigError(
            f"--seeds={options.seeds}, --steps={options.steps}, --samples={options.samples} and widths "
            f"{list(options.widths)} were given, but expected one seed at least, and nothing below 0."
        )
    if options.samples and not options.steps:
        raise ConfigError(
            "--samples was given without --steps; a federation is evaluated on all that it holds out: drop the one, "
            "or give the other."
        )


def tune(config: ExperimentConfig, options: Options, folder: Path, *, workers: int | None = None) -> Analysis:
    """Train every cell that the folder lacks, and find the optima.

    Raises:
        FedSignError: it cannot be tried, or a cell could not be trained.
    """
    check(options)
    if ParameterizationPart.of(config).settings.get("densities"):
        raise ConfigError(
            "parameterization.densities was given, which stands before the densities that are tried; drop it from "
            "the experiment."
        )
    # as the roles see it: the setting may be a list, or have another name
    own_width = roles_of_model(Workload(variant(config, options.schemes[0], 1.0)).make_model()).width
    options = _completed(config, options, own_width)
    losses = losses_of(list(_cells(config, options, own_width)), folder, workers=workers)
    # in the order of `_cells`; then seeds last: [schemes, widths, densities, values, seeds]
    shape = (options.seeds, len(options.schemes), len(options.widths), len(options.densities), len(options.values))
    return _summarized(config, options, np.moveaxis(np.array(losses).reshape(shape), 0, -1))


def widened(config: ExperimentConfig, width: int) -> ExperimentConfig:
    """Return the experiment with a wider model: all layers scale, and the number of heads, but not their width.

    Raises:
        ConfigError: the model has no width setting, or cannot have this width.
    """
    settings, current = config.model.settings, width_of(config)
    changed: dict[str, Any] = {}
    for name in _SCALED:
        value = settings.get(name)
        if not value:
            continue  # 0 selects the default
        is_list = isinstance(value, list | tuple)
        scaled = [each * width / current for each in (value if is_list else [value])]
        if any(each != int(each) or each < 1 for each in scaled):
            raise ConfigError(
                f"--widths has {width}, which is {width / current:g} times the experiment's, but "
                f"model.{name}={value} times that is no whole number; expected a multiple of {current}, or a part "
                "of it that divides all layers."
            )
        changed[f"model.{name}"] = [int(each) for each in scaled] if is_list else int(scaled[0])
    return config.replace(**changed)


def width_of(config: ExperimentConfig) -> int:
    """Return the model's width setting; for a list of widths, the last.

    Raises:
        ConfigError: it has no such setting.
    """
    for name in _WIDTHS:
        if value := config.model.settings.get(name):
            return int(value[-1] if isinstance(value, list | tuple) else value)
    raise ConfigError(
        f"model.name={config.model.name} has none of the settings {', '.join(_WIDTHS)}, so that its width cannot be "
        "tried; drop --widths."
    )


def _completed(config: ExperimentConfig, options: Options, own_width: int) -> Options:
    """Fill in default values and widths."""
    init_std = ParameterizationPart.of(config).settings.get("init_std", 0.02)
    own = config.client.lr if options.setting == "rate" else init_std
    widths = list(options.widths) or [own_width]
    thin = [pair for pair in product(widths, options.densities) if prod(pair) < _FEWEST_INPUTS]
    if thin:
        _log.warning(
            (
                "width %d at density %g leaves a unit %g inputs; rules for widths and densities are rules for many "
                "of them."
            ),
            *thin[-1],
            prod(thin[-1]),
        )
    return replace(options, values=options.values or [own * factor for factor in _AROUND], widths=widths)


def _cells(config: ExperimentConfig, options: Options, own_width: int) -> Iterator[Cell]:
    """Return the cells, seed by seed, so that an interrupted sweep has complete seeds; the first seed's are checked."""
    config, base_density = training.held_out(config), ParameterizationPart.of(config).settings.get("base_density", 1.0)
    last: Workload | None = None
    for seed, scheme, width, density in product(
        range(config.seed, config.seed + options.seeds), options.schemes, options.widths, options.densities
    ):
        wide = config if width == own_width else widened(config, width)
        # The base's density needs no correction for sparsity, so all schemes are muP there, trained once.
        used = "mup" if density == base_density and scheme.startswith("smupar") else scheme
        of_condition = variant(wide, used, density, seed=seed)
        for index, value in enumerate(options.values):
            tried = of_condition.replace(**{SETTINGS[options.setting]: value})
            # one check per condition: values and seeds change no component
            if seed == config.seed and index == 0:
                last = training.check(tried, steps=options.steps, like=last)
            words = {"scheme": used, "width": width, "density": density, SETTINGS[options.setting]: value, "seed": seed}
            yield Cell(config=tried, steps=options.steps, samples=options.samples, words=words)


def _summarized(config: ExperimentConfig, options: Options, losses: NDArray[np.float64]) -> Analysis:
    """Summarize losses [schemes, widths, densities, values, seeds]."""
    conditions = list(product(options.widths, options.densities))
    rows, summary = [], []
    for scheme, of_scheme in zip(options.schemes, losses, strict=True):
        flat = of_scheme.reshape(len(conditions), len(options.values), options.seeds)
        for (width, density), of_condition, reading in zip(
            conditions, flat, read_off(flat, options.values), strict=True
        ):
            condition = {"scheme": scheme, "width": width, "density": density}
            summary.append(condition | asdict(reading))
            for value, over_seeds in zip(options.values, of_condition, strict=True):
                diverged = int((~np.isfinite(over_seeds)).sum())
                finite = over_seeds[np.isfinite(over_seeds)].tolist()
                loss, std = None if diverged else fmean(finite), stdev(finite) if len(finite) > 1 else None
                rows.append(condition | {"value": value, "loss": loss, "std": std, "diverged": diverged})
    return Analysis(
        kind="transfer",
        name=config.run_name,
        facts={**asdict(options), **facts_of(config), "setting": SETTINGS[options.setting]},
        rows=rows,
        summary=summary,
        arrays={"loss": losses, "values": np.array(options.values)},
        drawn_by=transfer_figures,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """The optimum of one condition.

    The best value has the lowest mean loss over seeds; `moved_low` and `moved_high` are the extreme moves of single
    seeds.  `kept` is the loss here at the base's best value, `excess` its relative excess over the loss at the
    condition's own best value.  NaN if every value diverged.
    """

    best: float = nan
    best_loss: float = nan
    is_at_edge: bool = False  # of the tried values; the optimum may be outside
    moved: float = nan  # factors of two from the base's best value
    moved_low: float = nan
    moved_high: float = nan
    kept_loss: float = nan
    excess: float = nan


def read_off(losses: NDArray[np.float64], values: Sequence[float]) -> list[Reading]:
    """Find the optimum of each condition, from losses [conditions, values, seeds]; the base comes first, values ascend.

    >>> losses = np.array([[3.0, 2.0, 4.0], [5.0, 4.0, 3.0]])[:, :, None]
    >>> [(each.best, each.moved, round(each.excess, 3)) for each in read_off(losses, [1, 2, 4])][1]
    (4.0, 1.0, 0.333)
    """
    # infinity, not NaN: argmin must pass over values where any seed diverged
    finite = np.where(np.isfinite(losses), losses, np.inf)
    of_base, of_seeds = int(finite[0].mean(-1).argmin()), finite[0].argmin(0)
    readings = []
    for condition in finite:
        means = condition.mean(-1)
        best = int(means.argmin())
        if not np.isfinite(means[best]):
            readings.append(Reading())
            continue
        # seed by seed against the base's same seed: both saw the same batches
        moves = [log2(values[own] / values[theirs]) for own, theirs in zip(condition.argmin(0), of_seeds, strict=True)]
        reading = Reading(
            best=float(values[best]),
            best_loss=float(means[best]),
            is_at_edge=best in (0, len(values) - 1),
            moved=log2(values[best] / values[of_base]),
            moved_low=min(moves),
            moved_high=max(moves),
            kept_loss=float(means[of_base]),
            # mean of ratios, not ratio of means: seeds are paired
            excess=float((condition[of_base] / condition[best]).mean() - 1),
        )
        readings.append(reading)
    return readings


def transfer_figures(analysis: Analysis) -> dict[str, Draw]:
    """Return the plots by name: means over seeds with bands from lowest to highest, and a dot at the best value."""
    facts, losses = analysis.facts, analysis.arrays["loss"]
    charts = []
    for row, width in enumerate(facts["widths"]):
        for column, scheme in enumerate(facts["schemes"]):
            series = [
                each
                for color, density in enumerate(facts["densities"])
                for each in _line(f"{density:g}", analysis.arrays["values"], losses[column, row, color], color)
            ]
            x = Axis(label=_NAMES.get(facts["setting"], str(facts["setting"])), scale="log2")
            title = scheme if len(facts["widths"]) == 1 else f"{scheme}, width {width}"
            charts.append(Chart(title=title, series=series, x=x, y=_axis(losses)))
    return {"loss": partial(draw, *charts, columns=len(facts["schemes"]), legend="density")}


def _line(name: str, values: Any, losses: Any, color: int) -> list[Series]:
    """Plot losses [values, seeds]; values with a diverged seed get no point."""
    # NaN: one diverged seed makes the mean NaN, and the plot skips the point
    known = np.where(np.isfinite(losses), losses, np.nan)
    means, x = known.mean(-1), values.tolist()
    low, high = known.min(-1).tolist(), known.max(-1).tolist()
    line = Series(name=name, x=x, y=means.tolist(), low=low, high=high, color=color)
    if not np.isfinite(means).any():
        return [line]
    best = int(np.nanargmin(means))
    return [line, Series(name=name, x=[x[best]], y=[float(means[best])], mark="point", color=color)]


def _axis(losses: Any) -> Axis:
    known = losses[np.isfinite(losses)]
    if not known.size:
        return Axis(label="loss")
    low, high = float(known.min()), float(min(known.max(), _SHOWN * known.min()))
    # 1e-9: the limits must differ even if all losses are equal
    return Axis(label="loss", limits=(low - 0.04 * (high - low) - 1e-9, high * 1.01))
