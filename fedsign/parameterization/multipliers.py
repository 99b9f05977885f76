"""A plan's multipliers, as hooks on modules or folded into the weights for programs without multipliers.

A multiplier of 1 adds no hook.  For a decoder whose roles name its final norm (`ModelRoles.output_is_a_norm`), the
multipliers fold into

    alpha_input            the embeddings; with a tied head, the last norm is divided by it again
    alpha_output / m_d     the last norm, whose output it multiplies
    attention scale        the queries, relative to the usual 1 / sqrt(head width)

The folded model computes the same up to rounding.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedsign.errors import ConfigError
from fedsign.parameterization.plan import Plan
from fedsign.parameterization.roles import matches


def multiply(model: nn.Module, plan: Plan) -> None:
    """Attach the plan's multipliers to a model.

    Raises:
        ConfigError: an attention module has no attribute `scale`.
    """
    for name in plan.roles.inputs:
        module = model.get_submodule(name)
        _multiply_pass(module, plan.input, of_output=isinstance(module, nn.Embedding))
    for name in plan.roles.outputs:
        _multiply_pass(model.get_submodule(name), plan.output, of_output=plan.roles.output_is_a_norm)
    for name, scale in plan.attention.items():
        module = model.get_submodule(name)
        key = plan.roles.attention_scale
        if not isinstance(getattr(module, key, None), float):
            raise ConfigError(
                f"model_roles.attention names '{name}', a {type(module).__name__} without a number `{key}`; "
                f"let it multiply its logits by self.{key}."
            )
        vars(module)[key] = scale


def _multiply_pass(module: nn.Module, factor: float, *, of_output: bool) -> None:
    if factor != 1:
        register = module.register_forward_hook if of_output else module.register_forward_pre_hook
        register(Times(factor=factor))


@dataclass(frozen=True, kw_only=True, slots=True)
# a class, not a closure: hooks are copied and pickled with their model
class Times:
    """A hook that scales a module's output, or as a pre-hook its input, which leaves the bias unscaled."""

    factor: float

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor | None = None) -> Any:
        """Scale the output, or the first input if there is no output yet."""
        return (inputs[0] * self.factor, *inputs[1:]) if output is None else output * self.factor


def folded(model: nn.Module, plan: Plan) -> nn.Module:
    """A copy of the model with the multipliers folded into the weights.

    Raises:
        ConfigError: the model is not such a decoder.
    """
    roles = plan.roles
    if not roles.output_is_a_norm:
        raise ConfigError(
            f"the model ({type(model).__name__}) is parameterized, but only the multipliers of a gpt or of a known "
            "model of transformers can be put into its weights; keep it as a run, or train with "
            "parameterization.name=none."
        )
    plain = copy.deepcopy(model)
    for module in plain.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(hook, Times)]:
                del hooks[key]
    # a tied head reads the embedding, into which alpha_input is folded, so the norm divides by it
    is_tied = not any(matches(name, roles.unembedding) for name, _ in plain.named_parameters())
    with torch.no_grad():
        _scale(plain, roles.inputs, plan.input)
        _scale(plain, roles.outputs, plan.output / (plan.input if is_tied else 1))
        for name, scale in plan.attention.items():
            usual = roles.attention[name] ** -0.5
            # weight and bias, since the scale applies to the whole query
            _scale_queries(plain.get_submodule(f"{name}.{roles.query}"), scale / usual, roles.num_fused_heads)
            vars(plain.get_submodule(name))[roles.attention_scale] = usual
    return plain


def _scale(model: nn.Module, names: tuple[str, ...], factor: float) -> None:
    for name in names:
        for parameter in model.get_submodule(name).parameters():
            parameter.mul_(factor)


def _scale_queries(module: nn.Module, factor: float, num_fused_heads: int) -> None:
    for parameter in module.parameters():
        # [heads x (query, key, value) x head width, ...]
        rows = parameter.unflatten(0, (num_fused_heads, 3, -1))[:, 0] if num_fused_heads else parameter
        rows.mul_(factor)
