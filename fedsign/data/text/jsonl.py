"""A JSONL file with one instruction or conversation per line, in the forms of `fedsign.data.text.examples`."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from fedsign.data.base import Dataset, Samples, Tokenizer
from fedsign.data.splitting import train_test
from fedsign.data.text.blocks import Stream, numbers_of, text_of
from fedsign.data.text.examples import Prompt, Score, example_of
from fedsign.data.text.packing import pack
from fedsign.data.text.tokenizers import CHARACTER, reads_text, tokenizer_of
from fedsign.errors import ConfigError, DataError


class _Line(NamedTuple):
    where: str
    entry: dict[str, Any]


@reads_text
def jsonl(
    seed: int,
    *,
    path: str = "data.jsonl",
    test_path: str | None = None,
    tokenizer: str = "byte",
    block_length: Annotated[int, Field(ge=1, le=2**20)] = 512,
    prompt: Prompt = "alpaca",
    score: Score = "answer",
    packing: bool = True,
    owner: str | None = None,
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1,
) -> Dataset:
    """Blocks [n, block_length] of tokens; lines are split into train and test by the seed, unless `test_path` is set.

    With `packing`, blocks [n, block_length, 2] of tokens and their positions.

    Args:
        tokenizer: `byte`, or the folder of a Hugging Face tokenizer.
        score: which tokens are scored, answers or all.
        packing: several examples per block; see [Note: what attention sees] in fedsign.data.text.packing.
        owner: the key that holds a line's owner.

    Raises:
        DataError: a file or a line cannot be read, or no scored token is left.
        ConfigError: the tokenizer would have to be built from the data.
    """
    if tokenizer == CHARACTER:
        raise ConfigError(
            "data.tokenizer=character was given with data.name=jsonl, whose lines are written with a template's "
            "characters, too; use byte, or a folder with a tokenizer."
        )
    lines = _lines(path, "data.path")
    if test_path is None:
        # back in the file's order: only membership is random
        parts = [[lines[row] for row in sorted(index)] for index in train_test(len(lines), seed, test_fraction)]
    else:
        parts = [lines, _lines(test_path, "data.test_path")]
    encoder = tokenizer_of(tokenizer, ())
    both_samples: list[Samples] = []
    notes = [_repeated(*parts)]
    for split, part, key in zip(("training", "test"), parts, (owner, None), strict=True):
        owners = _owners(part, key)
        examples = [_example(line, encoder, prompt, score, each) for line, each in zip(part, owners, strict=True)]
        samples, note = pack(examples, block_length, pad_id=encoder.pad_id, packing=packing, split=split)
        notes += [note, _endless(part, examples, encoder, split)]
        if not len(samples):
            raise DataError(
                f"nothing that is scored is left of the {len(part)} {split} lines, since their prompts fill "
                f"data.block_length={block_length} tokens; raise it."
            )
        both_samples.append(samples if key else replace(samples, owners=None))
    return Dataset(
        train=both_samples[0], test=both_samples[1], class_names=(), text=encoder, notes=tuple(filter(None, notes))
    )


def _lines(path: str, key: str) -> list[_Line]:
    """The non-empty lines of a file.

    Raises:
        DataError: the file is missing, not UTF-8 or empty, or a line is not a JSON object.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"there is no file {file.absolute()}; name the lines with --set {key}=PATH.")
    # not splitlines(), which also splits at U+2028 and other characters that JSON allows in texts
    texts = enumerate(text_of(file).split("\n"), start=1)
    parsed = [_line(text, f"line {number} of {file}") for number, text in texts if text.strip()]
    if not parsed:
        raise DataError(f"{file} has no line; expected an example a line.")
    return parsed


def _line(text: str, where: str) -> _Line:
    try:
        entry = json.loads(text)
    except ValueError as error:
        raise DataError(f"{where} is not JSON ({error}); expected one example a line, in braces.") from error
    if not isinstance(entry, dict):
        raise DataError(f"{where} is {text.strip()[:80]}; expected an example in braces.")
    return _Line(where, entry)


def _owners(lines: Sequence[_Line], key: str | None) -> list[int]:
    """Each line's owner as an integer, by the sorted order of names; 0 without a key."""
    if key is None:
        return [0] * len(lines)
    for line in lines:
        if not isinstance(line.entry.get(key), str | int):
            raise DataError(
                f"{line.where} has no owner under the key '{key}'; give every line one, a text or a number, or leave "
                "data.owner out."
            )
    return numbers_of([str(line.entry[key]) for line in lines])


def _example(line: _Line, tokenizer: Tokenizer, prompt: Prompt, score: Score, owner: int) -> Stream:
    try:
        return example_of(line.entry, tokenizer, prompt=prompt, score=score, owner=owner)
    except DataError as error:
        raise DataError(f"{line.where} {error}") from error


def _endless(lines: Sequence[_Line], examples: Sequence[Stream], tokenizer: Tokenizer, split: str) -> str | None:
    """A sentence on conversations of which no answer has the end token, which only a chat template can leave out."""
    chats = [example for line, example in zip(lines, examples, strict=True) if "messages" in line.entry]
    if not chats or any((each.tokens[each.is_scored] == tokenizer.end_id).any() for each in chats):
        return None
    return (
        f"no answer of the {len(chats):,} {split} conversations has the end token of data.tokenizer, since its chat "
        "template writes none; generation that waits for it would not stop: set eos_token in tokenizer_config.json to "
        "the token that ends an answer."
    )


def _repeated(train: Sequence[_Line], test: Sequence[_Line]) -> str | None:
    """A sentence on test lines that also occur in the training lines."""
    # sorted keys and parsed values: layout does not matter
    known = {json.dumps(line.entry, sort_keys=True) for line in train}
    num = sum(json.dumps(line.entry, sort_keys=True) in known for line in test)
    return f"{num:,} of {len(test):,} test lines are in the training lines, too, word for word." if num else None
