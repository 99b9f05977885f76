"""Instructions and conversations as tokens, of which only answers are scored.

A JSON line has one of three forms:

- Alpaca: {"instruction": ..., "input": ..., "output": ...}, with an optional `input`.  The prompt is Alpaca's (Taori et
  al. 2023, github.com/tatsu-lab/stanford_alpaca); `short` omits its first sentence.
- chat: {"messages": [{"role": "user", "content": ...}, ...]}, with the tokens of the tokenizer's chat template
  (`fedsign.data.text.chat`); without one, formatted by a plain template with a heading per role.
- multiple choice: either of them with {"choices": ["...", ...], "answer": 2} in place of the answer; `answer` or
  `label` is the position of the right choice, from 0, and `question` may replace `instruction`.  The right choice is
  learned, and a `Question` holds all.

Without a chat template, the end token follows an answer and is scored with it, so a model learns to stop.  Prompt and
answer are tokenized separately, as at inference.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

from fedsign.data.base import IntArray, Tokenizer
from fedsign.data.text.blocks import Question, Stream
from fedsign.data.text.chat import conversation_of, templated
from fedsign.data.text.hugging_face import HuggingFace
from fedsign.errors import DataError

Prompt = Literal["alpaca", "short"]
Score = Literal["answer", "all"]
ROLES = ("system", "user", "assistant", "tool")  # with headings; a chat template may know others
_FIRST = {
    False: "Below is an instruction that describes a task. Write a response that appropriately completes the "
    "request.\n\n",
    True: "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n",
}


class Piece(NamedTuple):
    """A part of an example's text; `ends`: followed by the end token."""

    text: str
    is_answer: bool = False
    ends: bool = False


def example_of(entry: Mapping[str, Any], tokenizer: Tokenizer, *, prompt: Prompt, score: Score, owner: int) -> Stream:
    """The tokens of a line with a mask of scored ones; a start token precedes them unless a chat template writes them.

    Raises:
        DataError: the line has none of the forms.
    """
    if "choices" in entry:
        return _multiple_choice(entry, tokenizer, prompt=prompt, score=score, owner=owner)
    if "messages" in entry:
        messages = _messages(entry["messages"])
        if isinstance(tokenizer, HuggingFace) and tokenizer.has_chat_template:
            return templated(conversation_of(entry), tokenizer, scores_all=score == "all", owner=owner)
        _check_plain(entry)
        pieces = list(_plain(messages))
    elif "instruction" in entry:
        pieces = _alpaca(entry, prompt)
    else:
        raise DataError(
            f"has the keys {', '.join(map(str, entry)) or 'none'}; expected instruction and output (input is "
            "optional), or messages, or one of the two with choices and answer."
        )
    return _stream(pieces, tokenizer, scores_all=score == "all", owner=owner)


def _multiple_choice(
    entry: Mapping[str, Any], tokenizer: Tokenizer, *, prompt: Prompt, score: Score, owner: int
) -> Stream:
    choices, answer = _choices(entry), _right(entry)
    if answer not in range(len(choices)):
        raise DataError(
            f"has the answer {answer} of {len(choices)} choices; expected the position of the right one, from 0 to "
            f"{len(choices) - 1}."
        )
    lines = [_answered(entry, choice) for choice in choices]
    stream = example_of(lines[answer], tokenizer, prompt=prompt, score=score, owner=owner)
    asked = [_asked(line, choice, tokenizer, prompt) for line, choice in zip(lines, choices, strict=True)]
    question = Question(
        prompt=np.array(asked[0][0], dtype=np.int64),
        choices=tuple(np.array(tokens, dtype=np.int64) for _, tokens in asked),
        num_bytes=tuple(len(choice.encode()) for choice in choices),
        answer=answer,
    )
    return replace(stream, question=question)


def _choices(entry: Mapping[str, Any]) -> Sequence[str]:
    given = entry["choices"]
    if not (isinstance(given, list) and len(given) > 1 and all(isinstance(each, str) and each for each in given)):
        raise DataError(f"has choices={str(given)[:80]}; expected a list of two texts or more, none of them empty.")
    return given


def _right(entry: Mapping[str, Any]) -> int:
    """The position of the right choice, an integer or one in quotes, as in HellaSwag."""
    given = entry.get("answer", entry.get("label"))
    if isinstance(given, str) and given.isdecimal():
        return int(given)
    if not isinstance(given, int) or isinstance(given, bool):
        raise DataError(
            f"has choices and answer={str(given)[:80]!r}; expected the position of the right choice, from 0, as answer "
            "or label."
        )
    return given


