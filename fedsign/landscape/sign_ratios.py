"""Agreement of signs between two models, and the distribution of the step between them.

Paper: arXiv 2405.12489, section 4: the same-sign ratio (SSR) of two models is the share of parameters with equal signs;
0 is a sign of its own.  Of a step eps = theta_2 - theta_1: mean, standard deviation and SSR with both ends, in the five
groups BN Weight, CLF Weight, CLF Bias, Other Weight, Other Bias.
"""

import torch
from torch import Tensor, nn

from fedsign.landscape.groups import head_of, owners_of
from fedsign.landscape.vector import Layout
from fedsign.models.batch_norm import BATCH_NORMS

_KINDS, _PARTS = ("BN", "CLF", "Other"), ("weight", "bias")


def same_sign_ratio(first: Tensor, second: Tensor, *, where: Tensor | None = None) -> float:
    """The share of elements of two vectors [D] with equal signs, within a mask [D]; NaN for an empty mask.

    >>> same_sign_ratio(torch.tensor([1.0, -2.0, 0.0, 3.0]), torch.tensor([5.0, 1.0, 0.0, 1.0]))
    0.75
    """
    equal = first.sign() == second.sign()
    chosen = equal if where is None else equal[where]
    return float(chosen.double().mean())


def step_by_group(model: nn.Module, layout: Layout, first: Tensor, second: Tensor) -> list[dict[str, str | float]]:
    """The step from the first model to the second, by group; groups that the model lacks are left out.

    `ssr_start`, `ssr_end`: same-sign ratio of the step with its start and its end.
    """
    step = second - first
    ratios: list[dict[str, str | float]] = []
    for group, mask in _masks(model, layout).items():
        inside = step[mask].double()
        ratios.append(
            {
                "group": group,
                "num_parameters": len(inside),
                "mean": float(inside.mean()),
                "std": float(inside.std(correction=0)),
                "ssr_start": same_sign_ratio(step, first, where=mask),
                "ssr_end": same_sign_ratio(step, second, where=mask),
            }
        )
    return ratios


def _masks(model: nn.Module, layout: Layout) -> dict[str, Tensor]:
    """Masks of the groups that the model has, in the paper's order."""
    owners, head = owners_of(model), head_of(model)
    masks = {f"{kind} {part}": torch.zeros(layout.size, dtype=torch.bool) for kind in _KINDS for part in _PARTS}
    for name, span in layout.slices().items():
        owner = owners[name]
        kind = "BN" if isinstance(owner, BATCH_NORMS) else "CLF" if owner is head else "Other"
        # anything but a bias counts as a weight
        masks[f"{kind} {_PARTS[name.endswith('bias')]}"][span] = True
    return {group: mask for group, mask in masks.items() if mask.any()}
