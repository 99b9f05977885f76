"""The plan of a parameterization: density, initialization, learning rates, and multipliers per tensor.

Table 1 of Dey et al. 2024 (arXiv 2405.15743), with the width ratio m_d and the density ratio m_rho:

                          standard (sp)       mup                  smupar
    embedding, start      s^2                 s^2                  s^2
    hidden, start         s^2                 s^2 / m_d            s^2 / (m_d m_rho)
    hidden, Adam's rate   1                   1 / m_d              1 / (m_d m_rho)
    input, forward        1                   alpha_input          alpha_input
    output, forward       1                   alpha_output / m_d   alpha_output / m_d
    attention's logits    1 / sqrt(head)      1 / head             1 / head

Adam's rate is 1 for all other tensors.  As in the authors' code, hidden tensors that write to a residual stream 2 L
times start smaller by sqrt(2 L), biases start at 0, norms at 1, and an untied head starts like the embedding.

SGD: the paper only gives the hidden rate, 1 / m_rho.  The rest follows from the gradients, which scale as 1 / m_d
before an output multiplied by 1 / m_d.  So embeddings, heads, biases, and norms need m_d times the rate; a hidden
tensor's change sums over the width and keeps its rate (as in Yang et al. 2022, arXiv 2203.03466, Table 8).

Weight decay applies to all tensors except vectors.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from fedsign.errors import ConfigError
from fedsign.parameterization.roles import ModelRoles, Role, matches, roles_of_model
from fedsign.parameterization.schemes import Scheme

_WHY = {Role.EMBEDDING: "reads in", Role.UNEMBEDDING: "reads off", Role.VECTOR: "bias or norm"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPlan:
    """The plan of one parameter.  Rates are multiples of client.lr; `init_std` is None for vectors."""

    role: Role
    density: float
    init_std: float | None
    adam_rate: float
    sgd_rate: float
    why: str

    @property
    def decays(self) -> bool:
        """Whether weight decay applies."""
        return self.role is not Role.VECTOR


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The plan of a model, with its multipliers: `input`, `output`, and the attention scales by module."""

    scheme: Scheme
    roles: ModelRoles
    tensors: Mapping[str, TensorPlan]
    input: float
    output: float
    attention: Mapping[str, float]


def plan_of(model: nn.Module, scheme: Scheme) -> Plan:
    """Make the plan of a model.

    Raises:
        ConfigError: the model's roles are unknown, or a density pattern matches no hidden tensor.
    """
    roles = roles_of_model(model)
    m_d, (alpha_input, alpha_output) = scheme.width_factor(roles.width), scheme.multipliers
    tensors = {name: _tensor(name, each.dim(), roles, scheme, m_d) for name, each in model.named_parameters()}
    _check_patterns(scheme, [name for name, tensor in tensors.items() if tensor.role is Role.HIDDEN])
    return Plan(
        scheme=scheme,
        roles=roles,
        tensors=tensors,
        input=alpha_input,
        output=alpha_output / m_d,
        attention=scheme.attention_scales(roles.attention),
    )


def _tensor(name: str, num_dims: int, roles: ModelRoles, scheme: Scheme, m_d: float) -> TensorPlan:
    role = roles.role(name, num_dims)
    density, adam_rate, sgd_rate, why = 1.0, 1.0, m_d, _WHY.get(role, "")
    init_std = None if role is Role.VECTOR else scheme.init_std
    if role is Role.HIDDEN:
        density = scheme.density_of(name)
        for_init, for_rate = (scheme.density_factor(density, of) for of in ("init", "rate"))
        adam_rate, sgd_rate = 1 / (m_d * for_rate), 1 / for_rate
        init_std = scheme.init_std / (m_d * for_init) ** 0.5
        why = f"hidden, m_d {m_d:g}, m_rho {scheme.density_ratio(density):g}"
        if matches(name, roles.residual):
            # 2 L additions of equal variance to the stream
            init_std /= (2 * roles.depth) ** 0.5
            why += f", adds to the stream of {roles.depth} blocks"
    return TensorPlan(role=role, density=density, init_std=init_std, adam_rate=adam_rate, sgd_rate=sgd_rate, why=why)


def _check_patterns(scheme: Scheme, hidden: list[str]) -> None:
    for pattern in scheme.densities or ():
        if not any(matches(name, (pattern,)) for name in hidden):
            shown = ", ".join(hidden[:6]) + (", ..." if len(hidden) > 6 else "")
            raise ConfigError(
                f"parameterization.densities has the pattern '{pattern}', which names no hidden tensor; they are "
                f"{shown or 'none in this model'}."
            )


def forward_rows(plan: Plan) -> Iterator[tuple[str, float, str]]:
    """Module, multiplier, and reason, for each multiplier of the plan."""
    for name in plan.roles.inputs:
        yield name, plan.input, "alpha_input"
    for name in plan.roles.outputs:
        yield name, plan.output, "alpha_output / m_d, before the outputs are read off"
    for name, scale in plan.attention.items():
        is_usual = scale == 1 / plan.roles.attention[name]
        yield name, scale, "logits: 1 / head width" if is_usual else "logits: sqrt(base_head_width) / head width"
