"""Between two minima, and what a step along the weights' signs does to hidden units and to a classifier.

Paper: arXiv 2405.12489, sections 4 and 5 and Figure 29.  Networks are MLPs 64-128-128-10 on digits.
"""

from collections import defaultdict
from itertools import product
from statistics import fmean

import numpy as np
import torch
from scipy.stats import spearmanr

from fedsign.data.base import Samples
from fedsign.landscape.activations import activation_confusion as confusion
from fedsign.landscape.activations import relu_demo as relu_inputs
from fedsign.landscape.activations import softmax_curve
from fedsign.landscape.directions import Scaling, noise, scaled, with_signs
from fedsign.landscape.interpolation import soup_gap
from fedsign.landscape.landscape import Landscape
from fedsign.landscape.sign_ratios import same_sign_ratio
from fedsign.landscape.vector import Layout
from fedsign.records import tensors_of
from simulations.landscape.interpolate import interpolate
from simulations.recipes.base import Metrics, Verdict, above, at_least, at_most, below, part, recipe
from simulations.recipes.cells import averages, mean_interval, paired_difference
from simulations.recipes.valleys.networks import network, networks, trained_on_share, trainings, workload_in_shares
from simulations.recipes.valleys.noises import SYMMETRIC
from simulations.recipes.where import AT_HOME, Where

SIZES = (64, 256, 1024)  # of the neuron's weights: the d that the paper leaves open
_FRESH = range(100, 120)  # seeds 0 to 4 left the outcome open


@recipe(
    (
        "On the line from a minimum of small batches to one of large ones, the small batches' is sharper and nearly "
        "symmetric, the large batches' flatter and asymmetric."
    ),
    part("the minimum of small batches is sharper than that of large batches", above(0.0, "sharper_low")),
    part(
        "the minimum of large batches is more asymmetric than that of small batches", above(0.0, "more_asymmetric_low")
    ),
    part("the minimum of small batches is nearly symmetric", at_most(SYMMETRIC, "small_asymmetry_high")),
    part("the minimum of large batches is asymmetric", above(SYMMETRIC, "large_asymmetry_low")),
    source="FedSign, section 3.2",
    quick=[at_least(0.8, "same_sign_ratio")],  # two unrelated models have 0.5
    null={
        "sharper_low": 0.0,
        "more_asymmetric_low": 0.0,
        "small_asymmetry_high": 0.1,
        "large_asymmetry_low": 0.0,
        "same_sign_ratio": 0.5,
    },
    expected=Verdict.IN_PART,
    budget=trainings(2 * len(_FRESH), 4),
)
def valley_interpolation_batch_size(quick: bool, where: Where = AT_HOME) -> Metrics:
    """Return errors within 0.5 of each minimum, on either side, over 20 pairs of networks (quick: 2).

    Paper: (1 - lambda) theta_1 + lambda theta_2, lambda in [-1, 2], of batches of 32 and of 2048, from one
    initialization: the small-batch minimum is sharper and nearly symmetric, the large-batch minimum flatter and
    asymmetric.  Here batches of 32 and of 512 (2048 would exceed the data set), the latter for eight times as many
    epochs, since an epoch has only three of them.

    `rise`: the mean error on a minimum's two sides, minus its own error; `asymmetry`: their absolute difference.
    `sharper` is the small-batch rise minus the large-batch one, `more_asymmetric` the large-batch asymmetry minus the
    small-batch one, both paired. `_low` and `_high` are ends of 95 % intervals over pairs of networks.
    """
    found = defaultdict[str, list[float]](list)
    for seed in _FRESH[: 2 if quick else None]:
        small = network(seed, {"client": {"batch_size": 32}}, where)
        large = network(seed, {"client": {"batch_size": 512, "local_epochs": 8}}, where)
        path = interpolate(small, large)
        for name in ("barrier", "midpoint_gap", "same_sign_ratio"):
            found[name].append(path.facts[name])
        lambdas, errors = path.arrays["lambda"], path.arrays["error"]
        for name, outside, inside, end in (("small", -0.5, 0.0, "first"), ("large", 1.0, 0.5, "second")):
            sides = [
                float(np.mean(errors[(lambdas >= low - 1e-9) & (lambdas <= low + 0.5 + 1e-9)])) - path.facts[end]
                for low in (outside, inside)
            ]
            for side, rise in zip(("outside", "inside"), sides, strict=True):
                found[f"{name}_{side}"].append(rise)
            found[f"{name}_rise"].append(fmean(sides))
            found[f"{name}_asymmetry"].append(abs(sides[0] - sides[1]))
    sharper = paired_difference(found["small_rise"], found["large_rise"])
    asymmetric = paired_difference(found["large_asymmetry"], found["small_asymmetry"])
    return averages(found) | {
        "sharper": sharper["difference"],
        "sharper_low": sharper["difference_low"],
        "more_asymmetric": asymmetric["difference"],
        "more_asymmetric_low": asymmetric["difference_low"],
        "small_asymmetry_high": mean_interval(found["small_asymmetry"])["difference_high"],
        "large_asymmetry_low": mean_interval(found["large_asymmetry"])["difference_low"],
    }


