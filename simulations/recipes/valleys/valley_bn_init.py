"""How BatchNorm's weights begin decides whether a noise of {0, 1} on them finds an asymmetric valley.

Paper: arXiv 2405.12489, section 3.2 and Figure 6: weights that begin at 1 or from U(0, 1) stay positive, and {0, 1} noise, which has
their signs then, is asymmetric; from G(0, 0.1) they have both signs, and it is nearly symmetric.  Here the CNN with
BatchNorm on digits, noise on BatchNorm's weights alone, s = 2, norm-scaled and filter-norm-scaled (each weight a filter).
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from fedsign.landscape.groups import mask_of
from fedsign.landscape.scaling import Scaling
from fedsign.models.batch_norm import BATCH_NORMS
from fedsign.models.cnn import cnn
from simulations.recipes.base import Figures, Recipe, Threshold
from simulations.recipes.valleys.networks import landscape_of, mean, network, sides_along

_HERE = __name__


def _begun(input_shape: tuple[int, ...], num_outputs: int, begin: Callable[[Tensor], Tensor]) -> nn.Module:
    model = cnn(input_shape, num_outputs)
    for module in model.modules():
        if isinstance(module, BATCH_NORMS):
            begin(module.weight)
    return model


def ones(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """The CNN whose BatchNorm begins at 1, as always."""
    return cnn(input_shape, num_outputs)


def uniform(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """The CNN whose BatchNorm begins at U(0, 1)."""
    return _begun(input_shape, num_outputs, nn.init.uniform_)


def gaussian(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """The CNN whose BatchNorm begins at G(0, 0.1), by standard deviation."""
    return _begun(input_shape, num_outputs, partial(nn.init.normal_, std=0.1))


def measure(quick: bool) -> Figures:
    """Asymmetries over 5 networks and 3 noises each (quick: 1 and 2)."""
    figures: dict[str, float] = {}
    for begin in ("ones", "uniform", "gaussian"):
        norms, filters = [], []
        for seed in range(1 if quick else 5):
            subject = network(seed, {"model": {"name": f"{_HERE}:{begin}"}, "rounds": 15})
            landscape = landscape_of(subject)
            names = [
                f"{path}.weight" for path, module in subject.model.named_modules() if isinstance(module, BATCH_NORMS)
            ]
            mask = mask_of("|".join(names), subject.model, landscape.layout)
            for draw in range(2 if quick else 3):
                norms.append(sides_along(landscape, "binary", draw=draw, scale=2.0, where=mask).asymmetry)
                filters.append(
                    sides_along(landscape, "binary", draw=draw, scale=2.0, where=mask, scaling=Scaling.FILTER).asymmetry
                )
        figures |= {f"{begin}_norms": mean(norms), f"{begin}_filter": mean(filters)}
    return figures | {
        "smallest_of_positive": min(figures["ones_norms"], figures["uniform_norms"]),
        "gaussian_share": abs(figures["gaussian_norms"]) / figures["ones_norms"],
    }


RECIPE = Recipe(
    name="valley-bn-init",
    claim="Noise of {0, 1} on BatchNorm's weights is asymmetric where these began above 0, and less where they began on both sides.",
    measure=measure,
    thresholds=(
        Threshold(figure="smallest_of_positive", bound="at least", value=0.1),
        Threshold(figure="gaussian_share", bound="at most", value=0.5),
    ),
    quick_thresholds=(Threshold(figure="smallest_of_positive", bound="at least", value=0.05),),
)
