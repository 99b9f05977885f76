"""A Hugging Face tokenizer from a local folder (extra `llm`)."""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from fedsign.data.text.libraries import transformers
from fedsign.errors import DataError

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


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
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def chat(self, messages: Sequence[Mapping[str, str]], *, asks: bool) -> str:
        """A conversation formatted by the chat template; `asks` adds the header of the next answer.

        Raises:
            DataError: the template rejects the conversation.
        """
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(each) for each in messages], tokenize=False, add_generation_prompt=asks
            )
        except Exception as error:  # the template is a program by the tokenizer's authors
            raise DataError(
                f"the chat template in {self._folder} refuses the conversation ({error}); correct the conversation, "
                "or use data.tokenizer=byte."
            ) from error
        return text


hugging_face = lru_cache(maxsize=2)(HuggingFace)  # loading takes seconds, and sites share a tokenizer