@recipe(
    (
        "Models that go on from a trained start keep its signs, and their mean is better than they are; from random "
        "weights a barrier grows between them."
    ),
    part(
        "two models trained further from the same trained weights keep their signs: same-sign ratio above 0.95",
        above(0.95, "trained_ssr_50", "trained_ssr_start_50"),
    ),
    part(
        "the average of two models from the same trained weights is better than either", above(0.0, "trained_gap_low")
    ),
    part("models from random weights have a lower same-sign ratio", above(0.0, "ssr_difference_low")),
    part(
        "the longer two models train from random weights, the worse their average is compared with them",
        below(0.0, "random_gap_growth_high"),
    ),
    part(
        "in the end, the average of two models from random weights is worse than they are: there is a barrier",
        below(0.0, "random_gap_high"),
    ),
    source="FedSign, section 4",
    quick=[above(0.0, "ssr_difference")],
    null={"random_gap_high": 0.01, "random_gap_growth_high": 0.0, "trained_ssr_50": 0.9, "trained_ssr_start_50": 0.9}
    | dict.fromkeys(("trained_gap_low", "ssr_difference_low", "ssr_difference"), 0.0),
    expected=Verdict.IN_PART,
    budget=trainings(5 * len(_FRESH), 5),
)
def soup_sign_ratio(quick: bool, where: Where = AT_HOME) -> Metrics:
    """Return sign ratios and gaps over 20 seeds (quick: 1), after 1, 3, 10 and 50 epochs.

    Paper: the data in two halves, one model trained on each from the same start; same-sign ratios of start and A, start
    and B, A and B; gap = Acc(0.5 A + 0.5 B) - 0.5 (Acc(A) + Acc(B)).  From random weights the ratio falls and the gap
    with it; from trained ones the ratio stays above 0.95 and the gap is positive: the averaged model is better than its
    parts. Here three shares: one trains the start, the other two continue.

    `random_gap_growth` is the gap after 50 epochs minus that after 1; `_low` and `_high` are ends of 95 % intervals
    over seeds.
    """
    epochs_tried = (10, 50) if quick else (1, 3, 10, 50)
    found = defaultdict[str, list[float]](list)
    for seed in _FRESH[: 1 if quick else None]:
        workload = workload_in_shares(seed, 3, where)
        model = workload.make_model()
        random = tensors_of(model)
        starts = {"random": random, "trained": trained_on_share(workload, random, 0, epochs=30)}
        test = workload.dataset.test
        features, targets = test.batch(torch.arange(len(test)))
        landscape = Landscape(model, workload.task, Samples(features=features, targets=targets))
        for (name, start), epochs in product(starts.items(), epochs_tried):
            ends = [trained_on_share(workload, start, share, epochs=epochs) for share in (1, 2)]
            begin, one, other = (landscape.layout.vector(each) for each in (start, *ends))
            # the two shares are interchangeable
            kept = (same_sign_ratio(begin, one) + same_sign_ratio(begin, other)) / 2
            found[f"{name}_ssr_start_{epochs}"].append(kept)
            found[f"{name}_ssr_{epochs}"].append(same_sign_ratio(one, other))
            found[f"{name}_gap_{epochs}"].append(soup_gap(landscape, [one, other]))
    metrics = averages(found)
    metrics["ssr_difference"] = metrics["trained_ssr_50"] - metrics["random_ssr_50"]
    if quick:
        return metrics
    random_gap = mean_interval(found["random_gap_50"])
    growth = paired_difference(found["random_gap_50"], found["random_gap_1"])
    return metrics | {
        "trained_gap_low": mean_interval(found["trained_gap_50"])["difference_low"],
        "ssr_difference_low": paired_difference(found["trained_ssr_50"], found["random_ssr_50"])["difference_low"],
        "random_gap_high": random_gap["difference_high"],
        "random_gap_growth": growth["difference"],
        "random_gap_growth_high": growth["difference_high"],
    }


