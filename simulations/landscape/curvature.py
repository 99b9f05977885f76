"""`fedsign.analyse.curvature`: the Hessian's trace and extreme eigenvalues, and how the gradient lies to the signs."""

from collections.abc import Sequence

import torch

from fedsign.landscape.curvature import Curvature
from fedsign.report.analysis import Found
from simulations.landscape.subject import Source, subject_of


def curvature(
    source: Source,
    *,
    draws: int = 32,
    eigenvalues: int = 1,
    samples: int | None = None,
    seed: int = 0,
    model: str | None = None,
    overrides: Sequence[str] = (),
) -> Found:
    """The Hessian of the mean loss on the test samples: its trace and its extreme eigenvalues.

    Args:
        source: a run, or the path of a run, of one of its checkpoints, or of a file of weights.
        draws: of Hutchinson's estimate of the trace.
        eigenvalues: how many at each end.
        samples: of the test set; without it, all.
        seed: of the draws.
        model: the model of a file of weights, such as "mlp".
        overrides: the rest of its experiment, such as "data.name=mnist".

    Raises:
        FedSignError: what was asked for cannot be computed.
    """
    subject = subject_of(source, model=model, overrides=overrides)
    chosen = subject.test_samples(samples)
    hessian = Curvature(subject.model, subject.workload.task, chosen)
    trace, error = hessian.trace(draws=draws, seed=seed)
    low, high = hessian.extreme_eigenvalues(eigenvalues, seed=seed)
    gradient = hessian.gradient().double()
    signs = hessian.centre.sign().double()
    return Found(
        kind="curvature",
        name=subject.name,
        facts={
            **subject.facts,
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
