"""A step along the signs of a softmax classifier's weights makes it more decided, its Hessian smaller and its error lower.

Paper: arXiv 2405.12489, Figure 29: logistic regression on scikit-learn's digits (500 iterations, no intercept, fitted and evaluated on
all of them); noise G(0, 1), or |G(0, 1)| sign(W), raw; 21 lambdas from -1 to 1.
"""

import numpy as np
from scipy.stats import spearmanr

from fedsign.landscape.softmax_demo import SoftmaxCurve, softmax_curve
from simulations.recipes.base import Figures, Recipe, Threshold

_LAMBDAS = np.linspace(-1, 1, 21)


def measure(quick: bool) -> Figures:
    """Over 10 noises (quick: 3)."""
    from sklearn.datasets import load_digits
    from sklearn.linear_model import LogisticRegression

    features, labels = load_digits(return_X_y=True)
    weights = LogisticRegression(max_iter=500, fit_intercept=False).fit(features, labels).coef_
    curves: dict[str, list[SoftmaxCurve]] = {"raw": [], "signs": []}
    for seed in range(3 if quick else 10):
        noise = np.random.default_rng(seed).standard_normal(weights.shape)
        for name, direction in (("raw", noise), ("signs", np.abs(noise) * np.sign(weights))):
            curves[name].append(softmax_curve(weights, direction, features, labels, _LAMBDAS))
    figures = {}
    for name, drawn in curves.items():
        for what in ("error", "loss", "spread", "trace", "curvature"):
            values = np.mean([getattr(curve, what) for curve in drawn], axis=0)
            figures[f"{name}_{what}_positive"] = float(values[_LAMBDAS > 0].mean())
            figures[f"{name}_{what}_negative"] = float(values[_LAMBDAS < 0].mean())
    traces = np.mean([curve.trace for curve in curves["signs"]], axis=0)
    return figures | {
        "signs_error_at_1": float(np.mean([curve.error[-1] for curve in curves["signs"]])),
        "signs_error_at_minus_1": float(np.mean([curve.error[0] for curve in curves["signs"]])),
        "signs_error_gap": figures["signs_error_negative"] - figures["signs_error_positive"],
        "signs_trace_ratio": figures["signs_trace_positive"] / figures["signs_trace_negative"],
        "signs_trace_spearman": float(spearmanr(_LAMBDAS, traces)[0]),
        "raw_error_gap": abs(figures["raw_error_negative"] - figures["raw_error_positive"]),
    }


RECIPE = Recipe(
    name="softmax-demo",
    claim="Along the signs of a softmax classifier's weights the Hessian's trace and the error are smaller than against them.",
    measure=measure,
    thresholds=(
        Threshold(figure="signs_error_gap", bound="at least", value=0.2),
        Threshold(figure="signs_trace_ratio", bound="at most", value=1.0),
        Threshold(figure="raw_error_gap", bound="at most", value=0.1),
    ),
)
