"""Conversations as a chat template writes them: exactly the template's tokens, and which of them are answers.

A template with `{% generation %}` marks answers itself (`return_assistant_tokens_mask` of `transformers`).  Any other
template is asked where an answer is: the conversation is rendered again with a probe in the answer's place, and what
changes is the answer.  Rendering all messages both times also locates an answer that the template shortens once others
follow, such as by its `<think>` part.

An answer begins after the header that the template writes to ask for one, except for an opening `<think>`, and includes
what ends it; a model thus learns what it has to generate.  Nothing is added, neither a start nor an end token.  A token
belongs to an answer if one of its characters does, as in `transformers`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedsign.data.base import IntArray
from fedsign.data.text.blocks import Stream
from fedsign.data.text.hugging_face import Conversation, HuggingFace
from fedsign.errors import DataError

_PROBE = "\ue000"  # a character for private use, which texts do not contain
_ANSWER = {"role": "assistant", "content": _PROBE}
_UNTOLD = (
    "has a conversation in which the tokenizer's chat template does not tell answers from the rest; mark them in the "
    "template by {% generation %}, or use data.score=all."
)
Span = tuple[int, int]  # first and last character, exclusive


class _Change(NamedTuple):
    """The characters that a message changes, and whether it begins with them: nothing else that it changes precedes."""

    start: int
    stop: int
    is_first: bool


def conversation_of(entry: Mapping[str, Any]) -> Conversation:
    """The conversation of a line, in the keys of `trl`: messages, tools, chat_template_kwargs.

    Raises:
        DataError: a key holds something else.
    """
    tools, settings = entry.get("tools"), entry.get("chat_template_kwargs") or {}
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise DataError(f"has tools that are not JSON ({error}); expected a list of JSON schemas.") from error
    if not (tools is None or (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools))):
        raise DataError(f"has tools={str(tools)[:80]}; expected a list of JSON schemas.")
    if not isinstance(settings, dict):
        raise DataError(f"has chat_template_kwargs={str(settings)[:80]}; expected names and values in braces.")
    return Conversation(entry["messages"], tools or None, settings)


def templated(conversation: Conversation, tokenizer: HuggingFace, *, scores_all: bool, owner: int) -> Stream:
    """The template's tokens of a conversation, with a mask of scored ones.

    Raises:
        DataError: the template refuses the conversation, or does not tell where its answers are.
    """
    if not scores_all and tokenizer.marks_answers(conversation):
        tokens, is_answer = tokenizer.chat_tokens(conversation)
        is_scored = np.array(is_answer, dtype=np.bool_)
    else:
        text = tokenizer.chat(conversation, asks=False)
        tokens, spans = tokenizer.encode_with_spans(text)
        answers = [(0, len(text))] if scores_all else _answers(conversation, tokenizer, text)
        is_scored = _overlaps(spans, answers)
    if not is_scored.any():
        raise DataError(
            "has a conversation of which the tokenizer's chat template writes no answer; correct the conversation, or "
            "use data.score=all."
        )
    is_scored[0] = False  # nothing precedes the first token that could predict it
    ids: IntArray = np.array(tokens, dtype=np.int64)
    return Stream(ids, is_scored, owner)


def _overlaps(spans: Sequence[Span], answers: Sequence[Span]) -> npt.NDArray[np.bool_]:
    """Whether each token overlaps with one of the answers."""
    is_answer = np.zeros(len(spans), dtype=np.bool_)
    starts, stops = np.array(spans, dtype=np.int64).reshape(-1, 2).T
    for start, stop in answers:
        is_answer |= (starts < stop) & (stops > start)
    return is_answer


def _answers(conversation: Conversation, tokenizer: HuggingFace, text: str) -> list[Span]:
    """Where the answers are in the template's text.

    Raises:
        DataError: they cannot be told from what surrounds them.
    """
    found: list[Span] = []
    for index, message in enumerate(conversation.messages):
        if message["role"] == "assistant":
            found.append(_answer(conversation, tokenizer, text, index, earliest=found[-1][1] if found else 0))
    for index, message in enumerate(conversation.messages):
        # some templates write a tool's result into the turn that called it
        if message["role"] == "tool" and message["content"]:
            at = _changed(conversation, tokenizer, text, index).start
            if any(start <= at < stop for start, stop in found):
                raise DataError(_UNTOLD)
    return found


def _answer(conversation: Conversation, tokenizer: HuggingFace, text: str, index: int, *, earliest: int) -> Span:
    """Where the answer of this index is, after the position `earliest`."""
    start, stop, is_first = _changed(conversation, tokenizer, text, index)
    header = _header(_upto(conversation, index), tokenizer)
    at = text.rfind(header, earliest, start) if header else -1
    if at < 0 and not is_first:
        raise DataError(_UNTOLD)
    alone = _upto(conversation, index, _ANSWER)
    # what ends an answer may depend on whether more follows
    for asks in (False, True):
        end = _probed(alone, tokenizer, asks=asks).partition(_PROBE)[2].removesuffix(header if asks else "")
        if text.startswith(end, stop):
            stop += len(end)
            break
    return (start if at < 0 else at + len(header)), stop


def _header(asked: Conversation, tokenizer: HuggingFace) -> str:
    """What a template writes to ask for an answer, without an opening `<think>`."""
    if not asked.messages:  # templates refuse to write nothing
        return ""
    # some write an end token if they do not ask
    without = tokenizer.chat(asked, asks=False).removesuffix(tokenizer.end)
    return tokenizer.chat(asked, asks=True).removeprefix(without).partition("<think>")[0]


def _changed(conversation: Conversation, tokenizer: HuggingFace, text: str, index: int) -> _Change:
    """Where the text changes if a probe takes the place of a message."""
    messages = conversation.messages
    # an answer's probe replaces its tool calls and thoughts, too
    probe = _ANSWER if messages[index]["role"] == "assistant" else {**messages[index], "content": _PROBE}
    probed = _probed(_upto(conversation, index, probe, *messages[index + 1 :]), tokenizer)
    before, _, after = probed.partition(_PROBE)
    stop = len(text) - len(after)
    start = _num_shared(before, text)
    if not text.endswith(after) or start > stop:
        raise DataError(_UNTOLD)
    return _Change(start, stop, start == len(before))


def _probed(conversation: Conversation, tokenizer: HuggingFace, *, asks: bool = False) -> str:
    try:
        text = tokenizer.chat(conversation, asks=asks)
    except DataError as error:  # such as a tool's result without its call
        raise DataError(_UNTOLD) from error
    if text.count(_PROBE) != 1:
        raise DataError(_UNTOLD)
    return text


def _upto(conversation: Conversation, num: int, *further: Mapping[str, Any]) -> Conversation:
    """The first `num` messages, then `further` ones."""
    return replace(conversation, messages=[*conversation.messages[:num], *further])


def _num_shared(first: str, second: str) -> int:
    """The length of the longest common prefix."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))
