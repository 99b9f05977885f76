"""Asymmetric valleys along noises and special directions, by which signs these carry.

Paper: arXiv 2405.12489, section 3.2.  Asymmetry is the mean error over [-1, 0] less that over [0, 1].  Unless a recipe says
otherwise the networks are MLPs 64-128-128-10 without BatchNorm on digits, and directions are norm-scaled.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import fmean, stdev
from typing import Any

from scipy.stats import spearmanr
from torch import Tensor, nn

from fedsign.landscape.directions import NOISES, SPECIAL, Scaling
from fedsign.landscape.groups import GROUPS
from fedsign.models.batch_norm import BATCH_NORMS
from fedsign.models.cnn import cnn
from simulations.recipes.base import Figures, Verdict, at_least, at_most, recipe
from simulations.recipes.cells import averages, paired_difference
from simulations.recipes.valleys.networks import errors_along, networks


@recipe(
    "With the model's signs each of the seven noises gives a valley that is flat on its positive side.",
    at_least(0.0, "smallest_low_with_signs"),
    quick=[at_least(0.0, "smallest_with_signs")],
)
def valley_seven_noises(quick: bool) -> Figures:
    """Asymmetries of the seven noises over 10 networks and 3 noises each (quick: 4 and 1), s = 1.

    Paper: Figures 2 and 3: raw, the noises are near symmetric, the last four slightly asymmetric where there is BatchNorm; with the
    signs of theta_f all seven are flat on the positive side.  Intervals are over networks, each the mean of its draws.
    """
    num_networks, num_noises = (4, 1) if quick else (10, 3)
    found = defaultdict[str, list[float]](list)
    for subject in networks(num_networks):
        for kind, signs in (("raw", None), ("signs", 1.0)):
            drawn = [errors_along(subject, *NOISES, scale=1.0, draw=draw, signs=signs) for draw in range(num_noises)]
            for name in NOISES:
                found[f"{kind}_{name}"].append(fmean(errors[name]["asymmetry"] for errors in drawn))
    with_signs = [values for name, values in found.items() if name.startswith("signs_")]
    lows = [paired_difference(values, [0.0] * num_networks)["difference_low"] for values in with_signs]
    return averages(found) | {
        "smallest_with_signs": min(map(fmean, with_signs)),
        "smallest_low_with_signs": min(lows),
    }


@recipe(
    "The more signs of a noise are the model's, the lower the error on the positive side and the higher on the negative.",
    at_least(0.25, "smallest_gap"),
    at_least(0.9, "smallest_spearman"),
)
def valley_sign_ratio(quick: bool) -> Figures:
    """Errors on both sides by the share of signs, over 5 networks and 5 noises each (quick: 2 and 5, every second share), s = 2.

    Paper: Figure 4: Gaussian noise of which a fraction r of the elements gets the signs of theta_f; E_lambda of the test error over
    [0, 1] falls with r, over [-1, 0] it rises.  The same noises and the same order of elements for every r.
    """
    ratios = [step / 10 for step in range(0, 11, 2 if quick else 1)]
    ends = defaultdict[str, list[float]](list)
    gaps, correlations = [], []
    for subject in networks(2 if quick else 5):
        sides: dict[str, list[float]] = {"positive": [], "negative": []}
        for ratio in ratios:
            drawn = [errors_along(subject, "gaussian", scale=2.0, draw=draw, signs=ratio) for draw in range(5)]
            for side, means in sides.items():
                means.append(fmean(errors["gaussian"][f"mean_{side}"] for errors in drawn))
        for side, means in sides.items():
            ends[f"{side}_at_0"].append(means[0])
            ends[f"{side}_at_1"].append(means[-1])
        gaps.append(sides["negative"][-1] - sides["positive"][-1])
        for sign, side in ((-1, "positive"), (1, "negative")):
            correlations.append(sign * float(spearmanr(ratios, sides[side])[0]))
    return averages(ends) | {"smallest_gap": min(gaps), "smallest_spearman": min(correlations)}


@recipe(
    "Directions that carry the model's signs are asymmetric; sgp of the model is not.",
    at_least(0.02, "smallest_of_signs"),
    at_most(0.02, "largest_of_sgp"),
    quick=[at_least(0.0, "smallest_of_signs")],
    expected=Verdict.DOES_NOT_HOLD,
)
def valley_special_directions(quick: bool) -> Figures:
    """Asymmetries of the six special directions over 10 networks (quick: 3), s = 1.

    Paper: Figure 5: theta_0, theta_f, sign(theta_f), sign(theta_f - mu) asymmetric; sgp(theta_f), sgp(theta_f - mu) not.  It explains
    theta_0 by BatchNorm's weights, which start at 1: without BatchNorm, symmetric.
    """
    found = defaultdict[str, list[float]](list)
    for subject in networks(3 if quick else 10):
        for name, errors in errors_along(subject, *SPECIAL, scale=1.0).items():
            found[name].append(errors["asymmetry"])
    figures = averages(found)
    return figures | {
        "initial_standard_error": stdev(found["initial"]) / len(found["initial"]) ** 0.5,
        "smallest_of_signs": min(figures[name] for name in ("final", "sign", "sign_centred")),
        "largest_of_sgp": max(abs(figures[name]) for name in ("sgp", "sgp_centred")),
    }


_SETTINGS: dict[str, dict[str, Any]] = {
    "lr_0.1": {"lr": 0.1},
    "lr_0.003": {"lr": 0.003},
    "batch_32": {"batch_size": 32},
    "batch_512": {"batch_size": 512, "local_epochs": 8},
    "weight_decay_1e-3": {"weight_decay": 1e-3},
    "weight_decay_1e-5": {"weight_decay": 1e-5},
}


@recipe(
    "With the model's signs the positive side is the flat one at every learning rate, batch size and weight decay.",
    at_least(0.0, "smallest_asymmetry"),
)
def valley_hyperparameters(quick: bool) -> Figures:
    """Asymmetries and mean errors on both sides, over 5 networks and 3 noises each (quick: 1 and 2), s = 1.

    Paper: appendix: lr {0.1, 0.003}, batches {32, 2048}, weight decay {1e-3, 1e-5}; they change how wide a valley is, not which side is
    the flat one.  A batch of 2048 would be more than all 1,437 samples: 512, for eight times as many epochs, since an epoch has
    three of them.
    """
    found = defaultdict[str, list[float]](list)
    for name, client in _SETTINGS.items():
        for subject, draw in product(networks(1 if quick else 5, {"client": client}), range(2 if quick else 3)):
            errors = errors_along(subject, "gaussian", scale=1.0, draw=draw, signs=1.0)["gaussian"]
            found[f"{name}_asymmetry"].append(errors["asymmetry"])
            rise = (errors["mean_positive"] + errors["mean_negative"]) / 2 - errors["centre"]
            found[f"{name}_rise"].append(rise)
    figures = averages(found)
    return figures | {"smallest_asymmetry": min(figures[f"{name}_asymmetry"] for name in _SETTINGS)}


@recipe(
    "Noise with the model's signs on any group of parameters alone finds a valley that is flat on its positive side.",
    at_least(0.0, "smallest"),
    quick=[at_least(0.0, "largest")],
)
def valley_parameter_groups(quick: bool) -> Figures:
    """Asymmetries over 5 networks and 3 noises each (quick: 1 and 1), s = 1.

    Paper: torchvision's ResNeXt101 with ImageNet: noise with the model's signs on ALL, CLF, FEAT, LAYER1, CONV or BN alone.  Here the
    CNN with BatchNorm on digits, the noise scaled by the group's own norm.
    """
    found = defaultdict[str, list[float]](list)
    trained = networks(1 if quick else 5, {"model": {"name": "cnn"}, "rounds": 15})
    for subject, group, draw in product(trained, GROUPS, range(1 if quick else 3)):
        errors = errors_along(subject, "gaussian", scale=1.0, draw=draw, signs=1.0, group=group)
        found[group].append(errors["gaussian"]["asymmetry"])
    figures = averages(found)
    return figures | {"smallest": min(figures.values()), "largest": max(figures.values())}


def uniform(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """The CNN whose BatchNorm begins at U(0, 1)."""
    return _begun(cnn(input_shape, num_outputs), nn.init.uniform_)


def gaussian(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """The CNN whose BatchNorm begins at G(0, 0.1), by standard deviation."""
    return _begun(cnn(input_shape, num_outputs), partial(nn.init.normal_, std=0.1))


def _begun(model: nn.Module, begin: Callable[[Tensor], Tensor]) -> nn.Module:
    for module in model.modules():
        if isinstance(module, BATCH_NORMS):
            begin(module.weight)
    return model


@recipe(
    "Noise of {0, 1} on BatchNorm's weights is asymmetric where these began above 0, and less where they began on both sides.",
    at_least(0.1, "smallest_of_positive"),
    at_most(0.5, "gaussian_share"),
    quick=[at_least(0.05, "smallest_of_positive")],
)
def valley_bn_init(quick: bool) -> Figures:
    """Asymmetries over 5 networks and 3 noises each (quick: 1 and 2), s = 2, norm-scaled and filter-norm-scaled (each weight a filter).

    Paper: Figure 6: weights that begin at 1 or from U(0, 1) stay positive, and {0, 1} noise, which has their signs then, is asymmetric;
    from G(0, 0.1) they have both signs, and it is nearly symmetric.  Here the CNN with BatchNorm, noise on its weights alone.
    """
    found = defaultdict[str, list[float]](list)
    scalings = {"norms": Scaling.NORM, "filter": Scaling.FILTER}
    for begin, model in {"ones": "cnn", "uniform": f"{__name__}:uniform", "gaussian": f"{__name__}:gaussian"}.items():
        for subject in networks(1 if quick else 5, {"model": {"name": model}, "rounds": 15}):
            named = subject.model.named_modules()
            group = "|".join(f"{path}.weight" for path, module in named if isinstance(module, BATCH_NORMS))
            for draw, (name, scaling) in product(range(2 if quick else 3), scalings.items()):
                errors = errors_along(subject, "binary", scale=2.0, draw=draw, group=group, scaling=scaling)
                found[f"{begin}_{name}"].append(errors["binary"]["asymmetry"])
    figures = averages(found)
    return figures | {
        "smallest_of_positive": min(figures["ones_norms"], figures["uniform_norms"]),
        "gaussian_share": abs(figures["gaussian_norms"]) / figures["ones_norms"],
    }
