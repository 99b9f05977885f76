"""Between two minima, and what a step along the signs of the weights does to hidden units and to a classifier.

Paper: arXiv 2405.12489, sections 4 and 5 and Figure 29.  Networks are MLPs 64-128-128-10 on digits.
"""

from collections import defaultdict

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
from simulations.landscape.interpolate import look
from simulations.recipes.base import Figures, at_least, at_most, recipe
from simulations.recipes.cells import averages
from simulations.recipes.valleys.networks import network, networks, trained_on_share, workload_in_shares


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


@recipe(
    "Along the signs of a softmax classifier's weights the Hessian's trace and the error are smaller than against them.",
    at_least(0.2, "signs_error_gap"),
    at_most(1.0, "signs_trace_ratio"),
    at_most(0.1, "raw_error_gap"),
)
def softmax_demo(quick: bool) -> Figures:
    """Over 10 noises (quick: 3).

    Paper: Figure 29: logistic regression on scikit-learn's digits (500 iterations, no intercept, fitted and evaluated on all of them);
    noise G(0, 1), or |G(0, 1)| sign(W), raw; 21 lambdas from -1 to 1.
    """
    from sklearn.datasets import load_digits
    from sklearn.linear_model import LogisticRegression

    features, labels = load_digits(return_X_y=True)
    weights = LogisticRegression(max_iter=500, fit_intercept=False).fit(features, labels).coef_
    lambdas = np.linspace(-1, 1, 21)
    noises = [np.random.default_rng(seed).standard_normal(weights.shape) for seed in range(3 if quick else 10)]
    directions = {"raw": noises, "signs": [np.abs(each) * np.sign(weights) for each in noises]}
    means, figures = {}, {}
    for name, drawn in directions.items():
        curves = [softmax_curve(weights, each, features, labels, lambdas) for each in drawn]
        for what in ("error", "loss", "spread", "trace", "curvature"):
            means[name, what] = mean = np.mean([curve[what] for curve in curves], axis=0)
            figures[f"{name}_{what}_positive"] = float(mean[lambdas > 0].mean())
            figures[f"{name}_{what}_negative"] = float(mean[lambdas < 0].mean())
    return figures | {
        "signs_error_at_1": float(means["signs", "error"][-1]),
        "signs_error_at_minus_1": float(means["signs", "error"][0]),
        "signs_error_gap": figures["signs_error_negative"] - figures["signs_error_positive"],
        "signs_trace_ratio": figures["signs_trace_positive"] / figures["signs_trace_negative"],
        "signs_trace_spearman": float(spearmanr(lambdas, means["signs", "trace"])[0]),
        "raw_error_gap": abs(figures["raw_error_negative"] - figures["raw_error_positive"]),
    }


@recipe(
    "The input of a neuron grows with each step along the signs of its weights.",
    at_least(0.0, "smallest_step"),
)
def relu_demo(quick: bool) -> Figures:
    """Over 10,000 draws for each of 20 h (quick: 5): means before the ReLU, and the share that passes it.

    Paper: section 5 (ReLU demonstration): h in R^d from G(0, 1), w = 0.1 h + delta, 10,000 draws of delta; (w + lambda sign(w))^T h for
    lambda in {-1, -0.5, 0, 0.5, 1}.  The paper's d is not known; here 64.
    """
    lambdas = np.array([-1.0, -0.5, 0.0, 0.5, 1.0])
    drawn = [relu_inputs(lambdas, seed=seed) for seed in range(5 if quick else 20)]
    inputs = np.array([before.mean(1) for before, _ in drawn])
    passed = np.array([(after > 0).mean(1) for _, after in drawn])
    return {
        **{f"mean_at_{at:g}": float(value) for at, value in zip(lambdas, inputs.mean(0), strict=True)},
        **{f"open_at_{at:g}": float(value) for at, value in zip(lambdas, passed.mean(0), strict=True)},
        "smallest_step": float(np.diff(inputs).min()),
    }


@recipe(
    "More hidden units stay active or inactive after a step along the model's signs than after one against them.",
    at_least(0.0, "smallest_difference"),
)
def activation_confusion(quick: bool) -> Figures:
    """Shares of features that stay what they are, over 5 networks and 5 noises each (quick: 2 and 2).

    Paper: section 5: the confusion matrix of active and inactive hidden features of theta_f and theta_f + lambda |eps| sign(theta_f) has
    a larger trace at lambda = a than at -a, for a in {0.2, 0.4, 0.6, 0.8, 1}.  Here the last hidden layer of an MLP 64-128-128-10 on
    digits, norm-scaled.
    """
    steps = (0.2, 0.4, 0.6, 0.8, 1.0)
    found = defaultdict[float, list[float]](list)
    for subject in networks(2 if quick else 5):
        layout = Layout.of(subject.model)
        theta = layout.vector(dict(subject.model.named_parameters()))
        features = subject.test_samples(None).features
        for draw in range(2 if quick else 5):
            eps = with_signs(noise("gaussian", layout.size, seed=draw), theta)
            direction = scaled(layout, eps, theta, Scaling.NORM)
            for at in (sign * step for step in steps for sign in (1, -1)):
                counts = confusion(subject.model, layout, theta, theta + at * direction, features)
                found[at].append(counts.trace().item() / counts.sum().item())
    same = averages(found)
    figures = {f"same_at_{at:g}": value for at, value in same.items()}
    return figures | {"smallest_difference": min(same[step] - same[-step] for step in steps)}
