"""torch's optimizers on stacked parameters [K, ...], for the first n clients of the stack.

torch's SGD, Adam, and AdamW are elementwise, and all clients start a round with a fresh optimizer and step together, so
one optimizer of the stacked tensors serves them all.  Clients after the first n are not touched: momentum and weight
decay must not move a client that is done.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fedsign.optim.lean import made_lean, step_leanly

# K = clients in the stack

ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


class CohortOptimizer:
    """Steps the first clients of a stack."""

    def __init__(self, whole: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
        """`whole` is a single model's optimizer, of a class in `ELEMENTWISE`; `parameters` are those of the model."""
        index_of = {parameter: index for index, parameter in enumerate(parameters)}
        self._kind = type(whole)
        self._groups = [
            {**group, "params": [index_of[each] for each in group["params"]]} for group in whole.param_groups
        ]
        self._leaves: list[nn.Parameter] = []  # [n, ...]
        self._optimizer: torch.optim.Optimizer

    @property
    def descent(self) -> float | None:
        """The learning rate if the rule is just  theta <- theta - lr g, else None."""
        group = self._groups[0]
        is_plain = self._kind is torch.optim.SGD and len(self._groups) == 1 and not group["maximize"]
        return float(group["lr"]) if is_plain and not group["momentum"] and not group["weight_decay"] else None

    def step(self, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """Update the parameters [n, ...] in place; n never grows.

        Gradients are not modified, because autograd may return expanded ones, or the same one for two parameters.
        """
        if self.descent is not None:
            torch._foreach_add_(parameters, gradients, alpha=-self.descent)
            return
        if not self._leaves or len(self._leaves[0]) != len(parameters[0]):
            self._take(parameters)
        for leaf, gradient in zip(self._leaves, gradients, strict=True):
            leaf.grad = gradient
        self._optimizer.step()

    def _take(self, parameters: list[Tensor]) -> None:
        """Switch to these parameters, and keep the moments of the clients that remain."""
        leaves = [nn.Parameter(tensor) for tensor in parameters]  # sharing memory
        if not self._leaves:
            groups = [{**group, "params": [leaves[index] for index in group["params"]]} for group in self._groups]
            self._optimizer = step_leanly(made_lean(self._kind, groups))
        for group, saved in zip(self._optimizer.param_groups, self._groups, strict=True):
            group["params"] = [leaves[index] for index in saved["params"]]
        for old, new in zip(self._leaves, leaves, strict=False):
            state = self._optimizer.state.pop(old, {})
            # moments are [n, ...] like the parameter and shrink with it; step counts are shared by all clients
            self._optimizer.state[new] = {
                key: value[: len(new)] if value.shape == old.shape else value for key, value in state.items()
            }
        self._leaves = leaves


def clip_each(gradients: list[Tensor], max_norm: float) -> list[Tensor]:
    """`torch.nn.utils.clip_grad_norm_` per client; gradients are [n, ...]."""
    # [tensors, n]
    norms = torch.stack([torch.linalg.vector_norm(gradient.flatten(1), dim=1) for gradient in gradients])
    factors = (max_norm / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)  # [n]; 1e-6 as in torch
    return [gradient * factors.view(-1, *[1] * (gradient.dim() - 1)) for gradient in gradients]
