"""Language modeling: cross-entropy between logits [n, T, V] and the next tokens [n, T].

The loss is the mean over the scored tokens, in nats: positions whose target is `IGNORED` (padding, a prompt) count
nothing.  Samples differ in how many tokens they score, so the loss of a batch is not the mean of its samples' losses,
and the cohort path, which needs that, refuses the task.

[Note: what is kept] Logits are as many as tokens times vocabulary.  So an evaluation keeps of each batch what loss and metrics
need, two numbers a token [n, T, 2]: -log p(target) in nats (`nll`), and 1 where the likeliest token is the target, 0
elsewhere (`is_right`).  Where nothing is scored, both are 0.
"""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from fedsign.errors import ConfigError
from fedsign.tasks.base import IGNORED


class Language:
    """Cross-entropy of the next token, with label smoothing s: 1 - s + s/V for the right token, s/V else."""

    targets = "text"

    def __init__(self, *, label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0) -> None:
        self.label_smoothing = label_smoothing

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean over the scored tokens; 0 where none is, with a gradient of 0."""
        total = functional.cross_entropy(
            outputs.flatten(0, -2),
            targets.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )
        return total / (targets != IGNORED).sum().clamp_min(1)

    def num_terms(self, targets: Tensor) -> float:
        """How many tokens the loss of a batch is a mean over."""
        return float((targets != IGNORED).sum())

    def kept(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See [Note: what is kept]; without label smoothing."""
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
        """Give the model a few tokens.

        Two of them, since a block may take a large model minutes; a whole block if it takes no other number.
        It may have more logits than there are tokens: many a published model's matrices are filled up to a round number.

        Raises:
            ConfigError: it does not take tokens, or gives no logits for each of them.
        """
        (length,) = input_shape
        was_training, why = model.training, ""
        for num in sorted({min(2, length), length}):
            tokens = torch.zeros((1, num), dtype=torch.int64, device=device)
            expected = [1, num, num_outputs]
            try:
                with torch.no_grad():
                    found = list(model.eval()(tokens).shape)
            except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:  # at what it cannot take
                why = f"it raises {type(error).__name__}: {str(error).strip()[:200]}"
            else:
                if found[:-1] == expected[:-1] and found[-1] >= expected[-1]:
                    return
                why = f"it gives outputs of the shape {found}"
            finally:
                model.train(was_training)
        raise ConfigError(
            f"model.name={name} was given tokens of the shape {expected[:-1]}, for which {why}; expected are logits {expected}, as a "
            "language model gives them: use model.name=gpt or transformers."
        )


def nll(kept: Tensor) -> Tensor:
    """See [Note: what is kept]; [n, T]."""
    return kept[..., 0]


def is_right(kept: Tensor) -> Tensor:
    """See [Note: what is kept]; [n, T]."""
    return kept[..., 1]


def mean_of_scored(values: Tensor, targets: Tensor) -> Tensor:
    """Mean of values [n, T] over the scored positions, in float64; 0 where none is."""
    is_scored = targets != IGNORED
    return values[is_scored].double().sum() / is_scored.sum().clamp_min(1)
