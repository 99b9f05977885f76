"""The fewest weights for a loss: SmuPar is the best of the parameterisations at every density, and the sparser the more so.

Paper: Dey et al. 2024 (arXiv 2405.15743), Figure 3: one model of 610 million weights at densities down to 1/128, each scheme with
one start and one rate for all of them; at the lowest density SmuPar's loss is 11.9 % below that of SP and 1.9 % below that of muP.
Here with the model of `simulations.recipes.smupar.smupar_gpt` at width 128, one client with all data, 128 steps of 512 characters, one seed.

SP's rate is tuned on the dense model of width 128 itself; that of muP and SmuPar on a dense proxy of width 64, as the paper does, and
carried over.  Floating-point operations are 6 for each weight there is and character, as if absent ones cost nothing, which on
this hardware they do not.  `iso`: wide and sparse models that have as many hidden weights as the dense proxy, under SmuPar (the
paper's Figure 10 compares such models; no threshold, since they have more embeddings too).

The thresholds were written before the first measurement.
"""

from collections.abc import Mapping
from math import log2

import numpy as np

from fedsign.config import ExperimentConfig
from fedsign.parameterisation.apply import parameterised
from fedsign.parameterisation.roles import Role
from fedsign.workload import Workload
from simulations.recipes.base import Figures, Recipe, Threshold
from simulations.recipes.cells import final_values
from simulations.recipes.smupar.smupar_gpt import BASE_WIDTH, experiment
from simulations.sparsity.coordinates import variant

_WIDTH, _LOWEST, _STEPS = 128, 1 / 32, 128
_SCHEMES = ("sp", "mup", "smupar")


def config_of(scheme: str, width: int, density: float, *, rate: float) -> ExperimentConfig:
    """One training."""
    changes = {
        "data": {"block_length": 64},
        "client": {"local_steps": _STEPS, "optimizer": {"name": "packed_adamw"}},
    }
    return variant(experiment(width=width, lr=rate, changes=changes), scheme, density)


def losses_of(configs: list[ExperimentConfig]) -> list[float]:
    """Of the test samples, after the last step."""
    return final_values([config.model_dump(mode="json") for config in configs], "loss")


def tuned(quick: bool) -> Mapping[str, float]:
    """Each scheme's rate: the best of some a factor of two apart, dense; muP and SmuPar are one there."""
    rates = [2.0**power for power in (range(-10, -7) if quick else range(-12, -6))]
    found = losses_of(
        [config_of("sp", _WIDTH, 1.0, rate=rate) for rate in rates]
        + [config_of("smupar", BASE_WIDTH, 1.0, rate=rate) for rate in rates]
    )
    own, proxy = (rates[int(np.nanargmin(losses))] for losses in np.array(found).reshape(2, -1))
    return {"sp": own, "mup": proxy, "smupar": proxy}


def measure(quick: bool) -> Figures:
    """Densities 1 to 1/32 (quick: the lowest one)."""
    densities = (_LOWEST,) if quick else (1.0, 1 / 4, 1 / 16, _LOWEST)
    iso = () if quick else ((BASE_WIDTH, 1.0), (4 * BASE_WIDTH, 1 / 16))
    rates = tuned(quick)
    points = [(scheme, _WIDTH, density) for scheme in _SCHEMES for density in densities]
    points += [("smupar", width, density) for width, density in iso]
    found = losses_of([config_of(*point, rate=rates[point[0]]) for point in points])
    losses = dict(zip(points, found, strict=True))
    figures: dict[str, float] = {f"{scheme}_log2_rate": log2(rate) for scheme, rate in rates.items()}
    for (scheme, width, density), loss in losses.items():
        figures[f"{scheme}_{width}_{round(1 / density)}_loss"] = loss
    for density in densities:
        place = f"{_WIDTH}_{round(1 / density)}"
        weights = weights_of(config_of("smupar", _WIDTH, density, rate=1.0))
        figures |= {f"weights_{place}": weights, f"flops_{place}": 6 * weights}
        for other in ("sp", "mup"):
            figures[f"smupar_over_{other}_{round(1 / density)}"] = (
                losses["smupar", _WIDTH, density] / losses[other, _WIDTH, density]
            )
    if iso:
        dense = losses["smupar", BASE_WIDTH, 1.0]
        figures |= {
            f"iso_{width}": losses["smupar", width, density] / dense
            for width, density in ((2 * BASE_WIDTH, 1 / 4), (4 * BASE_WIDTH, 1 / 16))
        }
        figures["smupar_over_best_other"] = max(
            losses["smupar", _WIDTH, density] / min(losses[other, _WIDTH, density] for other in ("sp", "mup"))
            for density in densities
        )
    return figures


def weights_of(config: ExperimentConfig) -> int:
    """How many there are of all tensors that are multiplied with: the hidden ones that survive, and the tied head."""
    model = Workload(config).make_model()
    made = parameterised(model)
    if made is None:
        raise ValueError("no parameterisation was made of the model.")
    hidden = [name for name, tensor in made.plan.tensors.items() if tensor.role is Role.HIDDEN]
    sizes = {name: model.get_parameter(name).numel() for name in (*hidden, "embedding.weight")}
    return sum((sizes | {name: mask.num for name, mask in made.masks.items()}).values())


_AT_THE_LOWEST = tuple(
    Threshold(figure=f"smupar_over_{other}_32", bound="at most", value=0.93) for other in ("sp", "mup")
)

RECIPE = Recipe(
    name="smupar-pareto",
    claim="With one rate for all densities SmuPar has the lowest loss at every density, and at the lowest by 7 % or more.",
    measure=measure,
    thresholds=(*_AT_THE_LOWEST, Threshold(figure="smupar_over_best_other", bound="at most", value=1.01)),
    quick_thresholds=_AT_THE_LOWEST,
)