@recipe(
    (
        "Along the signs of a softmax classifier's weights the Hessian's trace and the error are smaller than "
        "against them."
    ),
    part(
        "along the signs of a softmax classifier's weights the Hessian's trace is smaller, for every noise",
        below(1.0, "largest_trace_ratio"),
    ),
    part(
        "along the signs of a softmax classifier's weights the error is smaller, by 20 points or more",
        at_least(0.2, "signs_error_gap"),
    ),
    source="FedSign, Figure 29",
    given=at_most(0.1, "raw_error_gap"),  # raw noise is symmetric
    null={"largest_trace_ratio": 1.0, "signs_error_gap": 0.0, "raw_error_gap": 0.0},
    expected=Verdict.HOLDS,
)
def softmax_demo(quick: bool) -> Metrics:
    """Return errors over 10 noise draws (quick: 3).

    Paper: Figure 29: logistic regression on scikit-learn's digits (500 iterations, no intercept, fitted and evaluated
    on all of them); noise G(0, 1), or |G(0, 1)| sign(W), raw; 21 lambdas from -1 to 1.
    """
    from sklearn.datasets import load_digits
    from sklearn.linear_model import LogisticRegression

    features, labels = load_digits(return_X_y=True)
    weights = LogisticRegression(max_iter=500, fit_intercept=False).fit(features, labels).coef_
    lambdas = np.linspace(-1, 1, 21)
    noises = [np.random.default_rng(seed).standard_normal(weights.shape) for seed in range(3 if quick else 10)]
    directions = {"raw": noises, "signs": [np.abs(each) * np.sign(weights) for each in noises]}
    means, metrics = {}, {}
    for name, drawn in directions.items():
        curves = [softmax_curve(weights, each, features, labels, lambdas) for each in drawn]
        ratios = [curve["trace"][lambdas > 0].mean() / curve["trace"][lambdas < 0].mean() for curve in curves]
        metrics[f"{name}_largest_trace_ratio"] = float(max(ratios))
        for measure in ("error", "loss", "spread", "trace", "curvature"):
            means[name, measure] = mean = np.mean([curve[measure] for curve in curves], axis=0)
            metrics[f"{name}_{measure}_positive"] = float(mean[lambdas > 0].mean())
            metrics[f"{name}_{measure}_negative"] = float(mean[lambdas < 0].mean())
    return metrics | {
        "signs_error_at_1": float(means["signs", "error"][-1]),
        "signs_error_at_minus_1": float(means["signs", "error"][0]),
        "signs_error_gap": metrics["signs_error_negative"] - metrics["signs_error_positive"],
        "largest_trace_ratio": metrics["signs_largest_trace_ratio"],
        "signs_trace_ratio": metrics["signs_trace_positive"] / metrics["signs_trace_negative"],
        "signs_trace_spearman": float(spearmanr(lambdas, means["signs", "trace"])[0]),
        "raw_error_gap": abs(metrics["raw_error_negative"] - metrics["raw_error_positive"]),
    }


@recipe(
    "A neuron's distribution shifts to the right with each step along the signs of its weights, before and after ReLU.",
    *(
        part(
            "a neuron's input shifts to the right with each step along the signs of its weights: every decile grows, "
            f"with d = {size}",
            above(0.0, f"smallest_step_of_deciles_d{size}"),
        )
        for size in SIZES
    ),
    *(
        part(
            "the neuron's output after the ReLU shifts, too: a larger fraction is above 0, and no decile decreases, "
            f"with d = {size}",
            above(0.0, f"smallest_step_of_share_d{size}"),
            at_least(0.0, f"smallest_step_of_output_deciles_d{size}"),
        )
        for size in SIZES
    ),
    source="FedSign, section 5",
    given=above(0.0, "smallest_step"),  # of the mean, which cannot fall
    quick=[at_least(0.1, "share_gain_to_0")],
    null={
        "smallest_step": 1.0,
        "share_gain_to_0": 0.0,
        **{f"smallest_step_of_{what}_d{size}": 0.0 for what in ("deciles", "share") for size in SIZES},
        **{f"smallest_step_of_output_deciles_d{size}": -1.0 for size in SIZES},
    },
    open_constant="d",
    expected=Verdict.DEPENDS,
)
def relu_demo(quick: bool) -> Metrics:
    """Return steps of means, deciles and shares above 0, over 10,000 draws for each of 20 h (quick: 5).

    Paper: section 5 (ReLU demonstration): h in R^d from G(0, 1), w = 0.1 h + delta, 10,000 draws of delta; (w + lambda
    sign(w))^T h for lambda in {-1, -0.5, 0, 0.5, 1}: its distribution shifts to the right with lambda, before and after
    the ReLU.  The paper does not give d, and the answer depends on it, so it is swept.  Means, shares, and the lowest
    decile are those of the smallest d.

    The mean always grows: E[sign(w)^T h] = sum_j h_j (2 Phi(0.1 h_j) - 1) >= 0 for every h.  So it is a precondition,
    its smallest step over all h.  The step also increases the standard deviation, so low deciles and the fraction above
    0 can fall; their smallest steps are of means over h.
    """
    lambdas = np.array([-1.0, -0.5, 0.0, 0.5, 1.0])
    metrics: dict[str, float] = {}
    steps = []  # of the mean, for each size and h
    for size in SIZES:
        inputs, shares, deciles = [], [], []
        for seed in range(5 if quick else 20):
            sides = relu_inputs(lambdas, size=size, seed=seed)
            inputs.append(sides[0].mean(1))
            shares.append((sides[1] > 0).mean(1))
            deciles.append([np.quantile(side, np.arange(1, 10) / 10, axis=1) for side in sides])
        passed, (before, after) = np.mean(shares, axis=0), np.mean(deciles, axis=0)  # [lambdas], [9, lambdas]
        steps.append(np.diff(inputs).min())
        if size == SIZES[0]:
            shown = {"mean": np.mean(inputs, axis=0), "open": passed, "lowest_decile": before[0]}
            for name, values in shown.items():
                metrics |= {f"{name}_at_{at:g}": float(value) for at, value in zip(lambdas, values, strict=True)}
            metrics["share_gain_to_0"] = float(passed[2] - passed[0])
        metrics |= {
            f"smallest_step_of_deciles_d{size}": float(np.diff(before).min()),
            f"smallest_step_of_share_d{size}": float(np.diff(passed).min()),
            f"smallest_step_of_output_deciles_d{size}": float(np.diff(after).min()),
        }
    return metrics | {"smallest_step": float(min(steps))}


