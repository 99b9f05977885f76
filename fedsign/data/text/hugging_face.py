"""A Hugging Face tokenizer from a local folder (extra `llm`)."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from fedsign.data.text.libraries import transformers
from fedsign.errors import DataError

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, and what else a template reads: tools (JSON schemas) and settings such as `enable_thinking`."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


class HuggingFace:
    """A tokenizer from a folder; special tokens in a text, such as `</s>`, are parsed as such."""

    def __init__(self, folder: str) -> None:
        """Load the tokenizer, without network access and without running code from the folder.

        Raises:
            DataError: there is no tokenizer, it cannot be read, or it has no end token.
            ConfigError: `transformers` is not installed.
        """
        path = Path(folder).expanduser()
        if not any((path / name).is_file() for name in _FILES):
            raise DataError(
                f"data.tokenizer={folder} was given, but there is no tokenizer (tokenizer.json) in "
                f"{path.absolute()}; expected byte, character, or a folder as Hugging Face's save_pretrained "
                "writes it."
            )
        library = transformers(f"data.tokenizer={folder}")
        try:
            tokenizer = library.AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # tokenizers raise errors of any type for malformed files
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise DataError(f"the tokenizer in {path.absolute()} cannot be read ({reason[:200]}).") from error
        if tokenizer.eos_token_id is None:
            raise DataError(
                f"the tokenizer in {path.absolute()} has no end token (eos_token), which says where a text ends; add "
                "one to its tokenizer_config.json."
            )
        tokenizer.model_max_length = int(1e30)  # no warning about long texts, which are cut into blocks
        self._tokenizer: Any = tokenizer
        self._folder = folder
        self.has_chat_template = bool(tokenizer.chat_template)
        self.vocabulary_size: int = len(tokenizer)  # unlike vocab_size, with added tokens
        self.end: str = tokenizer.eos_token
        self.end_id: int = tokenizer.eos_token_id
        self.start_id: int = self.end_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        self.pad_id: int = self.end_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    @cached_property
    def fingerprint(self) -> str:
        """A hash of vocabulary, special tokens and chat template."""
        parts = [
            sorted(self._tokenizer.get_vocab().items()),  # the dict's own order varies
            [self.start_id, self.end_id, self.pad_id],
            self._tokenizer.chat_template,
        ]
        return sha256(json.dumps(parts).encode("utf-8")).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The text's tokens, without special tokens of the tokenizer."""
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def decode(self, tokens: Iterable[int]) -> str:
        """The text, without special tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def encode_with_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The text's tokens, and the first and last character (exclusive) of each.

        Raises:
            DataError: the tokenizer does not know the characters of its tokens.
        """
        if not self._tokenizer.is_fast:
            raise DataError(
                f"is a conversation, but the tokenizer in {self._folder} does not tell which characters a token stands "
                "for; save it as a fast tokenizer (tokenizer.json)."
            )
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(encoded["input_ids"]), [(start, stop) for start, stop in encoded["offset_mapping"]]

    def marks_answers(self, conversation: Conversation) -> bool:
        """Whether the chat template marks answers by `{% generation %}`."""
        template = self._tokenizer.get_chat_template(tools=conversation.tools)
        return re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None

    def chat(self, conversation: Conversation, *, asks: bool) -> str:
        """A conversation as text by the chat template; `asks` adds the header of the next answer.

        Raises:
            DataError: the template rejects the conversation.
        """
        return str(self._templated(conversation, tokenize=False, add_generation_prompt=asks))

    def chat_tokens(self, conversation: Conversation) -> tuple[list[int], list[int]]:
        """A conversation's tokens by a chat template that marks answers, and a mask of the answers.

        Raises:
            DataError: the template rejects the conversation.
        """
        made = self._templated(conversation, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return list(made["input_ids"]), list(made["assistant_masks"])

    def _templated(self, conversation: Conversation, **settings: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                [dict(each) for each in conversation.messages],
                tools=conversation.tools,
                **conversation.settings,
                **settings,
            )
        except Exception as error:  # the template is a program by the tokenizer's authors
            raise DataError(
                f"the chat template in {self._folder} refuses the conversation ({error}); correct the conversation, "
                "or use data.tokenizer=byte."
            ) from error


hugging_face = lru_cache(maxsize=2)(HuggingFace)  # loading takes seconds, and sites share a tokenizer
