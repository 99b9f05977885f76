"""All parameters of a model as one vector, so points of the landscape are linear combinations.

D = number of parameters, P = points.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from math import prod

import torch
from torch import Tensor, nn

from fedsign.errors import ConfigError
from fedsign.records import Tensors


@dataclass(frozen=True, slots=True)
class Layout:
    """Positions of parameters in the vector, in the order of `named_parameters`."""

    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype

    @classmethod
    def of(cls, model: nn.Module) -> "Layout":
        """The layout of a model; shared parameters occur once.

        Raises:
            ConfigError: the model has no parameters, or complex ones.
        """
        parameters = dict(model.named_parameters())
        if not parameters:
            raise ConfigError(
                f"a {type(model).__name__} without parameters was given; expected a model that can be trained."
            )
        if name := next((name for name, parameter in parameters.items() if parameter.is_complex()), ""):
            raise ConfigError(
                f"parameter '{name}' is complex, but directions and planes are of real numbers; give a model whose "
                "parameters are real."
            )
        # at least float32: in bf16 a short step along a direction would round to nothing
        dtype = reduce(torch.promote_types, (parameter.dtype for parameter in parameters.values()), torch.float32)
        return cls({name: tuple(parameter.shape) for name, parameter in parameters.items()}, dtype)

    @property
    def size(self) -> int:
        """Number of elements, D."""
        return sum(map(prod, self.shapes.values()))

    def slices(self) -> dict[str, slice]:
        """Parameter name -> its slice of the vector."""
        ends = accumulate(map(prod, self.shapes.values()))
        return {
            name: slice(end - prod(shape), end) for (name, shape), end in zip(self.shapes.items(), ends, strict=True)
        }

    def vector(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The parameters as a vector [D], a copy; other tensors are ignored.

        Raises:
            ConfigError: a parameter is missing or has another shape.
        """
        for name, shape in self.shapes.items():
            if name not in tensors or tuple(tensors[name].shape) != shape:
                actual = "no such tensor" if name not in tensors else f"shape {list(tensors[name].shape)}"
                raise ConfigError(
                    f"a model with {actual} for '{name}' was given, but expected shape {list(shape)}; give a file "
                    "of this architecture."
                )
        return torch.cat([tensors[name].detach().reshape(-1).to(self.dtype) for name in self.shapes])

    def tensors(self, vectors: Tensor) -> Tensors:
        """Parameter name -> [..., *shape], as views of vectors [..., D]."""
        return {
            # unflatten refuses the empty shape of a scalar parameter
            name: vectors[..., span].unflatten(-1, shape) if shape else vectors[..., span].squeeze(-1)
            for (name, span), shape in zip(self.slices().items(), self.shapes.values(), strict=True)
        }
