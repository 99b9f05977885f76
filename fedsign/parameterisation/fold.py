"""A parameterised GPT as a plain one: its multipliers put into its weights, for programs that know no multipliers.

    alpha_input            into embedding and positions; a tied head, which reads off with the embedding, is freed of it again
    alpha_output / m_d     into the last norm, whose output it multiplies
    scale of the logits    into the queries, relative to 1 / sqrt(head width), which everybody multiplies with

What the plain model computes is the same, to rounding.
"""

import copy

import torch
from torch import nn

from fedsign.errors import ConfigError
from fedsign.models.gpt import GPT
from fedsign.parameterisation.apply import forget, parameterised


def folded(model: nn.Module) -> nn.Module:
    """A plain copy; the model itself where it has no parameterisation.

    Raises:
        ConfigError: it is no GPT, for which alone this is known.
    """
    made = parameterised(model)
    if made is None:
        return model
    if not isinstance(model, GPT):
        raise ConfigError(
            f"the model ({type(model).__name__}) is parameterised, but only a gpt's multipliers can be put into its weights; keep it as "
            "a run, or train with parameterisation.name=none."
        )
    plain, plan = copy.deepcopy(model), made.plan
    forget(plain)
    with torch.no_grad():
        plain.embedding.weight.mul_(plan.input)
        if plain.positions is not None:
            plain.positions.weight.mul_(plan.input)
        for parameter in plain.norm.parameters():
            parameter.mul_(plan.output / (plan.input if plain.head is None else 1))
        for name, scale in plan.attention.items():
            attention = plain.get_submodule(name)
            usual = plain.shape.head_width**-0.5
            for parameter in attention.get_submodule("query").parameters():
                parameter.mul_(scale / usual)
            vars(attention)["scale"] = usual
    return plain
