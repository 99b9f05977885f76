"""`fedsign.analyze.curvature`: trace and extreme eigenvalues of the Hessian, and the angle of gradient and signs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count

import torch

from fedsign.landscape.curvature import Curvature
from fedsign.report.analysis import Analysis
from simulations.landscape.target import Source, target_of
from simulations.progress import display


def curvature(
    source: Source,
    *,
    draws: int = 32,
    eigenvalues: int = 1,
    samples: int | None = None,
    seed: int = 0,
    model: str | None = None,
    overrides: Sequence[str] = (),
) -> Analysis:
    """Compute trace and extreme eigenvalues of the Hessian of the mean test loss.

    Args:
        source: a run, or the path of a run, of one of its checkpoints, or of a file of weights.
        draws: number of draws of Hutchinson's trace estimator.
        eigenvalues: number of eigenvalues at each end.
        samples: number of test samples; all by default.
        seed: seed of the draws.
        model: the model of a file of weights, such as "mlp".
        overrides: other settings of its experiment, such as "data.name=mnist".

    Raises:
        FedSignError: the request cannot be computed.
    """
    target = target_of(source, model=model, overrides=overrides)
    chosen = target.test_samples(samples)
    hessian = Curvature(target.model, target.workload.task, chosen)
    with _shown(hessian, draws, "draw of the trace"):
        trace, error = hessian.trace(draws=draws, seed=seed)
    # Lanczos' method takes as many products as it needs
    with _shown(hessian, None, "product for the eigenvalues"):
        low, high = hessian.extreme_eigenvalues(eigenvalues, seed=seed)
    # float64: the cosine is near 0, a small difference of sums over all parameters
    gradient = hessian.gradient().double()
    signs = hessian.center.sign().double()
    return Analysis(
        kind="curvature",
        name=target.name,
        facts={
            **target.facts,
            "num_parameters": hessian.layout.size,
            "num_samples": len(chosen),
            "draws": draws,
            "seed": seed,
            "trace": trace,
            "trace_standard_error": error,
            "largest": float(high[-1]),
            "smallest": float(low[0]),
            "gradient_norm": float(gradient.norm()),
            "cosine_signs_gradient": float(torch.cosine_similarity(signs, gradient, dim=0)),
        },
        arrays={"smallest": low, "largest": high},
    )


@contextmanager
def _shown(hessian: Curvature, total: int | None, unit: str) -> Iterator[None]:
    numbers = count(1)
    with display(total, unit=unit) as shown:
        hessian.on_product = lambda: shown.show(next(numbers))
        yield
