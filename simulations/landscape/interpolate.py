"""`fedsign.analyze.interpolate`: the line through two models, its barrier, and their distance by layer."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedsign.landscape.figures import path_figures
from fedsign.landscape.interpolation import between
from fedsign.landscape.landscape import Landscape
from fedsign.landscape.sign_ratios import same_sign_ratio, step_by_group
from fedsign.report.analysis import Analysis
from simulations.landscape.evaluations import evaluating
from simulations.landscape.target import Source, Target, at_center, targets_of

_log = logging.getLogger("fedsign")


def interpolate(
    first: Source,
    second: Source,
    *,
    points: int = 61,
    samples: int | None = None,
    statistics: int = 500,
    model: str | None = None,
    overrides: Sequence[str] = (),
    keep: Path | None = None,
) -> Analysis:
    """Compute loss and error from one model to another and beyond, on the first one's test samples.

    Args:
        first: a run, or the path of a run, of one of its checkpoints, or of a file of weights.
        second: another model of the same architecture.
        points: number of points from lambda = -1 to 2.
        samples: number of test samples; all by default.
        statistics: number of training samples to recompute BatchNorm statistics on; 0 keeps the models' own.
        model: the model of a file of weights, such as "mlp".
        overrides: other settings of its experiment, such as "data.name=mnist".
        keep: folder for the values so far, with which the same call goes on after an interruption.

    Raises:
        FedSignError: the models differ in architecture.
    """
    start, end = targets_of([first, second], model=model, overrides=overrides)
    _warn_of_other_data(start, end)
    landscape = start.landscape(samples, statistics)
    # both models in the first one's layout: an interpolation pairs parameters by name
    one, other = landscape.center, end.vector_in(landscape.layout).to(landscape.center)
    request = {"kind": "interpolation", "points": points, "samples": samples, "statistics": statistics}
    request["experiment"] = start.workload.config.to_toml()
    # three more: the ends and the middle
    with evaluating(landscape, points + 3, keep=keep, request=request, models=[other]):
        lambdas, values, facts = between(landscape, one, other, points=points)
    return Analysis(
        kind="interpolation",
        name=f"{start.name} to {end.name}",
        facts={
            **start.facts,
            "target": str(end.source),
            **landscape.sizes,
            **facts,
            **_own_ends(start, end, landscape, samples),
            "same_sign_ratio": same_sign_ratio(one, other),
        },
        rows=step_by_group(start.model, landscape.layout, one.cpu(), other.cpu()),
        arrays={"lambda": lambdas, **values.arrays()},
        drawn_by=path_figures,
    )


def _own_ends(first: Target, second: Target, landscape: Landscape, samples: int | None) -> dict[str, Any]:
    """Evaluate both models with their own BatchNorm statistics, if the line recomputes these."""
    if not landscape.sizes["num_statistics"]:
        return {}
    task, chosen = first.workload.task, first.test_samples(samples)
    # without `statistics`: as the runs evaluated them
    return {"own_ends": [at_center(Landscape(each.model, task, chosen)) for each in (first, second)]}


def _warn_of_other_data(first: Target, second: Target) -> None:
    """Warn if seed or data differ: they determine the test samples, so the second model may have trained on them."""
    one, other = first.workload.config, second.workload.config
    if (one.seed, one.data) != (other.seed, other.data):
        _log.warning(
            "%s and %s hold out other test samples (other seed or data): the second model may have been trained on "
            "some of those that it is looked at on.",
            first.source,
            second.source,
        )
