"""Language modeling: cross-entropy between logits [n, T, V] and the next tokens [n, T].

The loss is the mean over the scored tokens, in nats.  Positions whose target is `IGNORED` (padding, prompts) do not
count.  Since samples score different numbers of tokens, a batch's loss is not the mean of its samples' losses, which
the cohort path requires; hence that path refuses the task.

[Note: what is kept] There are tokens x vocabulary logits, too many to keep.  An evaluation reduces each batch to two
numbers per token, [n, T, 2]: -log p(target) in nats (`nll`), and 1 if the likeliest token is the target, else 0
(`is_right`).  Both are 0 at positions that are not scored.
"""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from fedsign.errors import ConfigError
from fedsign.tasks.base import IGNORED
from fedsign.tasks.documents import packed

_ROUNDING = 64  # times the precision of the logits; sums over the same shapes differ by less
_OTHER_SHAPE = 1e-3  # of the largest logit; pretrained models have activations a thousand times as large


class Language:
    """Cross-entropy of the next token; label smoothing s gives targets 1 - s + s/V and s/V."""

    targets = "text"

    def __init__(self, *, label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0) -> None:
        self.label_smoothing = label_smoothing

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean over the scored tokens; 0, with a zero gradient, if there are none."""
        total = functional.cross_entropy(
            outputs.flatten(0, -2),  # [n T, V]
            targets.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )
        return total / (targets != IGNORED).sum().clamp_min(1)

    def num_terms(self, targets: Tensor) -> float:
        """The number of scored tokens."""
        return float((targets != IGNORED).sum())

    def kept(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """`nll` and `is_right`, without label smoothing; see [Note: what is kept]."""
        losses = functional.cross_entropy(
            outputs.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="none"
        ).view_as(targets)
        return torch.stack([losses, (outputs.argmax(dim=-1) == targets).to(losses.dtype)], dim=-1)

    def loss_of(self, kept: Tensor, targets: Tensor) -> Tensor:
        """The mean over the scored tokens of all samples."""
        return mean_of_scored(nll(kept), targets)

    def check_model(
        self, model: nn.Module, input_shape: tuple[int, ...], num_outputs: int, *, name: str, device: torch.device
    ) -> None:
        """Run the model on a few tokens.

        Two suffice; a full block, which may take a large model minutes, is tried only if two fail.  More logits than
        tokens in the vocabulary are fine: many published models pad their matrices to a round number.

        Raises:
            ConfigError: the model does not map tokens to logits, or mixes packed documents.
        """
        length, *pair = input_shape
        was_training, why = model.training, ""
        # a set: a block of one or two tokens is tried once
        for num in sorted({min(2, length), length}):
            tokens = torch.zeros((1, num, *pair), dtype=torch.int64, device=device)
            expected = [1, num, num_outputs]
            try:
                with torch.no_grad():
                    shape = list(model.eval()(tokens).shape)
            except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:  # the input does not fit
                why = f"it raises {type(error).__name__}: {str(error).strip()[:200]}"
            else:
                if shape[:-1] == expected[:-1] and shape[-1] >= expected[-1]:
                    if pair:
                        _check_documents(model, length, num_outputs, name=name, device=device)
                    return
                why = f"it gives outputs of the shape {shape}"
            finally:
                model.train(was_training)
        remedy = "use model.name=gpt or transformers"
        if pair:
            remedy += ", or, if it takes tokens without positions of packed examples, set data.packing=false"
        raise ConfigError(
            f"model.name={name} was given tokens of the shape {[1, num, *pair]}, for which {why}; "
            f"expected logits {expected}, as a language model gives them: {remedy}."
        )


def _check_documents(model: nn.Module, length: int, num_outputs: int, *, name: str, device: torch.device) -> None:
    """Compare the logits of a document behind one, behind another one, and alone.

    Raises:
        ConfigError: they differ by more than rounding, which is more in another shape.
    """
    num = min(2, length // 2)
    first, other, second = (torch.arange(start, start + num) % num_outputs for start in (0, num, 2 * num))
    was_training = model.training
    with torch.no_grad():
        behind, behind_other, alone = (
            model.eval()(packed(each).to(device))[:, -num:] for each in ([first, second], [other, second], [second])
        )
    model.train(was_training)
    rounding, largest = _ROUNDING * torch.finfo(alone.dtype).eps, alone.abs().amax()
    differences = [(behind - each).abs().amax() for each in (behind_other, alone)]
    difference = max(differences)
    if differences[0] > rounding * largest or difference > max(rounding, _OTHER_SHAPE) * largest:
        raise ConfigError(
            f"model.name={name} was given packed examples, but its logits of an example depend on the one before it in "
            f"the block (by {difference:.2g}): it takes no positions or attends across documents; set "
            "data.packing=false."
        )


def nll(kept: Tensor) -> Tensor:
    """-log p(target) of each token, [n, T]."""
    return kept[..., 0]


def is_right(kept: Tensor) -> Tensor:
    """1 where the likeliest token is the target, [n, T]."""
    return kept[..., 1]


def mean_of_scored(values: Tensor, targets: Tensor) -> Tensor:
    """Mean of values [n, T] over the scored positions, in float64; 0 if there are none."""
    is_scored = targets != IGNORED
    return values[is_scored].double().sum() / is_scored.sum().clamp_min(1)
