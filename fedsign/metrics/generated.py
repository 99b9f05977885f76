"""Generated answers: the model answers test examples greedily, and metrics compare the texts with the references.

An answer ends with the end token, after `server.max_new_tokens`, or where the example would exceed data.block_length.
Prompts and references are those of the samples' tokens, so that the model is asked exactly as it was trained.  In a
conversation, each answer is asked for after the true ones before it.
"""

from itertools import groupby
from typing import cast

import torch

from fedsign.config import ExperimentConfig
from fedsign.data.base import AnySamples, Dataset, Tokenizer
from fedsign.data.text.answers import Answer, answers_at, places_of
from fedsign.metrics.answer_keys import AnswerKeys
from fedsign.metrics.base import Evaluated
from fedsign.metrics.greedy import greedy, until_end
from fedsign.seeding import Purpose, generator

_BATCH = 8  # prompts; key-value caches are large


def is_due(config: ExperimentConfig, round: int) -> bool:
    """Whether a round's answers are evaluated."""
    return round % AnswerKeys.of(config).answers_every == 0


def drawn(num: int, config: ExperimentConfig) -> list[int]:
    """Indices of the examples that are answered, ascending: `server.answers` of `num`, by the seed alone."""
    wanted = AnswerKeys.of(config).answers
    if wanted in range(1, num):
        return sorted(generator(config.seed, Purpose.ANSWERS).choice(num, size=wanted, replace=False).tolist())
    return list(range(num))


class Generated:
    """Inputs of metrics: predictions and references, two lists of texts."""

    def lacks(self, dataset: Dataset) -> tuple[str, str]:
        """Implements `MetricInputs.lacks`."""
        if dataset.text is not None and len(places_of(dataset.test)):
            return "", ""
        return "no answers behind prompts", "data.name=jsonl with data.score=answer"

    def is_due(self, config: ExperimentConfig, round: int) -> bool:
        """Implements `MetricInputs.is_due`."""
        return is_due(config, round)

    def of(self, evaluated: Evaluated) -> tuple[list[str], list[str]]:
        """Implements `MetricInputs.of`."""
        text, samples = cast(Tokenizer, evaluated.text), evaluated.samples
        answers = _drawn_answers(samples, evaluated.config)
        predictions = [""] * len(answers)
        for batch, num in _batches(answers, AnswerKeys.of(evaluated.config).max_new_tokens, samples.shape[0]):
            prompts = [answers[index].prompt for index in batch]
            made = greedy(evaluated.model, prompts, evaluated.numerics, num=num, end_id=text.end_id, pad_id=text.pad_id)
            for index, tokens in zip(batch, made, strict=True):
                predictions[index] = text.decode(tokens.tolist())
        references = [text.decode(until_end(answer.tokens, text.end_id).tolist()) for answer in answers]
        return predictions, references


def batch_shapes(samples: AnySamples, config: ExperimentConfig) -> list[tuple[int, int, int]]:
    """Of each batch: prompts, tokens of the longest one, and new tokens at most."""
    answers = _drawn_answers(samples, config)
    batches = _batches(answers, AnswerKeys.of(config).max_new_tokens, samples.shape[0])
    return [(len(batch), max(len(answers[index].prompt) for index in batch), num) for batch, num in batches]


def lengths(dataset: Dataset, config: ExperimentConfig) -> list[int]:
    """The number of tokens of each reference, without the end token."""
    end_id = cast(Tokenizer, dataset.text).end_id
    return [len(until_end(answer.tokens, end_id)) for answer in _drawn_answers(dataset.test, config)]


def _drawn_answers(samples: AnySamples, config: ExperimentConfig) -> list[Answer]:
    places = places_of(samples)
    return answers_at(samples, places[torch.tensor(drawn(len(places), config), dtype=torch.int64)])


def _batches(answers: list[Answer], most: int, block_length: int) -> list[tuple[list[int], int]]:
    """Indices of similar prompts, and how many tokens may follow each of a batch."""

    def num_of(index: int) -> int:
        # the last token of an example is not in its block
        return min(most, block_length + 1 - len(answers[index].prompt))

    order = sorted(range(len(answers)), key=lambda index: (num_of(index), len(answers[index].prompt)))
    return [
        (same[start : start + _BATCH], num)
        for num, group in groupby(order, key=num_of)
        for same in [list(group)]
        for start in range(0, len(same), _BATCH)
    ]


GENERATED = Generated()
