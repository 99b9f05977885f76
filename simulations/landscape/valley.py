"""`fedsign analyse valley`: curves along noises and special directions, or a surface, with their numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsign.errors import ConfigError
from fedsign.landscape.directions import SPECIAL, special
from fedsign.landscape.groups import mask_of
from fedsign.landscape.landscape import Landscape
from fedsign.landscape.noise import LABELS, NOISES, noise, with_signs
from fedsign.landscape.scaling import Scaling, scaled
from fedsign.landscape.valley import Curve, Sides, Surface, asymmetry, curves, lambdas_of, surface
from fedsign.registry import nearest
from fedsign.report.analysis import Found
from simulations.landscape.subject import Subject

_POINTS, _SURFACE_POINTS = 41, 25


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What to draw; see the command's options."""

    directions: Sequence[str] = ("gaussian",)
    draws: int = 2
    scales: Sequence[float] = (0.2, 1.0, 2.0)
    scaling: Scaling = Scaling.NORM
    signs: float | None = None
    group: str = "ALL"
    points: int | None = None  # 41 of a curve, 25 of each side of a surface
    samples: int | None = None
    statistics: int = 500
    seed: int = 0


def scaling_of(name: str) -> Scaling:
    """By its name.

    Raises:
        ConfigError: there is none.
    """
    try:
        return Scaling(name)
    except ValueError as error:
        raise ConfigError(
            f"--scaling={name} was given.{nearest(name, list(Scaling))} Expected is one of {', '.join(Scaling)}."
        ) from error


def check(asked: Asked) -> None:
    """Raise ConfigError unless it can be drawn, whatever the model."""
    for name in asked.directions:
        if name not in NOISES and name not in SPECIAL:
            known = [*NOISES, *SPECIAL]
            raise ConfigError(
                f"direction '{name}' is not known.{nearest(name, known)} Expected is a noise ({', '.join(NOISES)}) or a special "
                f"direction ({', '.join(SPECIAL)})."
            )
    for what, value in {"--draws": asked.draws, "--statistics": asked.statistics}.items():
        if value < 1:
            raise ConfigError(f"{what}={value} was given, but expected is 1 or more.")
    for scale in asked.scales:
        if not (np.isfinite(scale) and scale > 0):
            raise ConfigError(f"--scales has {scale:g}, but expected are numbers above 0.")
    if not asked.directions or not asked.scales:
        raise ConfigError("no direction or no scale was given, but expected is one of each at least.")
    lambdas_of(asked.points or _POINTS)


def look(subject: Subject, asked: Asked) -> Found:
    """The curves.

    Raises:
        FedSignError: the model does not have what was asked for.
    """
    check(asked)
    landscape = _landscape(subject, asked)
    rays = _rays(subject, landscape, asked)
    lambdas = lambdas_of(asked.points or _POINTS)
    drawn = curves(landscape, [ray.direction for ray in rays], scales=asked.scales, lambdas=lambdas)
    rows, arrays = [], {"lambda": lambdas}
    for ray, of_scales in zip(rays, drawn, strict=True):
        for scale, curve in zip(asked.scales, of_scales, strict=True):
            rows.append({"direction": ray.name, "label": ray.label, "draw": ray.draw, "scale": scale, **_sides(curve)})
    arrays["loss"] = np.array([[curve.loss for curve in of_scales] for of_scales in drawn])
    if drawn[0][0].error is not None:
        arrays["error"] = np.array([[curve.error for curve in of_scales] for of_scales in drawn])
    return Found(
        kind="valley",
        name=subject.name,
        facts=_facts(subject, asked, landscape),
        rows=rows,
        summary=_summary(rays, drawn, asked.scales),
        arrays=arrays,
    )


def look_at_surface(subject: Subject, asked: Asked) -> Found:
    """The surface over the plane of the first two directions, at the largest scale.

    Raises:
        FedSignError: there are not two, or the model does not have what was asked for.
    """
    check(asked)
    landscape = _landscape(subject, asked)
    rays = _rays(subject, landscape, asked)
    if len(rays) < 2:
        raise ConfigError("one direction was given for a surface, but expected are two: name two, or raise --draws.")
    points = asked.points or _SURFACE_POINTS
    first, second = rays[0], rays[1]
    scale = max(asked.scales)
    plane: Surface = surface(
        landscape,
        scale * first.direction,
        scale * second.direction,
        rows=lambdas_of(points),
        columns=lambdas_of(points),
    )
    arrays = {"rows": plane.rows, "columns": plane.columns, "loss": plane.loss}
    if plane.error is not None:
        arrays["error"] = plane.error
    facts = {
        **_facts(subject, asked, landscape),
        "rows": f"{first.label} {first.draw}",
        "columns": f"{second.label} {second.draw}",
        "scale": scale,
    }
    return Found(kind="surface", name=subject.name, facts=facts, rows=[], summary=[], arrays=arrays)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ray:
    """A direction, scaled; `draw` counts those of a noise."""

    name: str
    label: str
    draw: int
    direction: Tensor


