"""Digests of files that are read back, to detect damage early ([why](docs/decisions/0023-digests.md)).

A text is *sealed* if its first line holds a digest of the whole text.  The lines of a .jsonl file are *chained*: each
line's digest covers the previous one.  Files of older versions have neither and are read unchecked.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from xxhash import xxh3_128

KEY = "digest"  # in the metadata of a .safetensors file
BLANK = "0" * 32  # placeholder of the digest
# The text before the digest, 10 characters in TOML and 14 in JSON, may be damaged as well, or else a digit of the
# digest.
_SEAL = re.compile(r'\A(?:(?:# digest: |\{\n "digest": ")(?=.{32})|(?:.{10}|.{14})(?=[0-9a-f]{32}))', re.DOTALL)
_LINK = re.compile(r', "chain": "(.{16})"\}\Z')
_LINK_LENGTH = len(', "chain": ""}') + 16


def digest_of(*parts: Any) -> str:
    """The 128-bit XXH3 digest in hex."""
    hasher = xxh3_128()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


def sealed(text: str) -> str:
    """Replace `BLANK` in a text by the text's digest."""
    return text.replace(BLANK, digest_of(text.encode()), 1)  # once: a value in the text may look like the placeholder


def check_seal(text: str) -> bool:
    """Whether a text is sealed.

    Raises:
        ValueError: it is sealed, but was changed.
    """
    match = _SEAL.match(text)
    if match is None:
        return False
    start, end = match.end(), match.end() + len(BLANK)
    if digest_of((text[:start] + BLANK + text[end:]).encode()) != text[start:end]:
        raise ValueError("its digest does not match")
    return True


def sealed_json(content: Mapping[str, Any]) -> str:
    """Serialize a JSON object as sealed text."""
    return sealed(json.dumps({"digest": BLANK, **content}, indent=1) + "\n")


def read_json(text: str) -> tuple[dict[str, Any], bool]:
    """Parse a JSON object; also returns whether it was sealed.

    Raises:
        ValueError: it is damaged.
    """
    is_sealed = check_seal(text)
    content: dict[str, Any] = json.loads(text)
    if is_sealed:
        del content["digest"]
    return content, is_sealed


def chained(line: str, before: str) -> str:
    """Add a chain to a line, a JSON object, that follows a line with the chain `before`."""
    return f'{line[:-1]}, "chain": "{_chain(line, before)}"}}'


def chain_of(line: str) -> str:
    """The chain of a line; empty if it has none."""
    link = _LINK.search(line)
    return link[1] if link else ""


def unchained(lines: Iterable[str], before: str = "") -> Iterator[str]:
    """Verify chained lines that follow a line with the chain `before`, and yield them without their chains.

    Raises:
        ValueError: a line was changed, or does not follow the previous one.
    """
    for number, line in enumerate(lines, 1):
        link = _LINK.search(line, max(0, len(line) - _LINK_LENGTH))
        plain, chain = (line[: link.start()] + "}", link[1]) if link else (line, "")
        # only lines before the first chained one may lack a chain: an older version wrote them
        if (chain or before) and chain != _chain(plain, before):
            raise ValueError(f"line {number}: its digest does not match")
        before = chain
        yield plain


def _chain(line: str, before: str) -> str:
    return digest_of(before.encode(), line.encode())[:16]  # 64 bits detect accidents
