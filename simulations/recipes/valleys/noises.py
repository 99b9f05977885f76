"""Asymmetric valleys along noise and special directions, by the signs these carry.

Paper: arXiv 2405.12489, section 3.2.  Asymmetry is the mean error over [-1, 0] minus that over [0, 1].  By default the
networks are MLPs 64-128-128-10 without BatchNorm on digits, and directions are norm-scaled.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from statistics import fmean, stdev
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from fedsign.landscape.directions import NOISES, SPECIAL, Scaling
from fedsign.landscape.groups import GROUPS
from fedsign.models.batch_norm import BATCH_NORMS
from fedsign.models.cnn import cnn
from simulations.recipes.base import Metrics, Verdict, above, at_least, at_most, part, recipe
from simulations.recipes.cells import averages, mean_interval, paired_difference
from simulations.recipes.valleys.networks import errors_along, networks, trainings
from simulations.recipes.where import AT_HOME, Where

SYMMETRIC = 0.02
"""An asymmetry of at most 2 points of error counts as symmetric; asymmetric is one whose 95 % interval lies above."""

_ONE_SIDED = ("gaussian_1", "uniform_01", "binary", "ones")


@recipe(
    (
        "With the model's signs each of the seven noises gives a valley that is flat on its positive side; raw, all "
        "are near symmetric."
    ),
    part(
        "with the model's signs all seven noises are flat on the positive side and sharp on the negative",
        above(SYMMETRIC, "smallest_low_with_signs"),
    ),
    part(
        "without the model's signs, one-signed noises are nearly symmetric, too",
        at_most(SYMMETRIC, "largest_raw_of_one_sign"),
    ),
    source="FedSign, Figures 2 and 3",
    quick=[above(0.0, "smallest_with_signs")],
    null={"smallest_low_with_signs": 0.0, "smallest_with_signs": 0.0, "largest_raw_of_one_sign": 0.2},
    expected=Verdict.DOES_NOT_HOLD,
    budget=trainings(10, 4),
)
def valley_seven_noises(quick: bool, where: Where = AT_HOME) -> Metrics:
    """Return asymmetries of the seven kinds of noise over 10 networks and 3 draws each (quick: 4 and 1), s = 1.

    Paper: Figures 2 and 3: raw, the noises are near symmetric, the last four slightly asymmetric with BatchNorm; with
    the signs of theta_f all seven are flat on the positive side.  Intervals are over networks, each the mean of its
    draws.

    Raw noise of both signs is symmetric in expectation around any network, because each draw is as likely as its
    opposite; it decides nothing.  The part of the claim that can fail is that one-signed noise is near symmetric
    without BatchNorm.
    """
    num_networks, num_noises = (4, 1) if quick else (10, 3)
    found = defaultdict[str, list[float]](list)
    for target in networks(num_networks, where=where):
        for kind, signs in (("raw", None), ("signs", 1.0)):
            drawn = [errors_along(target, *NOISES, scale=1.0, draw=draw, signs=signs) for draw in range(num_noises)]
            for name in NOISES:
                # draws first: they share a network, and intervals count networks
                found[f"{kind}_{name}"].append(fmean(errors[name]["asymmetry"] for errors in drawn))
    with_signs = [values for name, values in found.items() if name.startswith("signs_")]
    metrics = averages(found)
    return metrics | {
        "smallest_with_signs": min(map(fmean, with_signs)),
        "smallest_low_with_signs": min(map(low, with_signs)),
        "largest_raw_of_one_sign": max(abs(metrics[f"raw_{name}"]) for name in _ONE_SIDED),
    }


@recipe(
    (
        "The more signs of a noise are the model's, the lower the error on the positive side and the higher on the "
        "negative."
    ),
    part(
        "the error on the positive side falls with the share of the model's signs",
        at_least(0.9, "smallest_spearman_positive"),
    ),
    part(
        "the error on the negative side rises with the share of the model's signs",
        at_least(0.9, "smallest_spearman_negative"),
    ),
    part(
        "with all of the model's signs the negative side is 25 points of error or more above the positive",
        at_least(0.25, "smallest_gap"),
    ),
    source="FedSign, Figure 4",
    null=dict.fromkeys(("smallest_gap", "smallest_spearman_positive", "smallest_spearman_negative"), 0.0),
    expected=Verdict.HOLDS,
    budget=trainings(5, 2),
)
def valley_sign_ratio(quick: bool, where: Where = AT_HOME) -> Metrics:
    """Return errors on both sides by the fraction of signs, s = 2: 5 networks, 5 draws each (quick: 2, fewer).

    Paper: Figure 4: Gaussian noise, of which a fraction r of the elements gets the signs of theta_f. The mean test
    error over [0, 1] falls with r, that over [-1, 0] rises.  Draws and order of elements are the same for every r.
    """
    ratios = [step / 10 for step in range(0, 11, 2 if quick else 1)]
    ends = defaultdict[str, list[float]](list)
    gaps = []
    correlations = defaultdict[str, list[float]](list)
    for target in networks(2 if quick else 5, where=where):
        sides: dict[str, list[float]] = {"positive": [], "negative": []}
        for ratio in ratios:
            # the same draws for every ratio, so that only the signs differ
            drawn = [errors_along(target, "gaussian", scale=2.0, draw=draw, signs=ratio) for draw in range(5)]
            for side, means in sides.items():
                means.append(fmean(errors["gaussian"][f"mean_{side}"] for errors in drawn))
        for side, means in sides.items():
            ends[f"{side}_at_0"].append(means[0])
            ends[f"{side}_at_1"].append(means[-1])
        gaps.append(sides["negative"][-1] - sides["positive"][-1])
        for sign, side in ((-1, "positive"), (1, "negative")):
            # the sign turns both claims into "rises with the ratio"
            correlations[f"smallest_spearman_{side}"].append(sign * float(spearmanr(ratios, sides[side])[0]))
    return averages(ends) | {"smallest_gap": min(gaps), **{name: min(found) for name, found in correlations.items()}}


@recipe(
    (
        "Directions that carry the model's signs are asymmetric; sgp of the model is not, and without BatchNorm "
        "neither are the initial weights."
    ),
    part("theta_f, sign(theta_f) and sign(theta_f - mu) are asymmetric", above(SYMMETRIC, "smallest_low_of_signs")),
    part("sgp(theta_f) and sgp(theta_f - mu) are not asymmetric", at_most(SYMMETRIC, "largest_of_sgp")),
    part(
        "without BatchNorm, the direction of the initial weights is not asymmetric", at_most(SYMMETRIC, "initial_size")
    ),
    source="FedSign, Figure 5",
    quick=[above(0.0, "smallest_of_signs")],
    null={"smallest_of_signs": 0.0, "smallest_low_of_signs": 0.0, "largest_of_sgp": 0.1, "initial_size": 0.1},
    expected=Verdict.DOES_NOT_HOLD,
    budget=trainings(10, 3),
)
def valley_special_directions(quick: bool, where: Where = AT_HOME) -> Metrics:
    """Return asymmetries of the six special directions over 10 networks (quick: 3), s = 1.

    Paper: Figure 5: theta_0, theta_f, sign(theta_f), sign(theta_f - mu) asymmetric; sgp(theta_f), sgp(theta_f - mu)
    not. It explains theta_0 by BatchNorm's weights, which start at 1; without BatchNorm it should be symmetric.
    """
    found = defaultdict[str, list[float]](list)
    for target in networks(3 if quick else 10, where=where):
        for name, errors in errors_along(target, *SPECIAL, scale=1.0).items():
            found[name].append(errors["asymmetry"])
    metrics = averages(found)
    of_signs = ("final", "sign", "sign_centered")
    return metrics | {
        "initial_size": abs(metrics["initial"]),
        "initial_standard_error": stdev(found["initial"]) / len(found["initial"]) ** 0.5,
        "smallest_of_signs": min(metrics[name] for name in of_signs),
        "smallest_low_of_signs": min(low(found[name]) for name in of_signs),
        "largest_of_sgp": max(abs(metrics[name]) for name in ("sgp", "sgp_centered")),
    }


_SETTINGS: dict[str, dict[str, Any]] = {
    "lr_0.1": {"lr": 0.1},
    "lr_0.003": {"lr": 0.003},
    "batch_32": {"batch_size": 32},
    "batch_512": {"batch_size": 512, "local_epochs": 8},
    "weight_decay_1e-3": {"weight_decay": 1e-3},
    "weight_decay_1e-5": {"weight_decay": 1e-5},
}


_PAIRS = {  # of settings; the first has the narrower valley, if the paper says so
    "lr": ("lr_0.1", "lr_0.003"),
    "batch": ("batch_32", "batch_512"),
    "weight_decay": ("weight_decay_1e-3", "weight_decay_1e-5"),
}
_TITLES = {"lr": "the learning rate", "batch": "the batch size", "weight_decay": "weight decay"}


@recipe(
    (
        "Learning rate, batch size and weight decay change how wide a valley is, small batches make it narrower; the "
        "positive side stays the flat one."
    ),
    part(
        "with the model's signs, the positive side is flat at every learning rate, batch size, and weight decay",
        above(SYMMETRIC, "smallest_low"),
    ),
    *(part(f"{_TITLES[name]} changes how wide the valley is", above(0.0, f"{name}_width_low")) for name in _PAIRS),
    part("small batches give a narrower valley than large ones", above(0.0, "batch_narrower_low")),
    source="FedSign, section 3.2 and appendix",
    quick=[at_least(SYMMETRIC, "mean_asymmetry")],
    null=dict.fromkeys(("smallest_low", "mean_asymmetry", "batch_narrower_low"), 0.0)
    | {f"{name}_width_low": -0.01 for name in _PAIRS},
    expected=Verdict.IN_PART,
    budget=trainings(5 * len(_SETTINGS), len(_SETTINGS)),
)
def valley_hyperparameters(quick: bool, where: Where = AT_HOME) -> Metrics:
    """Return asymmetries and mean errors on both sides, over 5 networks and 3 draws each (quick: 1 and 2), s = 1.

    Paper: appendix: lr {0.1, 0.003}, batches {32, 2048}, weight decay {1e-3, 1e-5}. They change a valley's width, not
    which side is flat; small batches are sharper.  A batch of 2048 would exceed all 1,437 samples: 512, for eight times
    as many epochs, since an epoch has only three of them.

    `rise`: the mean error over both sides minus the network's; the higher, the narrower the valley.  `..._width_low`:
    the distance from 0 of the 95 % interval of the difference of two settings' rises, paired by seed; negative if the
    interval contains 0.
    """
    num_networks, num_noises = (1, 2) if quick else (5, 3)
    asymmetries, rises = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for name, client in _SETTINGS.items():
        for target in networks(num_networks, {"client": client}, where):
            drawn = [
                errors_along(target, "gaussian", scale=1.0, draw=draw, signs=1.0)["gaussian"]
                for draw in range(num_noises)
            ]
            asymmetries[name].append(fmean(errors["asymmetry"] for errors in drawn))
            sides = [(errors["mean_positive"] + errors["mean_negative"]) / 2 - errors["center"] for errors in drawn]
            rises[name].append(fmean(sides))
    metrics = {f"{name}_asymmetry": value for name, value in averages(asymmetries).items()}
    metrics |= {f"{name}_rise": value for name, value in averages(rises).items()}
    metrics["smallest_asymmetry"] = min(fmean(values) for values in asymmetries.values())
    metrics["mean_asymmetry"] = fmean(fmean(values) for values in asymmetries.values())
    metrics["smallest_low"] = min(map(low, asymmetries.values()))
    for name, (first, second) in _PAIRS.items():
        difference = paired_difference(rises[first], rises[second])
        # whichever way the width changes: the interval's end that is nearer to 0
        metrics[f"{name}_width_low"] = max(difference["difference_low"], -difference["difference_high"])
        metrics[f"{name}_narrower_low"] = difference["difference_low"]
    return metrics


_CNN: dict[str, Any] = {"model": {"name": "cnn"}, "rounds": 15}


@recipe(
    "Noise with the model's signs on any group of parameters alone finds a valley that is flat on its positive side.",
    *(
        part(
            f"noise with the model's signs on {group} alone is flat on the positive side",
            above(SYMMETRIC, f"{group}_low"),
        )
        for group in GROUPS
    ),
    source="FedSign, section 3.2",
    quick=[at_least(SYMMETRIC, "ALL")],
    null={"ALL": 0.0, **{f"{group}_low": 0.0 for group in GROUPS}},
    expected=Verdict.HOLDS,
    budget=trainings(5, 1, _CNN),
)
def valley_parameter_groups(quick: bool, where: Where = AT_HOME) -> Metrics:
    """Return asymmetries over 5 networks and 3 draws each (quick: 1 and 1), s = 1; `..._low`: of the 95 % interval.

    Paper: torchvision's ResNeXt101 with ImageNet: noise with the model's signs on ALL, CLF, FEAT, LAYER1, CONV or BN
    alone.  Here the CNN with BatchNorm on digits, the noise scaled by the group's own norm.
    """
    found = defaultdict[str, list[float]](list)
    trained = networks(1 if quick else 5, _CNN, where)
    for target, group in product(trained, GROUPS):
        drawn = [
            errors_along(target, "gaussian", scale=1.0, draw=draw, signs=1.0, group=group)
            for draw in range(1 if quick else 3)
        ]
        found[group].append(fmean(errors["gaussian"]["asymmetry"] for errors in drawn))
    return averages(found) | {f"{group}_low": low(values) for group, values in found.items()}


def uniform(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """The CNN with BatchNorm weights initialized from U(0, 1)."""
    return _initialized(cnn(input_shape, num_outputs), nn.init.uniform_)


def gaussian(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """The CNN with BatchNorm weights initialized from G(0, 0.1), by standard deviation."""
    return _initialized(cnn(input_shape, num_outputs), partial(nn.init.normal_, std=0.1))


def _initialized(model: nn.Module, begin: Callable[[Tensor], Tensor]) -> nn.Module:
    for module in model.modules():
        if isinstance(module, BATCH_NORMS):
            begin(module.weight)
    return model


_POSITIVE = ("ones_norms", "uniform_norms", "ones_filter", "uniform_filter")


@recipe(
    (
        "Noise of {0, 1} on BatchNorm's weights is asymmetric where these began above 0 and stay there, and nearly "
        "symmetric where they began on both sides."
    ),
    *(
        part(f"BatchNorm weights initialized {began} are all above 0 after training", at_least(1.0, metric))
        for began, metric in {"at 1": "ones_share_above_0", "from U(0, 1)": "uniform_share_above_0"}.items()
    ),
    part(
        "{0, 1} noise on BatchNorm weights initialized at 1 or from U(0, 1) is asymmetric under both scalings",
        at_least(0.1, "smallest_of_positive"),
    ),
    part(
        "{0, 1} noise on BatchNorm weights initialized from G(0, 0.1) is nearly symmetric under both scalings",
        at_most(SYMMETRIC, "largest_of_gaussian"),
    ),
    source="FedSign, Figure 6",
    quick=[at_least(0.05, "smallest_of_positive")],
    null={
        "ones_share_above_0": 0.5,
        "uniform_share_above_0": 0.5,
        "smallest_of_positive": 0.0,
        "largest_of_gaussian": 0.3,
    },
    expected=Verdict.IN_PART,
    budget=trainings(15, 3, _CNN),
    takes_model=False,
)
def valley_bn_init(quick: bool, where: Where = AT_HOME) -> Metrics:
    """Return asymmetries over 5 networks and 3 draws each (quick: 1 and 2), s = 2, norm- and filter-norm-scaled.

    Paper: Figure 6: weights that start at 1 or from U(0, 1) stay positive, so {0, 1} noise has their signs and is
    asymmetric; from G(0, 0.1) they have both signs, and it is nearly symmetric.  Here the CNN with BatchNorm, noise on
    BatchNorm's weights only.
    """
    found = defaultdict[str, list[float]](list)
    scalings = {"norms": Scaling.NORM, "filter": Scaling.FILTER}
    for begin, model in {"ones": "cnn", "uniform": f"{__name__}:uniform", "gaussian": f"{__name__}:gaussian"}.items():
        for target in networks(1 if quick else 5, {**_CNN, "model": {"name": model}}, where):
            named = target.model.named_modules()
            weights = {f"{path}.weight": module.weight for path, module in named if isinstance(module, BATCH_NORMS)}
            found[f"{begin}_share_above_0"].append(float((torch.cat([*weights.values()]) > 0).float().mean()))
            # a pattern that matches these parameters by their full names
            group = "|".join(weights)
            for draw, (name, scaling) in product(range(2 if quick else 3), scalings.items()):
                errors = errors_along(target, "binary", scale=2.0, draw=draw, group=group, scaling=scaling)
                found[f"{begin}_{name}"].append(errors["binary"]["asymmetry"])
    metrics = averages(found)
    return metrics | {
        "smallest_of_positive": min(metrics[name] for name in _POSITIVE),
        "largest_of_gaussian": max(abs(metrics[f"gaussian_{name}"]) for name in scalings),
    }


def low(values: Sequence[float]) -> float:
    """Return the low end of the 95 % interval of a mean over networks."""
    return mean_interval(values)["difference_low"]
