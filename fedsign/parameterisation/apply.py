"""A model made what its plan says: drawn anew, thinned out, its passes multiplied.

No parameter, no buffer and no name in the state_dict is added: multipliers are hooks, and a multiplier of 1 is none, so that
at the base's width and density a model is the standard one, bit for bit.  The weights alone are therefore not the whole
model: who takes them elsewhere has to multiply as well.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from fedsign.errors import ConfigError
from fedsign.parameterisation.masks import Mask, hold, mask_of
from fedsign.parameterisation.plan import Plan, plan_of
from fedsign.parameterisation.schemes import Scheme
from fedsign.parameterisation.section import MaskDraw
from fedsign.parameterisation.sparsity.base import MaskRule

_ATTRIBUTE: Final = "_fedsign_parameterised"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameterised:
    """What a model was made: its plan, the masks of its sparse tensors, and how they change, if they do."""

    plan: Plan
    masks: dict[str, Mask]
    rule: MaskRule | None = None


def parameterised(model: nn.Module) -> Parameterised | None:
    """What a model was made by `parameterise`, if it was."""
    found: Parameterised | None = getattr(model, _ATTRIBUTE, None)
    return found


def parameterise(
    model: nn.Module, scheme: Scheme, *, seed: int, rule: MaskRule | None = None, draw: MaskDraw = "bernoulli"
) -> Parameterised:
    """Draw a model's parameters anew by torch's global generator, draw its masks, and multiply its passes.

    Under a `rule` masks have the density that it starts with; start and rates are those of the density that the scheme says.

    Raises:
        ConfigError: the model's roles are not known, or the rule cannot start with this density.
    """
    plan = plan_of(model, scheme)
    _draw(model, plan)
    masks = {
        name: mask_of(
            seed, name, tensor.shape, rule.first_density(tensor.density) if rule else tensor.density, draw=draw
        )
        for name, tensor in plan.tensors.items()
        if tensor.density < 1
    }
    hold(model, masks)
    _multiply(model, plan)
    made = Parameterised(plan=plan, masks=masks, rule=rule)
    vars(model)[_ATTRIBUTE] = made
    return made


@torch.no_grad()
def mask_again(model: nn.Module) -> None:
    """Put absent weights to 0 and let the masks lie where the parameters are, after a model was loaded or moved."""
    made = parameterised(model)
    for name, mask in made.masks.items() if made is not None else ():
        parameter = model.get_parameter(name)
        mask.is_there = mask.is_there.to(parameter.device)
        parameter.mul_(mask.is_there)


def forget(model: nn.Module) -> None:
    """Take the multipliers of the passes and the record of them from a model; its weights and the scale of its attention stay."""
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(hook, InputTimes | OutputTimes)]:
                del hooks[key]
    vars(model).pop(_ATTRIBUTE, None)


@torch.no_grad()
def _draw(model: nn.Module, plan: Plan) -> None:
    for name, tensor in plan.tensors.items():
        parameter = model.get_parameter(name)
        if tensor.init_std is not None:
            nn.init.normal_(parameter, std=tensor.init_std)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)


def _multiply(model: nn.Module, plan: Plan) -> None:
    for name in plan.roles.inputs:
        _multiply_pass(model, name, plan.input, of_output=isinstance(model.get_submodule(name), nn.Embedding))
    for name in plan.roles.outputs:
        _multiply_pass(model, name, plan.output, of_output=plan.roles.output_is_a_norm)
    for name, scale in plan.attention.items():
        module = model.get_submodule(name)
        if not isinstance(getattr(module, "scale", None), float):
            raise ConfigError(
                f"model_roles.attention names '{name}', a {type(module).__name__} without a number `scale`; let it multiply "
                "its logits by self.scale."
            )
        vars(module)["scale"] = scale


def _multiply_pass(model: nn.Module, name: str, factor: float, *, of_output: bool) -> None:
    if factor == 1:
        return
    module = model.get_submodule(name)
    if of_output:
        module.register_forward_hook(OutputTimes(factor=factor))
    else:
        module.register_forward_pre_hook(InputTimes(factor=factor))


@dataclass(frozen=True, kw_only=True, slots=True)
class InputTimes:
    """A hook that multiplies what enters a module, so that its bias is not multiplied; a plain value, as models are copied."""

    factor: float

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inputs, the first one multiplied."""
        return (inputs[0] * self.factor, *inputs[1:])


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputTimes:
    """The same for what leaves a module."""

    factor: float

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        """The output, multiplied."""
        return output * self.factor


__all__ = ["Parameterised", "forget", "mask_again", "parameterise", "parameterised"]
