"""`fedsign.analyze.valley`: loss and error along noise and special directions, as curves or as a surface."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedsign.errors import ConfigError, nearest
from fedsign.landscape.directions import (
    NOISES,
    SPECIAL,
    Scaling,
    is_random,
    is_symmetric,
    noise,
    scaled,
    special,
    with_signs,
)
from fedsign.landscape.draws import independent
from fedsign.landscape.figures import valley_figures
from fedsign.landscape.groups import mask_of
from fedsign.landscape.landscape import Array, Landscape
from fedsign.landscape.surfaces import surface_figures
from fedsign.landscape.valley import asymmetry, curves, lambdas_of, sides_of, surface
from fedsign.registry import one_of
from fedsign.report.analysis import Analysis, Row
from simulations.landscape.evaluations import evaluating
from simulations.landscape.target import Source, Target, target_of

# D = parameters, P = points of a curve. A direction is [D], curves are [rays, scales, P], a surface is [P, P].
_IN_FACTS = ("directions", "draws", "scales", "scaling", "signs", "group", "seed")
Ray = tuple[Row, Tensor]  # (direction, label, draw number among those of a noise), and the scaled direction
_AVERAGED = ("center", "mean_positive", "mean_negative", "width_positive", "width_negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Options:
    """The requested curves or surface.

    Raises:
        ConfigError: they cannot be drawn for any model.
    """

    directions: Sequence[str]
    draws: int
    scales: Sequence[float]
    scaling: str
    signs: float | None
    group: str
    points: int | None
    surface: bool
    samples: int | None
    statistics: int
    seed: int

    def __post_init__(self) -> None:
        for name in self.directions:
            if name not in NOISES and name not in SPECIAL:
                known = [*NOISES, *SPECIAL]
                raise ConfigError(
                    f"direction '{name}' is not known.{nearest(name, known)} Expected a noise "
                    f"({', '.join(NOISES)}) or a special direction ({', '.join(SPECIAL)})."
                )
        if self.scaling not in [*Scaling]:
            raise ConfigError(f"--scaling={self.scaling} was given.{one_of(self.scaling, Scaling)}.")
        if self.draws < 1:
            raise ConfigError(f"--draws={self.draws} was given, but expected 1 or more.")
        for scale in self.scales:
            if not (np.isfinite(scale) and scale > 0):
                raise ConfigError(f"--scales has {scale:g}, but expected numbers above 0.")
        if not self.directions or not self.scales:
            raise ConfigError("no direction or no scale was given, but expected one of each at least.")
        if self.surface and len(self.directions) > 2:
            raise ConfigError(f"{len(self.directions)} directions were given for a surface, but expected two.")
        if self.surface and len(self.drawn) < 2:
            raise ConfigError("one direction was given for a surface, but expected two: name two, or raise --draws.")
        # raises for an invalid number of points
        _ = self.lambdas

    @property
    def drawn(self) -> list[tuple[str, int]]:
        """The directions, each with the number of its draw; on a surface, one noise gives its first two draws."""
        names, draws = self.directions, {name: self.draws if self._is_random(name) else 1 for name in self.directions}
        if not self.surface:
            return [(name, draw) for name in names for draw in range(draws[name])]
        if len(names) == 1 and draws[names[0]] > 1:
            names = (*names, *names)
        # two noises of one draw number come from one stream: G(1, 1) would be G(0, 1) + 1
        return [
            (name, sum(map(self._is_random, names[:axis])) if self._is_random(name) else 0)
            for axis, name in enumerate(names)
        ]

    def _is_random(self, name: str) -> bool:
        return is_random(name, self.signs)

    @property
    def lambdas(self) -> Array:
        """Return the points of a curve, or of each side of a surface."""
        return lambdas_of(self.points or 41)


def valley(
    source: Source,
    *,
    directions: Sequence[str] = ("gaussian",),
    draws: int = 5,
    scales: Sequence[float] = (0.2, 1.0, 2.0),
    scaling: str = Scaling.NORM,
    signs: float | None = None,
    group: str = "ALL",
    points: int | None = None,
    surface: bool = False,
    samples: int | None = None,
    statistics: int = 500,
    seed: int = 0,
    model: str | None = None,
    overrides: Sequence[str] = (),
    keep: Path | None = None,
) -> Analysis:
    """Compute loss and error around a model, along curves or over a plane.

    The plane is spanned by two directions, or by two draws of one noise, at the largest scale.

    Args:
        source: a run, or the path of a run, of one of its checkpoints, or of a file of weights.
        directions: noise (gaussian, uniform, ternary, gaussian_1, uniform_01, binary, ones) and special directions
            (initial, final, sign, sign_centered, sgp, sgp_centered).
        draws: number of draws of each noise. A symmetric one is evaluated in both directions.
        scales: distance of lambda = 1.
        scaling: "norm": scaled to the norm of the model; "filter": the same, filter by filter; "raw": as drawn.
        signs: fraction of the noise's elements that get the model's signs.
        group: perturb only these parameters: CLF, FEAT, LAYER1, CONV, BN, or a pattern such as "layer1.*".
        points: number of points of a curve, or of each side of a surface; 41 by default.
        surface: compute a plane instead of curves.
        samples: number of test samples; all by default.
        statistics: number of training samples to recompute BatchNorm statistics on; 0 keeps the model's own.
        seed: seed of the noise.
        model: the model of a file of weights, such as "mlp".
        overrides: other settings of its experiment, such as "data.name=mnist".
        keep: folder for the values so far, with which the same call goes on after an interruption.

    Raises:
        FedSignError: the model lacks what was requested, or the directions of a surface span no plane.
    """
    options = _Options(
        directions=(directions,) if isinstance(directions, str) else tuple(directions),
        draws=draws,
        scales=scales,
        scaling=scaling,
        signs=signs,
        group=group,
        points=points,
        surface=surface,
        samples=samples,
        statistics=statistics,
        seed=seed,
    )
    # after `_Options` has checked the options: loading a model and its data may take minutes
    target = target_of(source, model=model, overrides=overrides)
    landscape = target.landscape(options.samples, options.statistics)
    rays = _rays(target, landscape, options)
    if options.surface:
        _check_plane(rays)
    facts = {
        **target.facts,
        **landscape.sizes,
        **target.centers(landscape, options.samples),
        **{name: getattr(options, name) for name in _IN_FACTS},
        "torch": torch.__version__,
    }
    make = _surface if options.surface else _curves
    num = len(options.lambdas) ** 2 if options.surface else len(rays) * len(options.scales) * len(options.lambdas)
    request = {**asdict(options), "drawn": options.drawn, "experiment": target.workload.config.to_toml()}
    with evaluating(landscape, num, keep=keep, request=request):
        return make(target.name, landscape, rays, options, facts)


def _curves(name: str, landscape: Landscape, rays: Sequence[Ray], options: _Options, facts: Row) -> Analysis:
    values = curves(landscape, [direction for _, direction in rays], scales=options.scales, lambdas=options.lambdas)
    rows: list[Row] = []
    for index, (ray, _) in enumerate(rays):
        for column, scale in enumerate(options.scales):
            # of: [rays, scales, lambdas]
            sides = {name: asdict(sides_of(options.lambdas, of[index, column])) for name, of in values.arrays().items()}
            rows.append({**ray, "scale": scale, **sides})
    return Analysis(
        kind="valley",
        name=name,
        facts=facts,
        rows=rows,
        # of the error where there is one, else of the loss: a page shows one number per curve
        summary=_summary(rows, *values.main(), options),
        arrays={"lambda": options.lambdas, **values.arrays()},
        drawn_by=valley_figures,
    )


def _surface(name: str, landscape: Landscape, rays: Sequence[Ray], options: _Options, facts: Row) -> Analysis:
    scale, sides = max(options.scales), {"rows": options.lambdas, "columns": options.lambdas}
    first, second = (scale * direction for _, direction in rays)
    values = surface(landscape, first, second, **sides)
    labels = {side: _numbered(ray) for side, (ray, _) in zip(sides, rays, strict=True)}
    return Analysis(
        kind="surface",
        name=name,
        facts={**facts, **labels, "scale": scale},
        arrays={**sides, **values.arrays()},
        drawn_by=surface_figures,
    )


def _rays(target: Target, landscape: Landscape, options: _Options) -> list[Ray]:
    # directions are made on the CPU, so that a GPU shows the same draws
    layout, theta = landscape.layout, landscape.center.cpu()
    where = None if options.group == "ALL" else mask_of(options.group, target.model, layout)
    initial = target.initial_vector(layout)
    rays: list[Ray] = []
    for name, draw in options.drawn:
        if name in NOISES:
            eps = noise(name, layout.size, seed=options.seed, index=draw, dtype=theta.dtype)
        else:
            eps = special(name, layout, theta, initial)
        # before scaling: the signs must not change the direction's length
        if options.signs is not None:
            eps = with_signs(eps, theta, fraction=options.signs, seed=options.seed, index=draw)
        direction = scaled(layout, eps, theta, Scaling(options.scaling), where=where).to(landscape.center.device)
        is_paired = is_symmetric(name, options.signs)
        labels = {"direction": name, "label": _label(name, options.signs), "draw": draw, "is_paired": is_paired}
        rays.append((labels, direction))
    return rays


def _check_plane(rays: Sequence[Ray]) -> None:
    """Raise ConfigError if two directions [D] lie on one line, or one of them is zero."""
    (first, one), (second, other) = rays
    along = torch.dot(one.double(), other.double()).abs()
    lengths = one.double().norm() * other.double().norm()
    if along >= (1 - 1e-6) * lengths:  # 0 >= 0 if one of them is zero
        raise ConfigError(
            f"the directions {_numbered(first)} and {_numbered(second)} were given for a surface, but they lie on one "
            "line; name two that differ."
        )


def _numbered(ray: Row) -> str:
    """The label of a direction, with the number of its draw if it is a noise."""
    return f"{ray['label']}, draw {ray['draw']}" if ray["direction"] in NOISES else str(ray["label"])


def _label(name: str, signs: float | None) -> str:
    label = NOISES[name][0] if name in NOISES else SPECIAL[name]
    if signs is None:
        return label
    return f"|{label}| sign(θf)" if signs == 1 else f"{label}, {100 * signs:g} % of signs"


def _summary(rows: Sequence[Row], figure: str, values: Array, options: _Options) -> list[Row]:
    """Summarize each direction and scale: means over draws, and the asymmetry with its confidence interval.

    A noise drawn in both directions has asymmetry 0 by symmetry, which estimates nothing. `asymmetry_of_one` is the
    mean absolute asymmetry of a single direction.
    """
    # numbers of rows; row = ray x len(scales) + scale
    drawn: dict[tuple[str, int], list[int]] = {}
    for number, row in enumerate(rows):  # grouped by direction, then by scale
        drawn.setdefault((row["direction"], number % len(options.scales)), []).append(number)
    summaries: list[Row] = []
    for (_, column), numbers in drawn.items():
        first = rows[numbers[0]]
        # [draws, lambdas]
        alike = values[[number // len(options.scales) for number in numbers], column]
        sides = [asdict(sides_of(options.lambdas, each)) for each in independent(alike, is_paired=first["is_paired"])]
        interval = asymmetry([side["asymmetry"] for side in sides])
        # from the single curves: the mean of a pair has none
        of_one = [abs(rows[number][figure]["asymmetry"]) for number in numbers]
        # a pair's asymmetry is 0 by construction: an interval around it would claim precision
        is_estimated = interval is not None and not first["is_paired"]
        summaries.append(
            {
                **{key: first[key] for key in ("direction", "label", "scale", "is_paired")},
                "figure": figure,
                "num_draws": len(sides),
                **{key: _mean([side[key] for side in sides]) for key in _AVERAGED},
                "asymmetry": interval and interval.mean,
                "asymmetry_low": interval.low if interval and is_estimated else None,
                "asymmetry_high": interval.high if interval and is_estimated else None,
                "asymmetry_of_one": _mean(of_one),
            }
        )
    return summaries


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean; None if any value is, since the mean of the others would mislead."""
    numbers = [value for value in values if value is not None]
    return float(np.mean(numbers)) if len(numbers) == len(values) else None