def _landscape(subject: Subject, asked: Asked) -> Landscape:
    return Landscape(
        subject.model,
        subject.workload.task,
        subject.test_samples(asked.samples),
        statistics=subject.statistics(asked.statistics),
    )


def _rays(subject: Subject, landscape: Landscape, asked: Asked) -> list[_Ray]:
    layout, theta = landscape.layout, landscape.centre.cpu()
    where = None if asked.group == "ALL" else mask_of(asked.group, subject.model, layout)
    initial = subject.initial_vector(layout)
    found = []
    for name in asked.directions:
        for draw in range(asked.draws if name in NOISES else 1):
            if name in NOISES:
                eps = noise(name, layout.size, seed=asked.seed, index=draw, dtype=theta.dtype)
            else:
                eps = special(name, layout, theta, initial)
            if asked.signs is not None:
                eps = with_signs(eps, theta, fraction=asked.signs, seed=asked.seed, index=draw)
            direction = scaled(layout, eps, theta, asked.scaling, where=where).to(landscape.centre.device)
            found.append(_Ray(name=name, label=_label(name, asked.signs), draw=draw, direction=direction))
    return found


def _label(name: str, signs: float | None) -> str:
    label = LABELS.get(name) or SPECIAL[name]
    if signs is None:
        return label
    return f"|{label}| sign(θf)" if signs == 1 else f"{label}, {100 * signs:g} % of signs"


def _sides(curve: Curve) -> dict[str, Any]:
    figures = ["loss"] if curve.error is None else ["loss", "error"]
    return {figure: _numbers(curve.sides(figure)) for figure in figures}


def _numbers(sides: Sides) -> dict[str, float | None]:
    return asdict(sides) | {"asymmetry": sides.asymmetry}


def _summary(rays: Sequence[_Ray], drawn: Sequence[Sequence[Curve]], scales: Sequence[float]) -> list[dict[str, Any]]:
    """For each direction and scale: means over its draws, and the asymmetry's interval."""
    figure = "loss" if drawn[0][0].error is None else "error"
    rows = []
    for name in dict.fromkeys(ray.name for ray in rays):
        mine = [(ray, of_scales) for ray, of_scales in zip(rays, drawn, strict=True) if ray.name == name]
        for column, scale in enumerate(scales):
            sides = [of_scales[column].sides(figure) for _, of_scales in mine]
            interval = asymmetry(sides)
            rows.append(
                {
                    "direction": name,
                    "label": mine[0][0].label,
                    "scale": scale,
                    "figure": figure,
                    "num_draws": len(sides),
                    "mean_positive": _mean([side.mean_positive for side in sides]),
                    "mean_negative": _mean([side.mean_negative for side in sides]),
                    "width_positive": _mean([side.width_positive for side in sides]),
                    "width_negative": _mean([side.width_negative for side in sides]),
                    "asymmetry": None if interval is None else interval.mean,
                    "asymmetry_low": None if interval is None else interval.low,
                    "asymmetry_high": None if interval is None else interval.high,
                }
            )
    return rows


def _mean(values: Sequence[float | None]) -> float | None:
    """None if one of them is: a mean of the others would say too little."""
    numbers = [value for value in values if value is not None]
    return float(np.mean(numbers)) if len(numbers) == len(values) else None


def _facts(subject: Subject, asked: Asked, landscape: Landscape) -> Mapping[str, Any]:
    return {
        "source": str(subject.source),
        "model": subject.workload.config.model.name,
        "data": subject.workload.config.data.name,
        "num_parameters": landscape.layout.size,
        "num_samples": landscape.num_samples,
        "num_statistics": landscape.num_statistics,
        "directions": list(asked.directions),
        "draws": asked.draws,
        "scales": list(asked.scales),
        "scaling": str(asked.scaling),
        "signs": asked.signs,
        "group": asked.group,
        "seed": asked.seed,
        "torch": torch.__version__,
    }
