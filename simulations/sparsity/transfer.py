"""`fedsign tune transfer`: does a setting tuned on a small dense proxy hold for wider and sparser models?

Paper: Dey et al. 2024 (arXiv 2405.15743), Figures 6, 7, 9, 13 and 14.  Under each scheme the same values of one setting are tried at
every width and density from the same seeds; the first width at the first density is the proxy.  What is read off:
`fedsign.parameterisation.transfer`.  Losses are those of held-out samples.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, product
from math import prod
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsign.config import ExperimentConfig
from fedsign.errors import ConfigError
from fedsign.parameterisation.roles import roles_of_model
from fedsign.parameterisation.section import ParameterisationPart
from fedsign.parameterisation.transfer import read_off
from fedsign.registry import one_of
from fedsign.report.analysis import Found
from fedsign.workload import Workload
from simulations.sparsity.cells import Cell, losses_of
from simulations.sparsity.coordinates import check_sweep, facts_of, variant
from simulations.sparsity.training import check as check_cell
from simulations.sparsity.training import held_out

SETTINGS = {"rate": "client.lr", "init": "parameterisation.init_std"}
_AROUND = [2.0**power for power in range(-4, 5)]  # times the experiment's own value
_WIDTHS = ("width", "hidden", "channels")  # settings of models that say how wide they are; the first one there counts
_SCALED = (*_WIDTHS, "num_heads", "num_kv_heads", "ffn_width")  # heads keep their width
_FEWEST_INPUTS = 4  # of a sparse unit, where means over them still are the rule

_log = logging.getLogger("fedsign")


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What to try; see the command's options.  No values: nine around the experiment's; no widths: its own; `steps` and `samples`: see Cell."""

    setting: str = "rate"
    values: Sequence[float] = ()
    schemes: Sequence[str] = ("sp", "mup", "smupar")
    densities: Sequence[float] = (1.0, 0.25, 0.0625)
    widths: Sequence[int] = ()
    seeds: int = 3
    steps: int = 0
    samples: int = 0


def check(asked: Asked) -> None:
    """Raise ConfigError unless it can be tried, whatever the model."""
    if asked.setting not in SETTINGS:
        raise ConfigError(f"'{asked.setting}' cannot be tuned.{one_of(asked.setting, SETTINGS)}.")
    check_sweep(asked.schemes, asked.densities)
    for what, given in (("--schemes", asked.schemes), ("--densities", asked.densities), ("--widths", asked.widths)):
        if len(set(given)) < len(given) or not (given or what == "--widths"):
            raise ConfigError(f"{what} was given as {list(given)}, but expected is one at least, and each once.")
    if asked.values and (asked.values[0] <= 0 or any(low >= high for low, high in pairwise(asked.values))):
        raise ConfigError(
            f"--values was given as {list(asked.values)}, but expected are numbers above 0 that ascend, such as 2^-9..2^-3."
        )
    if asked.seeds < 1 or min(asked.steps, asked.samples, *asked.widths, 0) < 0:
        raise ConfigError(
            f"--seeds={asked.seeds}, --steps={asked.steps}, --samples={asked.samples} and widths {list(asked.widths)} were given, but "
            "expected is one seed at least, and nothing below 0."
        )
    if asked.samples and not asked.steps:
        raise ConfigError(
            "--samples was given without --steps; a federation is evaluated on all that it holds out: drop the one, or give the other."
        )


def tune(config: ExperimentConfig, asked: Asked, folder: Path, *, workers: int | None = None) -> Found:
    """Train every cell that the folder does not hold yet, and read off where the optima are.

    Raises:
        FedSignError: it cannot be tried, or a cell could not be played.
    """
    check(asked)
    if ParameterisationPart.of(config).settings.get("densities"):
        raise ConfigError(
            "parameterisation.densities was given, which stands before the densities that are tried; drop it from the experiment."
        )
    own_width = roles_of_model(Workload(variant(config, asked.schemes[0], 1.0)).make_model()).width
    asked = _completed(config, asked, own_width)
    losses = losses_of(list(_cells(config, asked, own_width)), folder, workers=workers)
    shape = (asked.seeds, len(asked.schemes), len(asked.widths), len(asked.densities), len(asked.values))
    return _found(config, asked, np.moveaxis(np.array(losses).reshape(shape), 0, -1))


