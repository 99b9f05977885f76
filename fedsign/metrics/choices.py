"""Multiple choice by likelihood, as lm-evaluation-harness defines it.

The choice with the largest log p(choice | prompt) is the model's, without what ends an answer.  Where prompt and choice
are longer than data.block_length, the prompt's first tokens are dropped.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedsign.config import ExperimentConfig
from fedsign.data.base import AnySamples, Dataset, Samples
from fedsign.data.text.blocks import Question
from fedsign.metrics.base import Evaluated, mean
from fedsign.metrics.generated import drawn, is_due
from fedsign.traits import declares


class Choices:
    """Inputs of metrics: log-likelihoods of each question's choices, [C] in nats and float64, and the questions."""

    def lacks(self, dataset: Dataset) -> tuple[str, str]:
        """Implements `MetricInputs.lacks`."""
        if _questions_of(dataset.test):
            return "", ""
        return "no test examples with choices", 'lines with "choices" and "answer"'

    def is_due(self, config: ExperimentConfig, round: int) -> bool:
        """Implements `MetricInputs.is_due`."""
        return is_due(config, round)

    def of(self, evaluated: Evaluated) -> tuple[list[Tensor], list[Question]]:
        """Implements `MetricInputs.of`."""
        known = _questions_of(evaluated.samples)
        questions = [known[index] for index in drawn(len(known), evaluated.config)]
        return [_log_likelihoods(question, evaluated) for question in questions], questions


CHOICES = Choices()


@declares(targets="text", inputs=CHOICES)
def acc(log_likelihoods: Sequence[Tensor], questions: Sequence[Question]) -> float:
    """Share of questions whose right choice has the largest likelihood, in [0, 1]; of equal ones, the first counts."""
    pairs = zip(log_likelihoods, questions, strict=True)
    return mean([int(values.argmax()) == question.answer for values, question in pairs])


@declares(targets="text", inputs=CHOICES)
def acc_norm(log_likelihoods: Sequence[Tensor], questions: Sequence[Question]) -> float:
    """`acc` with log-likelihoods per byte of the choices' texts."""
    pairs = zip(log_likelihoods, questions, strict=True)
    return acc([values / torch.tensor(question.num_bytes) for values, question in pairs], questions)


def _questions_of(samples: AnySamples) -> list[Question]:
    """All questions about some samples."""
    if not isinstance(samples, Samples) or samples.questions is None:
        return []
    return [question for of_sample in samples.questions for question in of_sample or ()]


def _log_likelihoods(question: Question, evaluated: Evaluated) -> Tensor:
    """log p of each choice [C], in a batch of all."""
    length, device = evaluated.samples.shape[0], evaluated.numerics.device
    # the last token predicts nothing
    rows = [[*question.prompt.tolist(), *choice.tolist()][:-1][-length:] for choice in question.choices]
    inputs = torch.zeros((len(rows), max(map(len, rows))), dtype=torch.int64)
    for row, tokens in zip(inputs, rows, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)  # padded on the right, which a causal model does not see
    logits = evaluated.numerics.outputs(evaluated.model, inputs.to(device), channels_last=False)  # [C, T, V]
    found = []
    for outputs, tokens, choice in zip(logits, rows, question.choices, strict=True):
        targets = torch.from_numpy(choice)[-length:].to(device)
        scores = outputs[len(tokens) - len(targets) : len(tokens)].log_softmax(dim=-1)
        found.append(scores.gather(1, targets[:, None]).double().sum())
    return torch.stack(found).cpu()
