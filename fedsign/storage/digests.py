"""Digests of what is read back, so that damage is found before it counts ([why](docs/decisions/0023-digests.md)).

A text is *sealed* when its first line holds the digest of all of it; the lines of a .jsonl file are *chained*: the digest of each
covers the one before.  What an older version wrote has neither, and is read as it is.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from xxhash import xxh3_128

BLANK = "0" * 32  # stands where the digest will
# The text before the digest, 10 characters in TOML and 14 in JSON, may be damaged as well, or else a digit of the digest.
_SEAL = re.compile(r'\A(?:(?:# digest: |\{\n "digest": ")(?=.{32})|(?:.{10}|.{14})(?=[0-9a-f]{32}))', re.DOTALL)
_LINK = re.compile(r', "chain": "(.{16})"\}\Z')


def digest_of(*parts: Any) -> str:
    """XXH3, 128 bits, as text."""
    found = xxh3_128()
    for part in parts:
        found.update(part)
    return found.hexdigest()


def sealed(text: str) -> str:
    """A text with its digest in the place of `BLANK`, in its first line."""
    return text.replace(BLANK, digest_of(text.encode()), 1)


def check_seal(text: str) -> bool:
    """Whether the text is sealed.

    Raises:
        ValueError: it is, and is not as it was written.
    """
    found = _SEAL.match(text)
    if found is None:
        return False
    start, end = found.end(), found.end() + len(BLANK)
    if digest_of((text[:start] + BLANK + text[end:]).encode()) != text[start:end]:
        raise ValueError("its digest does not match")
    return True


def sealed_json(content: Mapping[str, Any]) -> str:
    """A JSON object as sealed text."""
    return sealed(json.dumps({"digest": BLANK, **content}, indent=1) + "\n")


def read_json(text: str) -> tuple[dict[str, Any], bool]:
    """The object of a JSON text, and whether it was sealed.

    Raises:
        ValueError: it is damaged.
    """
    is_sealed = check_seal(text)
    content: dict[str, Any] = json.loads(text)
    if is_sealed:
        del content["digest"]
    return content, is_sealed


def chained(line: str, before: str) -> str:
    """A line, a JSON object, that follows one with the chain `before`."""
    return f'{line[:-1]}, "chain": "{digest_of(before.encode(), line.encode())[:16]}"}}'


def chain_of(line: str) -> str:
    """The chain of a line; empty where it has none."""
    found = _LINK.search(line)
    return found[1] if found else ""


def unchained(lines: list[str]) -> Iterator[str]:
    """The lines as they were before they were chained.

    Raises:
        ValueError: one is not as it was written, or does not follow the one before.
    """
    before = ""
    for number, line in enumerate(lines, 1):
        chain = chain_of(line)
        plain = _LINK.sub("}", line)
        if (chain or before) and line != chained(plain, before):
            raise ValueError(f"line {number}: its digest does not match")
        before = chain
        yield plain