@recipe(
    "More hidden units stay active or inactive after a step along the model's signs than after one against them.",
    part(
        "more hidden units keep their state (on or off) after a step along the model's signs than against them",
        above(0.0, "smallest_low"),
    ),
    part("control: before training, this difference is smaller", above(0.0, "smallest_gain_low")),
    source="FedSign, section 5",
    quick=[above(0.0, "smallest_difference")],
    null=dict.fromkeys(("smallest_low", "smallest_gain_low", "smallest_difference"), 0.0),
    expected=Verdict.IN_PART,
    budget=trainings(5, 2),
)
def activation_confusion(quick: bool, where: Where = AT_HOME) -> Metrics:
    """Return fractions of features whose state stays the same, over 5 networks and 5 noise draws each (quick: 2 and 2).

    Paper: section 5: the confusion matrix of active and inactive hidden features of theta_f and theta_f + lambda |eps|
    sign(theta_f) has a larger trace at lambda = a than at -a, for a in {0.2, 0.4, 0.6, 0.8, 1}.  Here the last hidden
    layer of an MLP 64-128-128-10 on digits, norm-scaled.

    The control is ours. It was added when untrained networks turned out to behave alike: a step along the signs
    enlarges weights, one against them flips small ones.  `gain`: the difference after training minus that before.
    """
    steps = (0.2, 0.4, 0.6, 0.8, 1.0)
    found = defaultdict[tuple[str, float], list[float]](list)  # per network, the mean over its noise draws
    for target in networks(2 if quick else 5, where=where):
        layout = Layout.of(target.model)
        features = target.test_samples(None).features
        after, before = layout.vector(dict(target.model.named_parameters())), target.initial_vector(layout)
        if before is None:
            raise ValueError("a network of this recipe has lost its initial weights; expected those of its seed.")
        for name, theta in (("same", after), ("untrained", before)):
            same = defaultdict[float, list[float]](list)
            for draw in range(2 if quick else 5):
                eps = with_signs(noise("gaussian", layout.size, seed=draw), theta)
                direction = scaled(layout, eps, theta, Scaling.NORM)
                for at in (sign * step for step in steps for sign in (1, -1)):
                    counts = confusion(target.model, layout, theta, theta + at * direction, features)
                    same[at].append(counts.trace().item() / counts.sum().item())
            for at, shares in same.items():
                found[name, at].append(fmean(shares))
    differences = {
        name: [np.subtract(found[name, step], found[name, -step]).tolist() for step in steps]
        for name in ("same", "untrained")
    }
    each_step = [*map(mean_interval, differences["same"])]
    gains = [paired_difference(*pair) for pair in zip(differences["same"], differences["untrained"], strict=True)]
    return {f"{name}_at_{at:g}": value for (name, at), value in averages(found).items()} | {
        "smallest_difference": min(each["difference"] for each in each_step),
        "smallest_low": min(each["difference_low"] for each in each_step),
        "smallest_gain": min(each["difference"] for each in gains),
        "smallest_gain_low": min(each["difference_low"] for each in gains),
    }
