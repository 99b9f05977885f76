"""Between two minima: of small and of large batches, and of two models that went on from one start.

Paper: arXiv 2405.12489, section 4.  Networks are MLPs 64-128-128-10 on digits.
"""

from collections import defaultdict

import numpy as np
import torch

from fedsign.data.base import Samples
from fedsign.landscape.interpolation import soup_gap
from fedsign.landscape.landscape import Landscape
from fedsign.landscape.sign_ratios import same_sign_ratio
from fedsign.records import tensors_of
from simulations.landscape.interpolate import look
from simulations.recipes.base import Figures, at_least, recipe
from simulations.recipes.cells import averages
from simulations.recipes.valleys.networks import network, trained_on_share, workload_in_shares


@recipe(
    "On the line from a minimum of small batches to one of large ones, the large batches' side is the more asymmetric.",
    at_least(0.0, "large_minus_small"),
    quick=[at_least(0.5, "same_sign_ratio")],
)
def valley_interpolation_batch_size(quick: bool) -> Figures:
    """Over 5 pairs of networks (quick: 2); errors within 0.5 of each minimum, away from the other one and towards it.

    Paper: (1 - lambda) theta_1 + lambda theta_2, lambda in [-1, 2], of batches of 32 and of 2048, from one initialisation: the small
    batch's minimum is sharper and nearly symmetric, the large batch's flatter and asymmetric.  Here batches of 32 and of 512
    (2048 would be more than all samples), these for eight times as many epochs, since an epoch has three of them.
    """
    found = defaultdict[str, list[float]](list)
    for seed in range(2 if quick else 5):
        small = network(seed, {"client": {"batch_size": 32}})
        large = network(seed, {"client": {"batch_size": 512, "local_epochs": 8}})
        line = look(small, large)
        for name in ("barrier", "midpoint_gap", "same_sign_ratio"):
            found[name].append(line.facts[name])
        lambdas, errors = line.arrays["lambda"], line.arrays["error"]
        for name, low, end in (
            ("small_outside", -0.5, "first"),
            ("small_inside", 0.0, "first"),
            ("large_inside", 0.5, "second"),
            ("large_outside", 1.0, "second"),
        ):
            inside = (lambdas >= low - 1e-9) & (lambdas <= low + 0.5 + 1e-9)
            found[name].append(float(np.mean(errors[inside])) - line.facts[end])
    figures = averages(found)
    for name in ("small", "large"):
        figures[f"{name}_asymmetry"] = abs(figures[f"{name}_outside"] - figures[f"{name}_inside"])
    return figures | {"large_minus_small": figures["large_asymmetry"] - figures["small_asymmetry"]}


@recipe(
    "Models that go on from a trained start keep its signs, and their mean is better than they are; from random weights less so.",
    at_least(0.95, "trained_ssr_50"),
    at_least(0.0, "trained_gap_50", "ssr_difference"),
    quick=[at_least(0.0, "ssr_difference")],
)
def soup_sign_ratio(quick: bool) -> Figures:
    """Over 5 seeds (quick: 1), after 1, 3, 10 and 50 epochs; a gap above 0: the mean of the two is better than they are.

    Paper: the data in two halves, one model trained on each from the same start; same-sign ratios of start and A, start and B, A and B;
    gap = Acc(0.5 A + 0.5 B) - 0.5 (Acc(A) + Acc(B)).  From random weights the ratio falls and the gap with it; from trained ones the
    ratio stays above 0.95 and the gap is positive.  Here three shares: one to train the start on, two to go on with.
    """
    found = defaultdict[str, list[float]](list)
    for seed in range(1 if quick else 5):
        workload = workload_in_shares(seed, 3)
        model = workload.make_model()
        random = tensors_of(model)
        starts = {"random": random, "trained": trained_on_share(workload, random, 0, epochs=30)}
        test = workload.dataset.test
        features, targets = test.batch(torch.arange(len(test)))
        landscape = Landscape(model, workload.task, Samples(features=features, targets=targets))
        for name, start in starts.items():
            for epochs in (10, 50) if quick else (1, 3, 10, 50):
                ends = [trained_on_share(workload, start, share, epochs=epochs) for share in (1, 2)]
                begin, one, other = (landscape.layout.vector(each) for each in (start, *ends))
                kept = (same_sign_ratio(begin, one) + same_sign_ratio(begin, other)) / 2
                found[f"{name}_ssr_start_{epochs}"].append(kept)
                found[f"{name}_ssr_{epochs}"].append(same_sign_ratio(one, other))
                found[f"{name}_gap_{epochs}"].append(soup_gap(landscape, [one, other]))
    figures = averages(found)
    return figures | {
        f"{what}_difference": figures[f"trained_{what}_50"] - figures[f"random_{what}_50"] for what in ("ssr", "gap")
    }