def widened(config: ExperimentConfig, width: int) -> ExperimentConfig:
    """The experiment with a model of another width: all its layers are as much wider, heads are more and not wider.

    Raises:
        ConfigError: its model does not say how wide it is, or cannot be so wide.
    """
    settings, current = config.model.settings, width_of(config)
    changed: dict[str, Any] = {}
    for name in _SCALED:
        value = settings.get(name)
        if not value:
            continue  # 0 is the usual one
        is_list = isinstance(value, list | tuple)
        scaled = [each * width / current for each in (value if is_list else [value])]
        if any(each != int(each) or each < 1 for each in scaled):
            raise ConfigError(
                f"--widths has {width}, which is {width / current:g} times the experiment's, but model.{name}={value} times that is no "
                f"whole number; expected is a multiple of {current}, or a part of it that divides all layers."
            )
        changed[f"model.{name}"] = [int(each) for each in scaled] if is_list else int(scaled[0])
    return config.replace(**changed)


def width_of(config: ExperimentConfig) -> int:
    """What the model's settings say; of layers of several widths the last one's.

    Raises:
        ConfigError: they do not say it.
    """
    for name in _WIDTHS:
        if value := config.model.settings.get(name):
            return int(value[-1] if isinstance(value, list | tuple) else value)
    raise ConfigError(
        f"model.name={config.model.name} has none of the settings {', '.join(_WIDTHS)}, so that its width cannot be tried; drop --widths."
    )


def _completed(config: ExperimentConfig, asked: Asked, own_width: int) -> Asked:
    """With values and widths."""
    init_std = ParameterisationPart.of(config).settings.get("init_std", 0.02)
    own = config.client.lr if asked.setting == "rate" else init_std
    widths = list(asked.widths) or [own_width]
    thin = [pair for pair in product(widths, asked.densities) if prod(pair) < _FEWEST_INPUTS]
    if thin:
        _log.warning(
            "width %d at density %g leaves a unit %g inputs; rules for widths and densities are rules for many of them.",
            *thin[-1],
            prod(thin[-1]),
        )
    return replace(asked, values=asked.values or [own * factor for factor in _AROUND], widths=widths)


def _cells(config: ExperimentConfig, asked: Asked, own_width: int) -> Iterator[Cell]:
    """Seed by seed, so that what is there of a sweep that was stopped is whole seeds; the first seed's are checked."""
    config, base_density = held_out(config), ParameterisationPart.of(config).settings.get("base_density", 1.0)
    last: Workload | None = None
    for seed, scheme, width, density in product(
        range(config.seed, config.seed + asked.seeds), asked.schemes, asked.widths, asked.densities
    ):
        wide = config if width == own_width else widened(config, width)
        # At the base's density nothing is corrected for it: what is played is muP, once for all schemes.
        played = "mup" if density == base_density and scheme.startswith("smupar") else scheme
        of_condition = variant(wide, played, density, seed=seed)
        for index, value in enumerate(asked.values):
            tried = of_condition.replace(**{SETTINGS[asked.setting]: value})
            if seed == config.seed and index == 0:
                last = check_cell(tried, steps=asked.steps, like=last)
            words = {"scheme": played, "width": width, "density": density, SETTINGS[asked.setting]: value, "seed": seed}
            yield Cell(config=tried, steps=asked.steps, samples=asked.samples, words=words)


def _found(config: ExperimentConfig, asked: Asked, losses: NDArray[np.float64]) -> Found:
    """Of losses [schemes, widths, densities, values, seeds]."""
    conditions = list(product(asked.widths, asked.densities))
    rows, summary = [], []
    for scheme, of_scheme in zip(asked.schemes, losses, strict=True):
        flat = of_scheme.reshape(len(conditions), len(asked.values), asked.seeds)
        for (width, density), of_condition, reading in zip(conditions, flat, read_off(flat, asked.values), strict=True):
            condition = {"scheme": scheme, "width": width, "density": density}
            summary.append(condition | asdict(reading))
            for value, over_seeds in zip(asked.values, of_condition, strict=True):
                diverged = int((~np.isfinite(over_seeds)).sum())
                finite = over_seeds[np.isfinite(over_seeds)].tolist()
                loss, std = None if diverged else fmean(finite), stdev(finite) if len(finite) > 1 else None
                rows.append(condition | {"value": value, "loss": loss, "std": std, "diverged": diverged})
    return Found(
        kind="transfer",
        name=config.name,
        facts={**asdict(asked), **facts_of(config), "setting": SETTINGS[asked.setting]},
        rows=rows,
        summary=summary,
        arrays={"loss": losses, "values": np.array(asked.values)},
    )
