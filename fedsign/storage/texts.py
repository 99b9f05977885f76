"""Text that users write: UTF-8, or the encoding that a byte order mark declares, as editors on Windows save it."""

import codecs
import io
from pathlib import Path

_MARKS = {  # UTF-32 first: its mark begins with UTF-16's
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def encoding_of(start: bytes) -> str:
    """The encoding of text by its first bytes; decoding with it drops the mark.

    >>> encoding_of("a".encode("utf-16")), encoding_of(b"a")
    ('utf-16', 'utf-8-sig')
    """
    return next((encoding for mark, encoding in _MARKS.items() if start.startswith(mark)), "utf-8-sig")


def read_marked(path: Path) -> str:
    r"""The text of a file, with \n for line ends of any kind.

    Raises:
        OSError: it cannot be read.
        UnicodeError: it is not text in its encoding.
    """
    content = path.read_bytes()  # once, since a pipe cannot be read again
    text = io.TextIOWrapper(io.BytesIO(content), encoding=encoding_of(content)).read()
    if "\0" in text:
        raise UnicodeError("it has zero bytes, as UTF-16 without a byte order mark has")
    return text
