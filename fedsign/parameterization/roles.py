"""The role of each tensor in a model: embedding, hidden, unembedding, or vector.

The scaling rules (`fedsign.parameterization.plan`) are stated per role.  In a model of linear layers, convolutions,
embeddings, and norms, roles follow from the order of registration: the first layer is the embedding, the last one the
unembedding, and those in between are hidden.  A model with another order, or with its own attention, declares its roles
as a ModelRoles or a mapping of its fields:

    class Mine(nn.Module):
        def __init__(self, input_shape, num_outputs, *, width: int = 64):
            ...
            self.model_roles = ModelRoles(width=width, embedding=("tokens.weight",), unembedding=("read_off.weight",))

Parameters that match no pattern are vectors if they have one dimension, otherwise hidden.
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
    """The role of a tensor, as in Table 1 of the paper (`fedsign.parameterization.plan`)."""

    EMBEDDING = "embedding"  # from the data, of fixed size, to the width
    HIDDEN = "hidden"  # from width to width; only these are sparse
    UNEMBEDDING = "unembedding"  # from the width to the outputs, of fixed number
    VECTOR = "vector"  # biases and norms


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRoles:
    """A model's declaration of its roles, by patterns of tensor and module names (`*` matches any text).

    `residual`: hidden tensors that write to the residual stream 2 `depth` times.  `inputs`: modules that read the data.
    `outputs`: modules whose input is scaled before it is read off.  `attention`: modules with an attribute `scale` for
    their logits -> head width; `attention_scale` names another attribute.  `query`: the module in them whose outputs
    are the queries; it has those of each of `num_fused_heads` before the head's keys and values, unless that is 0.
    `watched`: modules whose output size should not depend on width or density.
    """

    width: int
    embedding: tuple[str, ...] = ()
    unembedding: tuple[str, ...] = ()
    residual: tuple[str, ...] = ()
    depth: int = 0
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    attention: Mapping[str, int] = field(default_factory=dict)
    attention_scale: str = "scale"
    query: str = "query"
    num_fused_heads: int = 0
    watched: tuple[str, ...] = ()
    output_is_a_norm: bool = False  # `outputs` names the norm before the head, so its output is scaled

    def role(self, name: str, num_dims: int) -> Role:
        """The role of a parameter."""
        if matches(name, self.embedding):
            return Role.EMBEDDING
        if matches(name, self.unembedding):
            return Role.UNEMBEDDING
        return Role.VECTOR if num_dims < 2 else Role.HIDDEN


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a name matches one of the patterns.

    >>> matches("blocks.0.ffn.up.weight", ("*.up.weight",))
    True
    """
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def roles_of_model(model: nn.Module) -> ModelRoles:
    """The roles that a model declares, or else those that follow from the order of its layers.

    Raises:
        ConfigError: the roles cannot be determined.
    """
    declared = getattr(model, "model_roles", None)
    if declared is None:
        return _known(model)
    try:
        return declared if isinstance(declared, ModelRoles) else ModelRoles(**declared)
    except TypeError as error:
        raise ConfigError(
            f"the model ({type(model).__name__}) has model_roles of type {type(declared).__name__}; "
            "expected a ModelRoles of fedsign.parameterization.roles, or its fields by name."
        ) from error


def _known(model: nn.Module) -> ModelRoles:
    """Roles by the order of the layers."""
    layers: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        own = [key for key, _ in module.named_parameters(recurse=False)]
        if isinstance(module, (*_LINEAR, nn.Embedding)):
            layers[name] = module
        # a parameter without a layer, such as a class token, could have any role
        elif own and not isinstance(module, _NORMS):
            raise ConfigError(
                f"the roles of '{f'{name}.{own[0]}'.strip('.')}' in a {type(module).__name__} are not known; "
                "give the model an attribute `model_roles` (fedsign.parameterization.roles), "
                "or use parameterization.name=none."
            )
    classifier = classifier_of(model)
    last = next(name for name, module in layers.items() if module is classifier)
    tables = tuple(name for name, module in layers.items() if isinstance(module, nn.Embedding))
    # every table reads the data, such as tokens and positions
    first = tables or tuple(layers)[:1]
    hidden = [name for name in layers if name != last and name not in first]
    if last in first or not isinstance(layers[last], nn.Linear):
        raise ConfigError(
            f"the model ({type(model).__name__}) has no layer between its data and its outputs, "
            "so that it has no width; "
            "use parameterization.name=none."
        )
    widest = layers[hidden[-1] if hidden else first[0]]
    return ModelRoles(
        # Embedding: [num, width]; Linear and convolutions: [out, in, ...]
        width=int(widest.get_parameter("weight").shape[1 if isinstance(widest, nn.Embedding) else 0]),
        embedding=tuple(f"{name}.weight" for name in first),
        unembedding=(f"{last}.weight",),
        inputs=first,
        outputs=(last,),
        watched=tuple(hidden),
    )
