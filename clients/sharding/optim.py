"""A client's optimiser on one rank: it moves the pieces of parameters that the rank owns, as the whole one would move the parameters.

The whole optimiser is made of the sharded model's own parameters, for what it says of them: rates, weight decay, masks, and
which of them train now.  It never moves anything.  What moves is torch's rule (or ours for sparse weights) on the pieces, whose gradients are
parts of the whole gradient; that is the same update for rules that work element by element, and no others are here.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from fedsign.optim.lean import made_lean, step_leanly
from fedsign.sharding.flat import Piece

_TORCHS = (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adam)  # AdamW is an Adam
_OF_TENSORS = ("params", "masks", "plan")  # of a group, besides what the rule reads


def rule_of(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer] | None:
    """The optimizer that moves pieces of tensors as this one moves the whole, such as its `element_rule`; None if there is none."""
    if type(optimizer) in _TORCHS:
        return type(optimizer)
    return getattr(optimizer, "element_rule", None)


class PieceOptimizers:
    """Makes optimisers of a rank's pieces."""

    def __init__(self, model: nn.Module, pieces: Sequence[Piece]) -> None:
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._pieces: dict[str, list[Piece]] = {}
        for piece in pieces:
            self._pieces.setdefault(piece.name, []).append(piece)
        self._nothing = nn.Parameter(torch.zeros(1))  # a rank may own nothing; an optimiser asks for at least one

    def make(self, whole: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """One without a past, with the groups of the whole one, which has a rule."""
        groups = [self._group(group) for group in whole.param_groups]
        groups[0]["params"].append(self._nothing)
        groups[0]["masks"].append(None)
        rule: Any = rule_of(whole)
        optimizer: torch.optim.Optimizer = made_lean(rule, groups, **({} if rule in _TORCHS else whole.defaults))
        return step_leanly(optimizer)

    def _group(self, whole: dict[str, Any]) -> dict[str, Any]:
        group = {key: value for key, value in whole.items() if key not in _OF_TENSORS}
        group |= {"params": [], "masks": []}
        masks = whole.get("masks", [None] * len(whole["params"]))
        for parameter, mask in zip(whole["params"], masks, strict=True):
            for piece in self._pieces.get(self._names[parameter], []):
                group["params"].append(piece.tensor)
                group["masks"].append(mask and mask.part(piece.start, piece.stop, piece.tensor.device))
        return group


def forget(optimizer: torch.optim.Optimizer, pieces: Sequence[Piece], *, but: Collection[str]) -> None:
    """Drop the moments of all parameters but those named."""
    for piece in pieces:
        if piece.name not in but:
            optimizer.state.pop(piece.tensor, None)
