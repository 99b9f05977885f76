"""Instruction data that every machine has: docstrings of Python's standard library.

    {"instruction": "What does textwrap.shorten do?", "input": "",
     "output": "Collapse and truncate the given text.", "silo": "texts"}

Each of four silos has a part of the library.  An answer is the first sentence of a docstring. Each answer occurs in one
line only, so that no test answer is in the training data. Every tenth line of a silo is a test line.  The data differ
slightly between Python versions.
"""

import importlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SILOS = {
    "texts": (
        "ast codecs configparser csv difflib email.message email.utils html html.parser inspect json locale re shlex "
        "string textwrap tokenize unicodedata urllib.parse xml.dom.minidom xml.etree.ElementTree xml.sax.saxutils"
    ),
    "numbers": (
        "array bisect calendar cmath collections datetime decimal enum fractions functools heapq itertools math "
        "numbers operator random statistics struct time zoneinfo"
    ),
    "files": (
        "bz2 filecmp fileinput fnmatch glob gzip io lzma mimetypes os os.path pathlib pickle shelve shutil sqlite3 "
        "stat tarfile tempfile zipfile zlib"
    ),
    "processes": (
        "argparse asyncio concurrent.futures contextlib ftplib http.client http.cookiejar http.server imaplib "
        "logging logging.handlers multiprocessing.managers multiprocessing.pool queue sched selectors signal smtplib "
        "socket socketserver ssl subprocess threading traceback unittest unittest.mock urllib.request weakref"
    ),
}
_TYPES = {"texts": (str, bytes), "numbers": (int, float, complex, list, dict, set, tuple)}  # built-in
_SHORTEST, _LONGEST, _TEST_EVERY = 20, 160, 10


def write(folder: Path) -> None:
    """Write train.jsonl, test.jsonl, and each silo's training lines as SILO.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    of_silo = lines()
    train = {silo: [line for at, line in enumerate(all_) if at % _TEST_EVERY] for silo, all_ in of_silo.items()}
    test = [line for all_ in of_silo.values() for line in all_[::_TEST_EVERY]]
    files = {**train, "train": [line for part in train.values() for line in part], "test": test}
    for name, part in files.items():
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in part)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def lines() -> dict[str, list[dict[str, str]]]:
    """Return the lines of each silo, in the order of names."""
    seen: set[str] = set()
    found: dict[str, list[dict[str, str]]] = {}
    for silo in SILOS:
        found[silo] = []
        # by name alone: functions cannot be compared
        for name, thing in sorted(_things(silo), key=lambda pair: pair[0]):
            answer = _first_sentence(thing)
            if answer is not None and answer.lower() not in seen:
                seen.add(answer.lower())
                found[silo].append(
                    {"instruction": f"What does {name} do?", "input": "", "output": answer, "silo": silo}
                )
    return found


def _things(silo: str) -> Iterator[tuple[str, Any]]:
    """Return functions, classes and methods by qualified name."""
    for kind in _TYPES.get(silo, ()):
        yield from _methods(kind.__name__, kind)
    for name in SILOS[silo].split():
        try:
            module = importlib.import_module(name)
        except ImportError:  # some Python builds lack it
            continue
        for key, thing in vars(module).items():
            if key.startswith("_") or not _is_own(thing, name):
                continue
            if inspect.isclass(thing) or inspect.isroutine(thing):
                yield f"{name}.{key}", thing
            if inspect.isclass(thing):
                yield from _methods(f"{name}.{key}", thing)


def _is_own(thing: Any, module: str) -> bool:
    """Whether a module defines a thing. C code names a module with an underscore, or the system's."""
    origin = str(getattr(thing, "__module__", None) or module).partition(".")[0].lstrip("_")
    return origin in (module.partition(".")[0], "posix", "posixpath", "genericpath", "nt", "ntpath")


def _methods(name: str, kind: type) -> Iterator[tuple[str, Any]]:
    for key, thing in vars(kind).items():
        if not key.startswith("_") and (
            inspect.isroutine(thing) or isinstance(thing, property | classmethod | staticmethod)
        ):
            yield f"{name}.{key}", thing


def _first_sentence(thing: Any) -> str | None:
    """Return the text before the first full stop of a thing's own docstring, if it is a sentence."""
    doc = getattr(thing, "__doc__", None)
    if not isinstance(doc, str) or not doc.strip():
        return None
    first = " ".join(inspect.cleandoc(doc).split("\n\n")[0].split())
    sentence = first.partition(". ")[0].rstrip(".:") + "."
    # C functions begin their docstring with a signature
    is_signature = any(mark in sentence for mark in ("->", " = ")) or "(" in sentence.split(" ")[0]
    is_cut = sentence.endswith(("e.g.", "i.e.", " vs."))
    return sentence if _SHORTEST <= len(sentence) <= _LONGEST and not is_signature and not is_cut else None
