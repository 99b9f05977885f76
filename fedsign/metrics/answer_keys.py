"""Keys of the configuration table [server] on the evaluation of a language model's answers."""

from collections.abc import Mapping
from typing import Any, ClassVar

from fedsign.rules import Rule
from fedsign.sections import NonNegative, Positive, Table


class AnswerKeys(Table):
    """Keys in [server]."""

    neutral: ClassVar[Mapping[str, Any]] = {"answers": 100, "answers_every": 1, "max_new_tokens": 128}
    rules: ClassVar[tuple[Rule[Any], ...]] = (
        Rule(
            lambda config: config.server.answers_every > config.rounds,
            "server.answers_every={server.answers_every} was given, but the run has rounds={rounds}, so that no round "
            "would evaluate answers",
            "lower it, or raise rounds",
        ),
    )

    answers: NonNegative = 100  # test examples that are answered, the same in every round; 0: all
    answers_every: Positive = 1  # rounds from one evaluation of answers to the next
    max_new_tokens: Positive = 128  # length of a generated answer, at most
