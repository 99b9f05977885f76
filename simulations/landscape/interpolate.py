"""`fedsign analyse interpolate`: the line through two models, its barrier, and what the step between them is made of."""

import logging
from dataclasses import asdict

from torch import Tensor

from fedsign.errors import ConfigError
from fedsign.landscape.interpolation import between
from fedsign.landscape.landscape import Landscape
from fedsign.landscape.sign_ratios import same_sign_ratio, step_by_group
from fedsign.report.analysis import Found
from simulations.landscape.subject import Subject

_log = logging.getLogger("fedsign")


def look(
    first: Subject, second: Subject, *, points: int = 61, samples: int | None = None, statistics: int = 500
) -> Found:
    """From the first model to the second and beyond, on the first one's test samples.

    Raises:
        FedSignError: they are not of one architecture.
    """
    _warn_of_other_data(first, second)
    landscape = Landscape(
        first.model, first.workload.task, first.test_samples(samples), statistics=first.statistics(statistics)
    )
    one, other = landscape.centre, vector_of(second, landscape)
    path = between(landscape, one, other, points=points)
    arrays = {"lambda": path.curve.lambdas, "loss": path.curve.loss}
    if path.curve.error is not None:
        arrays["error"] = path.curve.error
    return Found(
        kind="interpolation",
        name=f"{first.name} to {second.name}",
        facts={
            "source": str(first.source),
            "target": str(second.source),
            "model": first.workload.config.model.name,
            "data": first.workload.config.data.name,
            "num_parameters": landscape.layout.size,
            "num_samples": landscape.num_samples,
            "num_statistics": landscape.num_statistics,
            "figure": path.figure,
            "first": path.ends[0],
            "second": path.ends[1],
            "middle": path.middle,
            "midpoint_gap": path.midpoint_gap,
            "barrier": path.barrier,
            "same_sign_ratio": same_sign_ratio(one, other),
        },
        rows=[asdict(row) for row in step_by_group(first.model, landscape.layout, one.cpu(), other.cpu())],
        summary=[],
        arrays=arrays,
    )


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


def vector_of(subject: Subject, landscape: Landscape) -> Tensor:
    """A model's parameters, in the order of another one's.

    Raises:
        ConfigError: it has other parameters.
    """
    try:
        found = landscape.layout.vector(subject.tensors)
    except ConfigError as error:
        raise ConfigError(f"{subject.source} and the first model are not of one architecture: {error}") from error
    return found.to(landscape.centre)
