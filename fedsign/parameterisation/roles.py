"""Which tensor of a model is what: read in, hidden, read off, or a vector.

Rules for width and density (`fedsign.parameterisation.plan`) are rules for roles.  Of a model of linear layers, convolutions,
embeddings and norms they follow from the order in which the layers are registered: what comes first reads the data in, what
comes last reads the outputs off, all between is hidden.  A model whose order says something else, or that has attention
of its own, says it itself, by a ModelRoles or a mapping of its fields:

    class Mine(nn.Module):
        def __init__(self, input_shape, num_outputs, *, width: int = 64):
            ...
            self.model_roles = ModelRoles(width=width, embedding=("tokens.weight",), unembedding=("read_off.weight",))

Parameters that no pattern names are vectors where they have one dimension, else hidden.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase

from torch import nn

from fedsign.errors import ConfigError
from fedsign.models.batch_norm import BATCH_NORMS
from fedsign.models.features import classifier_of

_LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, *BATCH_NORMS)


class Role(StrEnum):
    """What a tensor is for; its rules are those of Table 1 (`fedsign.parameterisation.plan`)."""

    EMBEDDING = "embedding"  # from the data, whose size is fixed, to the width
    HIDDEN = "hidden"  # from a width to a width; these alone are sparse
    UNEMBEDDING = "unembedding"  # from the width to the outputs, whose number is fixed
    VECTOR = "vector"  # biases and norms


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRoles:
    """A model's own account of its tensors and modules, by patterns of their names (`*` for any text).

    `residual`: hidden tensors that add to a stream 2 `depth` times.  `inputs`: modules that read in, `outputs`: modules
    whose input is read off (both are found where they are not named).  `attention`: modules with an attribute `scale` of
    the logits -> the width of a head.  `watched`: modules whose outputs are to be of one size, whatever width and density.
    """

    width: int
    embedding: tuple[str, ...] = ()
    unembedding: tuple[str, ...] = ()
    residual: tuple[str, ...] = ()
    depth: int = 0
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    attention: Mapping[str, int] = field(default_factory=dict)
    watched: tuple[str, ...] = ()
    output_is_a_norm: bool = False  # `outputs` names what comes before the reading off, whose output is what is meant

    def role(self, name: str, num_dims: int) -> Role:
        """Of a parameter."""
        if matches(name, self.embedding):
            return Role.EMBEDDING
        if matches(name, self.unembedding):
            return Role.UNEMBEDDING
        return Role.VECTOR if num_dims < 2 else Role.HIDDEN


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether one of the patterns is of this name.

    >>> matches("blocks.0.ffn.up.weight", ("*.up.weight",))
    True
    """
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def roles_of_model(model: nn.Module) -> ModelRoles:
    """What the model says of itself, or else what is known of its kind.

    Raises:
        ConfigError: nothing is known of it.
    """
    said = getattr(model, "model_roles", None)
    if said is None:
        return _known(model)
    try:
        return said if isinstance(said, ModelRoles) else ModelRoles(**said)
    except TypeError as error:
        raise ConfigError(
            f"the model ({type(model).__name__}) has model_roles of type {type(said).__name__}; expected is a ModelRoles of "
            "fedsign.parameterisation.roles, or its fields by name."
        ) from error


def _known(model: nn.Module) -> ModelRoles:
    """By the order of the layers; see the module."""
    layers: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        own = [key for key, _ in module.named_parameters(recurse=False)]
        if isinstance(module, (*_LINEAR, nn.Embedding)):
            layers[name] = module
        elif own and not isinstance(module, _NORMS):
            raise ConfigError(
                f"the roles of '{f'{name}.{own[0]}'.strip('.')}' in a {type(module).__name__} are not known; give the model an "
                "attribute `model_roles` (fedsign.parameterisation.roles), or use parameterisation.name=none."
            )
    classifier = classifier_of(model)
    last = next(name for name, module in layers.items() if module is classifier)
    tables = tuple(name for name, module in layers.items() if isinstance(module, nn.Embedding))
    first = tables or tuple(layers)[:1]
    hidden = [name for name in layers if name != last and name not in first]
    if last in first or not isinstance(layers[last], nn.Linear):
        raise ConfigError(
            f"the model ({type(model).__name__}) has no layer between its data and its outputs, so that it has no width; use "
            "parameterisation.name=none."
        )
    widest = layers[hidden[-1] if hidden else first[0]]
    return ModelRoles(
        width=int(widest.get_parameter("weight").shape[1 if isinstance(widest, nn.Embedding) else 0]),
        embedding=tuple(f"{name}.weight" for name in first),
        unembedding=(f"{last}.weight",),
        inputs=first,
        outputs=(last,),
        watched=tuple(hidden),
    )
