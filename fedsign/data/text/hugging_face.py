"""A tokenizer of Hugging Face's from a local folder, as it lies beside a model's weights (extra `llm`)."""

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
    """A tokenizer of a folder; the text of a special token, such as `</s>`, is that token."""

    def __init__(self, folder: str) -> None:
        """Read it, without the network and without running code that lies in the folder.

        Raises:
            DataError: there is none, it cannot be read, or it has no end token.
            ConfigError: `transformers` is not installed.
        """
        path = Path(folder).expanduser()
        if not any((path / name).is_file() for name in _FILES):
            raise DataError(
                f"data.tokenizer={folder} was given, but there is no tokenizer (tokenizer.json) in "
                f"{path.absolute()}; expected is byte, character, or a folder as Hugging Face's save_pretrained "
                "writes it."
            )
        library = transformers(f"data.tokenizer={folder}")
        try:
            tokenizer = library.AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # whatever its code raises at a file
            what = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise DataError(f"the tokenizer in {path.absolute()} cannot be read ({what[:200]}).") from error
        if tokenizer.eos_token_id is None:
            raise DataError(
                f"the tokenizer in {path.absolute()} has no end token (eos_token), which says where a text ends; add "
                "one to its tokenizer_config.json."
            )
        tokenizer.model_max_length = int(1e30)  # long texts are cut into blocks here, and nobody needs to be warned
        self._tokenizer: Any = tokenizer
        self._folder = folder
        self.has_chat_template = bool(tokenizer.chat_template)  # which says how a conversation is written
        self.vocabulary_size: int = len(tokenizer)
        self.end_id: int = tokenizer.eos_token_id
        self.start_id: int = self.end_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        self.pad_id: int = self.end_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    @cached_property
    def fingerprint(self) -> str:
        """The same for tokenizers with the same tokens, special tokens and chat template, and different for others."""
        said = [
            sorted(self._tokenizer.get_vocab().items()),
            [self.start_id, self.end_id, self.pad_id],
            self._tokenizer.chat_template,
        ]
        return sha256(json.dumps(said).encode("utf-8")).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The text's tokens, without any that the tokenizer would add."""
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def decode(self, tokens: Iterable[int]) -> str:
        """The text, without special tokens."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def chat(self, messages: Sequence[Mapping[str, str]], *, asks: bool) -> str:
        """A conversation as text, by the tokenizer's template; `asks`: with the beginning of the answer to come.

        Raises:
            DataError: the template refuses it.
        """
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(each) for each in messages], tokenize=False, add_generation_prompt=asks
            )
        except Exception as error:  # the template is a program of the tokenizer's authors
            raise DataError(
                f"the chat template in {self._folder} refuses the conversation ({error}); correct the conversation, "
                "or use data.tokenizer=byte."
            ) from error
        return text


hugging_face = lru_cache(maxsize=2)(HuggingFace)  # kept, since reading it takes seconds and sites ask for the same one
