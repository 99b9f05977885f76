"""Groups of parameters by what they are for, to which noise can be restricted.

Paper: arXiv 2405.12489, section 3.2: ALL; CLF, the weights of the final classifier; FEAT, all but the final classifier;
LAYER1, the first several blocks; CONV; BN.  The paper names no rule for "the first several": here they are
the stage called `layer1`, or else the first quarter of the layers that have parameters.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType

import torch
from torch import Tensor, nn

from fedsign.errors import ConfigError
from fedsign.landscape.vector import Layout
from fedsign.models.batch_norm import BATCH_NORMS
from fedsign.models.features import classifier_of

GROUPS: Mapping[str, str] = MappingProxyType(
    {
        "ALL": "all parameters",
        "CLF": "the weights of the final classifier",
        "FEAT": "all but the final classifier",
        "LAYER1": "the first several blocks",
        "CONV": "all parameters of convolutions",
        "BN": "all parameters of BatchNorm",
    }
)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def mask_of(group: str, model: nn.Module, layout: Layout) -> Tensor:
    """Which elements of the vector belong to a group, [D] of booleans.

    A group is one of GROUPS, or a pattern of parameters' names such as `layer3.*` or `*.bias`; several patterns are joined by |.

    Raises:
        ConfigError: the model has no such parameters.
    """
    names = _members(group, model, layout)
    if not names:
        raise ConfigError(
            f"group '{group}' has no parameters in this model; expected is one of {', '.join(GROUPS)} or a pattern of names "
            f"such as '{next(iter(layout.shapes)).split('.')[0]}.*'; the names are {_shown(layout)}."
        )
    mask = torch.zeros(layout.size, dtype=torch.bool)
    for name, place in layout.places().items():
        mask[place] = name in names
    return mask


def _members(group: str, model: nn.Module, layout: Layout) -> set[str]:
    owners = {
        f"{path}.{own}" if path else own: module
        for path, module in model.named_modules()
        for own, _ in module.named_parameters(recurse=False)
    }
    names = [name for name in layout.shapes if name in owners]
    layers = list(dict.fromkeys(id(owners[name]) for name in names))
    match group:
        case "ALL":
            return set(names)
        case "CLF":
            return {name for name in names if owners[name] is _classifier(model) and name.endswith("weight")}
        case "FEAT":
            return {name for name in names if owners[name] is not _classifier(model)}
        case "LAYER1":
            stage = {name for name in names if "layer1" in name.split(".")}
            first = layers[: max(1, len(layers) // 4)]
            return stage or {name for name in names if id(owners[name]) in first}
        case "CONV":
            return {name for name in names if isinstance(owners[name], _CONVOLUTIONS)}
        case "BN":
            return {name for name in names if isinstance(owners[name], BATCH_NORMS)}
        case _:
            return {name for name in names if any(fnmatchcase(name, pattern) for pattern in group.split("|"))}


def _classifier(model: nn.Module) -> nn.Module | None:
    try:
        return classifier_of(model)
    except ConfigError:
        return None


def _shown(layout: Layout) -> str:
    names = list(layout.shapes)
    return ", ".join(names if len(names) <= 8 else [*names[:5], "...", *names[-2:]])
