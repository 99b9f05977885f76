"""GaLore: Adam in a low-rank subspace of each matrix's gradient: small moments, while all weights train.

Paper: Zhao et al. 2024 (arXiv 2403.03507), Algorithm 2, and the authors' public code.  For a weight with gradient G [m,
n]:

    every T steps:   U S V^T = svd(G);   P = V_r [n, r] if m >= n, else U_r [m, r]
    R = G P  [m, r]      or   P^T G  [r, n]
    m, v <- Adam's moments of R;   N = m_hat / (sqrt(v_hat) + eps)
    W <- W - lr alpha (N P^T  or  P N),   then   W <- (1 - lr weight_decay) W

r -> rank, T -> update_proj_gap, alpha -> scale.  The moments are kept when P changes.

Differs from the authors' code: parameters without a projection use torch's AdamW, which decays weights before the
step; and eps is added to sqrt(v_hat), as in the paper, not to sqrt(v).
"""

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedsign.errors import ConfigError
from fedsign.numerics import widened
from fedsign.optim.adamw import Decay, Epsilon
from fedsign.optim.blocks import find_blocks
from fedsign.optim.lean import made_lean
from fedsign.traits import declares

Projected = Literal["blocks", "linear"]


class GaLore(torch.optim.Optimizer):
    """A torch optimizer: GaLore for `matrices`, AdamW for `others`."""

    element_rule = torch.optim.AdamW  # of `others`

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        others: Iterable[nn.Parameter] = (),
        *,
        lr: float = 1e-3,
        rank: int = 128,
        update_proj_gap: int = 200,
        scale: float = 0.25,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        """Raises: ConfigError: there are no matrices, or one is not 2-D."""
        matrices, others = list(matrices), list(others)
        if not matrices or any(matrix.dim() != 2 for matrix in matrices):
            raise ConfigError(
                "GaLore was given no matrices to project, or a tensor that is none; expected 2-D weights."
            )
        projection = {"rank": rank, "update_proj_gap": update_proj_gap, "scale": scale}
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        groups: list[dict[str, Any]] = [{"params": matrices, **projection}, *([{"params": others}] if others else [])]
        super().__init__(groups, defaults)
        self._plain = None if not others else made_lean(torch.optim.AdamW, others, **defaults)
        if self._plain is not None:
            # step() lends this group to the inner AdamW, which reads all of its own keys in it (amsgrad, foreach, ...)
            self.param_groups[1].update(self._plain.param_groups[0])

    @property
    def whole_tensors(self) -> list[nn.Parameter]:
        """The matrices."""
        return list(self.param_groups[0]["params"])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        matrices, *others = self.param_groups
        for weight in matrices["params"]:
            if weight.grad is not None:
                _step(weight, weight.grad, self.state[weight], matrices)
        if self._plain is not None:
            # load_state_dict replaces groups and state, so the inner AdamW takes them anew in every step
            self._plain.param_groups, self._plain.state = others, self.state
            self._plain.step()
        return loss


def _step(weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """The module's equations for one matrix."""
    steps = int(state["step"]) if state else 0
    # counted per matrix: one that has no gradient in a step does not age
    if steps % group["update_proj_gap"] == 0:
        state["projector"] = projector_of(gradient, group["rank"])
    projector = state["projector"]
    reduced = gradient @ projector if len(gradient) >= gradient.shape[1] else projector.T @ gradient
    if not steps:
        # a CPU tensor, as in torch's optimizers: load_state_dict does not cast or move `step`
        state["step"] = torch.zeros(())
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(reduced), torch.zeros_like(reduced)
    state["step"] += 1
    beta1, beta2 = group["betas"]
    mean = state["exp_avg"].lerp_(reduced, 1 - beta1)
    square = state["exp_avg_sq"].mul_(beta2).addcmul_(reduced, reduced, value=1 - beta2)
    correction1, correction2 = (1 - beta ** (steps + 1) for beta in (beta1, beta2))
    direction = (mean / correction1) / ((square / correction2).sqrt() + group["eps"])
    weight.add_(_in_full(direction, state["projector"], weight), alpha=-group["lr"] * group["scale"])
    if group["weight_decay"]:
        # after the step, as in the authors' code; torch's AdamW decays before
        weight.mul_(1 - group["lr"] * group["weight_decay"])


def projector_of(gradient: Tensor, rank: int) -> Tensor:
    """The first singular vectors of a gradient [m, n]: V_r [n, r] if m >= n, else U_r [m, r].

    >>> projector_of(torch.ones(5, 3), rank=2).shape, projector_of(torch.ones(3, 5), rank=9).shape
    (torch.Size([3, 2]), torch.Size([3, 3]))
    """
    full = gradient.to(widened(gradient.dtype))  # svd needs at least float32
    # torch returns V^T as `right`, hence the transpose
    left, _, right = torch.linalg.svd(full, full_matrices=False)
    found = right.T if len(gradient) >= gradient.shape[1] else left
    projector: Tensor = found[:, :rank].to(gradient.dtype)
    return projector.clone(memory_format=torch.contiguous_format)  # frees the rest of the factor


def _in_full(direction: Tensor, projector: Tensor, weight: Tensor) -> Tensor:
    return direction @ projector.T if len(weight) >= weight.shape[1] else projector @ direction


@declares(takes_model=True)
def galore(
    model: nn.Module,
    lr: float,
    weight_decay: float,
    *,
    rank: Annotated[int, Field(gt=0)] = 128,
    update_proj_gap: Annotated[int, Field(gt=0)] = 200,
    scale: Annotated[float, Field(gt=0)] = 0.25,
    projected: Projected = "blocks",
    blocks: str = "",
    beta1: Decay = 0.9,
    beta2: Decay = 0.999,
    eps: Epsilon = 1e-6,
) -> torch.optim.Optimizer:
    """Adam in `rank` dimensions for real matrices in the model's blocks, or its linear layers; AdamW for the rest."""
    if projected == "blocks":
        layers = [module for block in find_blocks(model, blocks).values() for module in block.modules()]
    else:
        layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    inside = {
        parameter
        for layer in layers
        for parameter in layer.parameters(recurse=False)
        if parameter.dim() == 2 and not parameter.is_complex()
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return made_lean(
        GaLore,
        # lists in the model's order: `inside` is a set, whose order differs between processes
        [each for each in trained if each in inside],
        others=[each for each in trained if each not in inside],
        lr=lr,
        weight_decay=weight_decay,
        rank=rank,
        update_proj_gap=update_proj_gap,
        scale=scale,
        betas=(beta1, beta2),
        eps=eps,
    )
