"""LoRA for experts that are one tensor [num, ...], as `transformers` stores them since version 5.

`peft` wraps the module that holds the tensor, one wrapper in another for several tensors.  Its forward pass replaces
the tensor for a while: other threads of an evaluation would see it, and a frozen tensor would come back as a part of
the state.  Ours has the same numbers, but calls a view of the module with the adapted tensors.
"""

from copy import copy
from typing import Any

from torch import nn


def experts_of(model: nn.Module) -> list[str]:
    """The tensors [num, ...] of several matrices, by name."""
    return [
        f"{path}.{key}".lstrip(".")
        for path, module in model.named_modules()
        for key, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3 and len(parameter) > 1 and not isinstance(module, nn.Conv1d)
    ]


def keep_bases(model: nn.Module, wrapper: Any) -> None:
    """Give `peft`'s wrappers of experts a forward pass that does not change the modules in them."""

    class ExpertAdapter(wrapper):  # type: ignore[misc]
        """A wrapper, with the wrappers in it, that computes W_0 + (alpha / rank) B A of each of its tensors."""

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            """The outputs of the module with adapted tensors."""
            base, layer = self.get_base_layer(), self
            adapted = {}
            while isinstance(layer, wrapper):
                adapted[layer.parameter_name] = layer.get_param() + layer.get_delta_weight("default")
                layer = layer.base_layer
            view = copy(base)  # shares everything but the two dictionaries below
            parameters = {key: value for key, value in base._parameters.items() if key not in adapted}
            vars(view).update(_parameters=parameters, _buffers={**base._buffers, **adapted})
            return view(*args, **kwargs)

    for layer in model.modules():
        if isinstance(layer, wrapper):
            layer.__class__ = ExpertAdapter
