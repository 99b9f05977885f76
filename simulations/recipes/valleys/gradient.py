"""Signs of a trained model and the gradient of its loss: asymmetric valleys are not a slope.

Paper: arXiv 2405.12489, its gradient test: sign(theta_f) is almost orthogonal to the gradient, so a valley that is flat
on one side and sharp on the other is not explained by a loss that falls along the signs.
"""

from statistics import fmean

import torch

from simulations.landscape.target import Target
from simulations.recipes.base import Metrics, Verdict, at_most, part, recipe
from simulations.recipes.valleys.networks import networks, trainings
from simulations.recipes.where import AT_HOME, Where


@recipe(
    "The signs of a trained model are almost orthogonal to the gradient of its loss.",
    part("the cosine of the signs and the gradient is at most 0.1, for every network", at_most(0.1, "largest_cosine")),
    source="FedSign, gradient test",
    quick=[at_most(1.0, "mean_gradient_norm")],  # the networks have converged
    null={"largest_cosine": 0.5, "mean_gradient_norm": 2.0},
    expected=Verdict.DOES_NOT_HOLD,
    budget=trainings(10, 2),
)
def valley_gradient(quick: bool, where: Where = AT_HOME) -> Metrics:
    """Return |cos| of sign(theta_f) and the gradient of the mean training loss, over 10 networks (quick: 2).

    "Almost orthogonal" is a cosine of at most 0.1; two random directions in this many dimensions have about 0.006.
    """
    found = [_cosine(target) for target in networks(2 if quick else 10, where=where)]
    cosines, norms = zip(*found, strict=True)
    return {"mean_cosine": fmean(cosines), "largest_cosine": max(map(abs, cosines)), "mean_gradient_norm": fmean(norms)}


def _cosine(target: Target) -> tuple[float, float]:
    """Return the cosine, and the gradient's norm."""
    train = target.workload.dataset.train
    # all samples in one batch: the gradient of the mean loss, without noise
    features, targets = train.batch(torch.arange(len(train)))
    parameters = [*target.model.parameters()]
    loss = target.workload.task.loss(target.model(features), targets)
    gradients = torch.autograd.grad(loss, parameters)
    gradient = torch.cat([each.flatten() for each in gradients])
    signs = torch.cat([each.detach().sign().flatten() for each in parameters])
    return float(torch.cosine_similarity(gradient, signs, dim=0)), float(gradient.norm())
