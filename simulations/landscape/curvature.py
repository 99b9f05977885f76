"""`fedsign analyse curvature`: the Hessian's trace and extreme eigenvalues, and how the gradient lies to the signs."""

import torch

from fedsign.landscape.curvature import Curvature
from fedsign.report.analysis import Found
from simulations.landscape.subject import Subject


def look(
    subject: Subject, *, draws: int = 32, eigenvalues: int = 1, samples: int | None = None, seed: int = 0
) -> Found:
    """Of the mean loss on the test samples.

    Raises:
        FedSignError: what was asked for cannot be computed.
    """
    chosen = subject.test_samples(samples)
    curvature = Curvature(subject.model, subject.workload.task, chosen)
    trace, error = curvature.trace(draws=draws, seed=seed)
    low, high = curvature.extreme_eigenvalues(eigenvalues, seed=seed)
    gradient = curvature.gradient().double()
    signs = curvature.centre.sign().double()
    return Found(
        kind="curvature",
        name=subject.name,
        facts={
            **subject.facts,
            "num_parameters": curvature.layout.size,
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
