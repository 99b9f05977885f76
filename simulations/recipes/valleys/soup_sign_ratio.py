"""Two models from one start can be averaged as long as their signs agree.

Paper: arXiv 2405.12489, section 4: the data in two halves, one model trained on each from the same start; same-sign ratios of start
and A, start and B, A and B; gap = Acc(0.5 A + 0.5 B) - 0.5 (Acc(A) + Acc(B)).  From random weights the ratio falls and the gap
with it; from trained ones the ratio stays above 0.95 and the gap is positive.  Here an MLP 64-128-128-10 on digits in three shares: one
to train the start on, two to go on with.
"""

import torch

from fedsign.data.base import Samples
from fedsign.landscape.interpolation import soup_gap
from fedsign.landscape.landscape import Landscape
from fedsign.landscape.sign_ratios import same_sign_ratio
from fedsign.records import tensors_of
from simulations.recipes.base import Figures, Recipe, Threshold
from simulations.recipes.valleys.networks import mean, trained_on_share, workload_in_shares

_EPOCHS = (1, 3, 10, 50)
_EPOCHS_OF_START = 30


def measure(quick: bool) -> Figures:
    """Over 5 seeds (quick: 1), after 1, 3, 10 and 50 epochs; a gap above 0: the mean of the two is better than they are."""
    found: dict[str, list[float]] = {}
    for seed in range(1 if quick else 5):
        workload = workload_in_shares(seed, 3)
        model = workload.make_model()
        random = tensors_of(model)
        starts = {"random": random, "trained": trained_on_share(workload, random, 0, epochs=_EPOCHS_OF_START)}
        test = workload.dataset.test
        features, targets = test.batch(torch.arange(len(test)))
        landscape = Landscape(model, workload.task, Samples(features=features, targets=targets))
        for name, start in starts.items():
            for epochs in _EPOCHS[-2:] if quick else _EPOCHS:
                ends = [trained_on_share(workload, start, share, epochs=epochs) for share in (1, 2)]
                begin, one, other = (landscape.layout.vector(each) for each in (start, *ends))
                figures = {
                    "ssr_start": (same_sign_ratio(begin, one) + same_sign_ratio(begin, other)) / 2,
                    "ssr": same_sign_ratio(one, other),
                    "gap": soup_gap(landscape, [one, other]),
                }
                for what, value in figures.items():
                    found.setdefault(f"{name}_{what}_{epochs}", []).append(value)
    figures = {name: mean(values) for name, values in found.items()}
    return figures | {
        "ssr_difference": figures["trained_ssr_50"] - figures["random_ssr_50"],
        "gap_difference": figures["trained_gap_50"] - figures["random_gap_50"],
    }


RECIPE = Recipe(
    name="soup-sign-ratio",
    claim="Models that go on from a trained start keep its signs, and their mean is better than they are; from random weights less so.",
    measure=measure,
    thresholds=(
        Threshold(figure="trained_ssr_50", bound="at least", value=0.95),
        Threshold(figure="trained_gap_50", bound="at least", value=0.0),
        Threshold(figure="ssr_difference", bound="at least", value=0.0),
    ),
    quick_thresholds=(Threshold(figure="ssr_difference", bound="at least", value=0.0),),
)
