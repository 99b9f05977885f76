"""`fedsign.analyze.trajectory`: a run's checkpoints as a path over the loss landscape around its last model."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedsign.errors import ConfigError, ResultsError
from fedsign.landscape.landscape import Landscape
from fedsign.landscape.surfaces import surface_figures
from fedsign.landscape.trajectory import principal_plane, window
from fedsign.landscape.valley import surface
from fedsign.report.analysis import Analysis
from fedsign.storage import checkpoints
from fedsign.storage.finding import open_run
from fedsign.storage.results import RunFolder
from simulations.landscape.evaluations import evaluating
from simulations.landscape.target import Target, path_of, target_of

if TYPE_CHECKING:
    from simulations.api import Run

# n = checkpoints, D = parameters: a path is [n, D], its coordinates in the plane [n, 2]
_FEWEST = 4  # checkpoints: any three lie in a plane


def trajectory(
    run: "Run | Path | str",
    *,
    points: int = 41,
    samples: int | None = None,
    statistics: int = 500,
    keep: Path | None = None,
) -> Analysis:
    """Compute loss and error over the plane of a trajectory's two principal directions, and the path in this plane.

    Args:
        run: a run that kept its checkpoints, or its path.
        points: number of points per side of the plane.
        samples: number of test samples; all by default.
        statistics: number of training samples to recompute BatchNorm statistics on; 0 keeps the models' own.
        keep: folder for the values so far, with which the same call goes on after an interruption.

    Raises:
        FedSignError: it is not a run, or it did not keep its checkpoints.
    """
    path = path_of(run)
    if points < 3:
        raise ConfigError(f"--points={points} was given, but expected 3 or more.")
    if path.is_file():
        raise ConfigError(f"{path} is a file of weights, which has no path behind it; give the folder of a run.")
    folder, target = open_run(path), target_of(path)
    landscape = target.landscape(samples, statistics)
    rounds, models = _path(folder, target, landscape)
    plane = principal_plane(models)
    rows, columns = window(plane.coordinates, points)
    request = {"kind": "trajectory", "points": points, "samples": samples, "statistics": statistics}
    request["experiment"] = target.workload.config.to_toml()
    with evaluating(landscape, points**2 + len(models), keep=keep, request=request, models=[models]):
        # reversed: rows run along the second direction, the plot's y axis
        values = surface(landscape, *reversed(plane.directions.unbind()), rows=rows, columns=columns)
        # at the models themselves, which lie off the plane: its values there may be far from theirs
        own = landscape.at(models)
    return Analysis(
        kind="trajectory",
        name=target.name,
        facts={
            **target.facts,
            **landscape.sizes,
            **target.centers(landscape, samples),
            "explained": plane.explained.tolist(),
        },
        rows=[
            {"round": round, "x": x, "y": y, **{name: float(of[index]) for name, of in own.arrays().items()}}
            for index, (round, (x, y)) in enumerate(zip(rounds, plane.coordinates.tolist(), strict=True))
        ],
        arrays={"rows": rows, "columns": columns, "path": plane.coordinates, **values.arrays()},
        drawn_by=surface_figures,
    )


def _path(run: RunFolder, target: Target, landscape: Landscape) -> tuple[list[int], Tensor]:
    """Return rounds and the evaluated models after them [n, D], from round 0 unless the first checkpoints are gone."""
    rounds = checkpoints.rounds_on_disk(run.checkpoints)
    if len(rounds) < _FEWEST:
        raise ResultsError(
            f"{run.path} keeps {len(rounds)} checkpoints, but expected {_FEWEST} or more to draw its path; run "
            "it again with --set results.checkpoint_every=1 --set results.keep_checkpoints=1000."
        )
    points = []
    for round in rounds:
        source = run.checkpoints / f"round-{round:06d}"
        checkpoint = checkpoints.load(source)
        model = replace(target, source=source, tensors=checkpoint.evaluated or checkpoint.served)
        # [D], in one layout for all: `principal_plane` subtracts them
        points.append(model.vector_in(landscape.layout))
    start = target.initial_vector(landscape.layout)
    # one interval or less from round 0 to the first checkpoint: none were removed in between
    if start is not None and rounds[0] <= rounds[1] - rounds[0]:
        rounds, points = [0, *rounds], [start, *points]
    return rounds, torch.stack(points).to(landscape.center)
