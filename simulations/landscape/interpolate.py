"""`fedsign analyse interpolate`: the line through two models, its barrier, and the step between them by layer."""

import logging
from typing import Any

from fedsign.landscape.interpolation import between
from fedsign.landscape.landscape import Landscape
from fedsign.landscape.sign_ratios import same_sign_ratio, step_by_group
from fedsign.report.analysis import Found
from simulations.landscape.subject import Subject, at_centre

_log = logging.getLogger("fedsign")


def look(
    first: Subject, second: Subject, *, points: int = 61, samples: int | None = None, statistics: int = 500
) -> Found:
    """From the first model to the second and beyond, on the first one's test samples.

    Raises:
        FedSignError: they are not of one architecture.
    """
    _warn_of_other_data(first, second)
    landscape = first.landscape(samples, statistics)
    one, other = landscape.centre, second.vector_in(landscape.layout).to(landscape.centre)
    lambdas, values, facts = between(landscape, one, other, points=points)
    return Found(
        kind="interpolation",
        name=f"{first.name} to {second.name}",
        facts={
            **first.facts,
            "target": str(second.source),
            **landscape.sizes,
            **facts,
            **_own_ends(first, second, landscape, samples),
            "same_sign_ratio": same_sign_ratio(one, other),
        },
        rows=step_by_group(first.model, landscape.layout, one.cpu(), other.cpu()),
        arrays={"lambda": lambdas, **values.arrays()},
    )


def _own_ends(first: Subject, second: Subject, landscape: Landscape, samples: int | None) -> dict[str, Any]:
    """Both models with BatchNorm's own running statistics, where the line has them taken anew."""
    if not landscape.sizes["num_statistics"]:
        return {}
    task, chosen = first.workload.task, first.test_samples(samples)
    return {"own_ends": [at_centre(Landscape(each.model, task, chosen)) for each in (first, second)]}


def _warn_of_other_data(first: Subject, second: Subject) -> None:
    """Test samples are held out by the seed: another run may have been trained on them."""
    one, other = first.workload.config, second.workload.config
    if (one.seed, one.data) != (other.seed, other.data):
        _log.warning(
            "%s and %s hold out other test samples (other seed or data): the second model may have been trained on some of those "
            "that it is looked at on.",
            first.source,
            second.source,
        )