def _answered(entry: Mapping[str, Any], choice: str) -> dict[str, Any]:
    """The line with a choice as its answer."""
    line = {key: value for key, value in entry.items() if key != "choices"}
    if "question" in line:
        line.setdefault("instruction", line["question"])
    messages = line.get("messages")
    if not isinstance(messages, list):
        return {**line, "output": choice}
    last = messages[-1] if messages else None
    if isinstance(last, dict) and last.get("role") == "assistant":
        raise DataError("has choices, but its messages end with an answer; leave the answer out.")
    return {**line, "messages": [*messages, {"role": "assistant", "content": choice}]}


def _asked(line: Mapping[str, Any], choice: str, tokenizer: Tokenizer, prompt: Prompt) -> tuple[list[int], list[int]]:
    """The tokens of a prompt and of a choice, without what ends it."""
    if "messages" in line and isinstance(tokenizer, HuggingFace) and tokenizer.has_chat_template:
        conversation = conversation_of(line)
        header = tokenizer.chat(replace(conversation, messages=conversation.messages[:-1]), asks=True)
        # encoded together, as a prompt's last characters may be one token with a choice's first
        tokens = tokenizer.encode(header)
        return tokens, tokenizer.encode(header + choice)[len(tokens) :]
    *before, _ = _plain(line["messages"]) if "messages" in line else _alpaca(line, prompt)
    return _stream(before, tokenizer, scores_all=False, owner=0).tokens.tolist(), tokenizer.encode(choice)


def _alpaca(entry: Mapping[str, Any], prompt: Prompt) -> list[Piece]:
    instruction, given, answer = (_text(entry, key) for key in ("instruction", "input", "output"))
    if not answer:
        raise DataError("has no output, which is what a model has to learn; give it one, or leave the line out.")
    first = _FIRST[bool(given)] if prompt == "alpaca" else ""
    context = f"### Input:\n{given}\n\n" if given else ""
    text = f"{first}### Instruction:\n{instruction}\n\n{context}### Response:\n"
    return [Piece(text), Piece(answer, is_answer=True, ends=True)]


def _text(entry: Mapping[str, Any], key: str) -> str:
    value = entry.get(key)
    if value is not None and not isinstance(value, str):
        raise DataError(f"has {key}={str(value)[:80]!r}; expected a text in quotes.")
    return value or ""


def _messages(given: Any) -> Sequence[Mapping[str, Any]]:
    """Check a conversation: each message has a role and a text or tool calls, and at least one is an answer."""
    if not isinstance(given, list):
        raise DataError(f"has messages of type {type(given).__name__}; expected a list of messages.")
    for each in given:
        if not _is_message(each):
            raise DataError(
                f"has the message {str(each)[:80]}; expected a role and a content, which is a text, or tool_calls."
            )
    if not any(each["role"] == "assistant" and (each.get("content") or each.get("tool_calls")) for each in given):
        raise DataError("has messages of which none is the assistant's, so that a model could learn nothing of them.")
    return given


def _is_message(given: Any) -> bool:
    if not (isinstance(given, dict) and isinstance(given.get("role"), str)):
        return False
    content = given.get("content")
    return isinstance(content, str) or (content is None and bool(given.get("tool_calls")))


def _check_plain(entry: Mapping[str, Any]) -> None:
    """Check that headings say all of a conversation, where there is no chat template."""
    remedy = "use a tokenizer with a chat template (data.tokenizer)"
    for each in entry["messages"]:
        if each["role"] not in ROLES:
            raise DataError(f"has the role {each['role']!r}; expected one of {', '.join(ROLES)}, or {remedy}.")
    if entry.get("tools") or any(each.get("tool_calls") for each in entry["messages"]):
        raise DataError(f"has tools, which only a chat template can write; {remedy}.")


def _plain(messages: Sequence[Mapping[str, str]]) -> Iterator[Piece]:
    for index, message in enumerate(messages):
        gap = "\n\n" if index else ""
        is_answer = message["role"] == "assistant"
        yield Piece(f"{gap}### {message['role'].capitalize()}:\n")
        yield Piece(message["content"], is_answer=is_answer, ends=is_answer)


def _stream(pieces: Sequence[Piece], tokenizer: Tokenizer, *, scores_all: bool, owner: int) -> Stream:
    tokens, scored = [tokenizer.start_id], [False]  # nothing precedes the first token that could predict it
    for piece in pieces:
        ids = tokenizer.encode(piece.text) + [tokenizer.end_id] * piece.ends
        tokens += ids
        scored += [piece.is_answer or scores_all] * len(ids)
    all_ids: IntArray = np.array(tokens, dtype=np.int64)
    return Stream(all_ids, np.array(scored, dtype=np.bool_), owner)
