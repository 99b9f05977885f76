"""A client's optimizer on one rank, which updates the rank's pieces as the whole optimizer would update the parameters.

The whole optimizer is built from the sharded model's parameters only to determine learning rates, weight decay, masks,
and which parameters train; it never updates anything.  The update is torch's rule (or ours for sparse weights) on the
pieces, whose gradients are slices of the whole gradient.  For elementwise rules that is the same update.  Optimizers
that read whole matrices declare which (`TensorOptimizer`); see `clients.sharding.matrices`.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from clients.sharding.matrices import MatrixOptimizer
from fedsign.optim.base import TensorOptimizer
from fedsign.optim.lean import made_lean, step_leanly
from fedsign.sharding.flat import Piece
from fedsign.sharding.paro import Sharded

_TORCHS = (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adam)  # AdamW is an Adam
_OF_TENSORS = ("params", "masks", "plan")  # group entries that are not settings of the rule


def rule_of(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer] | None:
    """The optimizer class that does the same update on pieces, such as its `element_rule`; None if there is none."""
    if type(optimizer) in _TORCHS:
        return type(optimizer)
    return getattr(optimizer, "element_rule", None)


def rank_optimizer(whole: torch.optim.Optimizer, sharded: Sharded) -> Any:
    """A fresh optimizer for a rank's part of a sharded model."""
    pieces = piece_optimizer(whole, sharded.model, sharded.pieces)
    return MatrixOptimizer(whole, pieces, sharded) if isinstance(whole, TensorOptimizer) else pieces


def piece_optimizer(whole: torch.optim.Optimizer, model: nn.Module, pieces: Sequence[Piece]) -> torch.optim.Optimizer:
    """A fresh optimizer for a rank's pieces, with the groups of the whole one; without what needs whole tensors."""
    apart = {*whole.whole_tensors} if isinstance(whole, TensorOptimizer) else set()
    names = {parameter: name for name, parameter in model.named_parameters()}
    pieces_of: dict[str, list[Piece]] = {}
    for piece in pieces:
        pieces_of.setdefault(piece.name, []).append(piece)
    groups = []
    for given in whole.param_groups:
        group: dict[str, Any] = {key: value for key, value in given.items() if key not in _OF_TENSORS}
        group |= {"params": [], "masks": []}
        masks = given.get("masks", [None] * len(given["params"]))
        for parameter, mask in zip(given["params"], masks, strict=True):
            for piece in [] if parameter in apart else pieces_of.get(names[parameter], []):
                group["params"].append(piece.tensor)
                group["masks"].append(mask and mask.part(piece.start, piece.stop, piece.tensor.device))
        groups.append(group)
    # a rank may own nothing, but an optimizer needs at least one tensor
    groups[0]["params"].append(nn.Parameter(torch.zeros(1)))
    groups[0]["masks"].append(None)
    rule: Any = rule_of(whole)
    optimizer: torch.optim.Optimizer = made_lean(rule, groups, **({} if rule in _TORCHS else whole.defaults))
    return step_leanly(optimizer)


def forget(optimizer: torch.optim.Optimizer, pieces: Sequence[Piece], *, but: Collection[str]) -> None:
    """Drop the moments of all parameters except those named."""
    for piece in pieces:
        if piece.name not in but:
            optimizer.state.pop(piece.tensor, None)
