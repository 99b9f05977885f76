"""Groups of parameters by role, to which noise can be restricted.

Paper: arXiv 2405.12489, section 3.2: ALL; CLF, the weights of the final classifier; FEAT, all but the final classifier;
LAYER1, the first several blocks; CONV; BN.  The paper names no rule for "the first several": here they are
the stage called `layer1`, or else the first quarter of the layers that have parameters.  CONV and BN are all parameters
of convolutions and of BatchNorm.
"""

from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from fedsign.errors import ConfigError
from fedsign.landscape.vector import Layout
from fedsign.models.batch_norm import BATCH_NORMS
from fedsign.models.features import classifier_of

GROUPS = ("ALL", "CLF", "FEAT", "LAYER1", "CONV", "BN")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def mask_of(group: str, model: nn.Module, layout: Layout) -> Tensor:
    """A boolean mask [D] of a group's elements in the parameter vector.

    A group is one of GROUPS, or a pattern of parameter names such as `layer3.*` or `*.bias`; several patterns are
    joined by |.

    Raises:
        ConfigError: the model has no such parameters.
    """
    names = _members(group, model)
    if not names:
        raise ConfigError(
            f"group '{group}' has no parameters in this model; expected one of {', '.join(GROUPS)} or a pattern "
            f"of names such as '{next(iter(layout.shapes)).split('.')[0]}.*'; the names are {_shown(layout)}."
        )
    mask = torch.zeros(layout.size, dtype=torch.bool)
    for name, span in layout.slices().items():
        mask[span] = name in names
    return mask


def _members(group: str, model: nn.Module) -> set[str]:
    owners, head = owners_of(model), head_of(model)
    match group:
        case "ALL":
            return set(owners)
        case "CLF":
            return {name for name, owner in owners.items() if owner is head and name.endswith("weight")}
        case "FEAT":
            return {name for name, owner in owners.items() if owner is not head}
        case "LAYER1":
            # unique, in the order of the model: a layer owns a weight and a bias
            layers = list(dict.fromkeys(owners.values()))
            first = layers[: max(1, len(layers) // 4)]
            stage = {name for name in owners if "layer1" in name.split(".")}
            return stage or {name for name, owner in owners.items() if owner in first}
        case "CONV":
            return {name for name, owner in owners.items() if isinstance(owner, _CONVOLUTIONS)}
        case "BN":
            return {name for name, owner in owners.items() if isinstance(owner, BATCH_NORMS)}
        case _:
            return {name for name in owners if any(fnmatchcase(name, pattern) for pattern in group.split("|"))}


def owners_of(model: nn.Module) -> dict[str, nn.Module]:
    """Parameter name -> the module that owns it."""
    # the path is empty for the model's own parameters, and get_submodule("") is the model
    return {name: model.get_submodule(name.rpartition(".")[0]) for name, _ in model.named_parameters()}


def head_of(model: nn.Module) -> nn.Module | None:
    """The final classifier; None if the model has none."""
    try:
        return classifier_of(model)
    except ConfigError:
        return None


def _shown(layout: Layout) -> str:
    names = list(layout.shapes)
    return ", ".join(names if len(names) <= 8 else [*names[:5], "...", *names[-2:]])
