"""Tokenizers without dependencies: bytes and characters."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from fedsign.data.base import Frame, Tokenizer
from fedsign.errors import ConfigError
from fedsign.traits import declares

BuiltIn = Literal["character", "byte"]
BYTE, CHARACTER = "byte", "character"
_NUM_BYTES = 256


@dataclass(frozen=True, slots=True)
class Bytes:
    """UTF-8 bytes, which cover any text; 256 is start and end.

    >>> Bytes().encode("né"), Bytes().decode([110, 195, 169, 256])
    ([110, 195, 169], 'né')
    """

    vocabulary_size: int = _NUM_BYTES + 1
    start_id: int = _NUM_BYTES
    end_id: int = _NUM_BYTES
    pad_id: int = _NUM_BYTES

    def encode(self, text: str) -> list[int]:
        """One token per byte."""
        return list(text.encode("utf-8"))

    def decode(self, tokens: Iterable[int]) -> str:
        """The text; invalid UTF-8, which a model may generate, becomes the replacement character."""
        return bytes(token for token in tokens if token < _NUM_BYTES).decode("utf-8", errors="replace")


@dataclass(frozen=True)
class Characters:
    """The characters of a training text in sorted order; 0 is start and end, 1 any other character.

    >>> Characters.of(["abba"]).encode("abc"), Characters.of(["abba"]).decode([2, 3, 1, 0])
    ([2, 3, 1], 'ab\ufffd')
    """

    characters: str
    start_id: int = 0
    end_id: int = 0
    unknown_id: int = 1
    pad_id: int = 0

    @staticmethod
    def of(texts: Iterable[str]) -> "Characters":
        """The tokenizer for a training text."""
        return Characters("".join(sorted(set[str]().union(*texts))))

    @property
    def vocabulary_size(self) -> int:
        """The characters plus two special tokens."""
        return len(self.characters) + 2

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {character: index for index, character in enumerate(self.characters, start=2)}

    def encode(self, text: str) -> list[int]:
        """One token per character."""
        ids, unknown = self._ids, self.unknown_id
        return [ids.get(character, unknown) for character in text]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text, with the replacement character for unknown tokens, without the end token."""
        return "".join(
            "\ufffd" if token == self.unknown_id else self.characters[token - 2]
            for token in tokens
            if token != self.end_id
        )


def tokenizer_of(name: str, training_texts: Iterable[str]) -> Tokenizer:
    """`byte`, `character` of the training texts, or the Hugging Face tokenizer in the folder of that name.

    Raises:
        DataError: there is no such tokenizer.
    """
    return Characters.of(training_texts) if name == CHARACTER else _named_tokenizer(name)


def _frame(settings: Mapping[str, Any]) -> Frame:
    if settings["tokenizer"] == CHARACTER:
        raise ConfigError(
            "data.tokenizer=character is made of the characters of the data, which would give every site another "
            "vocabulary; use data.tokenizer=byte, or a folder with a tokenizer that lies at every site."
        )
    shape = (settings["block_length"],) if "block_length" in settings else ()
    if settings.get("packing"):
        shape = (*shape, 2)  # with positions
    return Frame(input_shape=shape, text=_named_tokenizer(settings["tokenizer"]))


# Declares that a reader has a setting `tokenizer`, so that sites can check it before they read any text.
reads_text = declares(frame=_frame)


def _named_tokenizer(name: str) -> Tokenizer:
    if name == BYTE:
        return Bytes()
    from fedsign.data.text.hugging_face import hugging_face  # its library takes seconds to import

    return hugging_face(name)
