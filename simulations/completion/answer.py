"""The answer to a shell that completes a command: candidates from table.json, and the runs in this folder.

table.json      generated from the command line and the settings, by `python -m tests.contract.test_completion --write`:
                commands    path -> help, options, arguments, commands below
                keys        a setting's path -> its values, if they are names, and what it is
                components  where one is named -> name -> its settings
                names       kind -> names -> what they are

The kind of a value is that of its metavar in the help: RUN, KEY=VALUE, STRATEGY. Imports only what is fast.
"""

import json
import os
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

Candidates = dict[str, str]  # what can stand there -> what it is
TABLE = os.path.join(os.path.dirname(__file__), "table.json")  # noqa: PTH118, PTH120  # pathlib takes 20 ms to import
_FOLDERS: dict[str, tuple[str, ...]] = {
    "RUN": ("runs",),
    "COMPARISON": ("comparisons",),
    "CONDENSATION": ("condensations",),
    "FOLDER": ("runs", "comparisons"),
}
_DEPTHS = {"runs": 2}  # runs/NAME/RUN


def answer(shell: str, arguments: Sequence[str]) -> str:
    """The candidates for the last word, one a line, with what they are after a tab where the shell shows it.

    Args:
        shell: bash gives the command line up to the cursor; zsh and fish give its words, without the first.
        arguments: what it gives.
    """
    words = _split(arguments[0] if arguments else "")[1:] if shell == "bash" else [*arguments]
    word = words[-1] if words else ""
    found = {each: text for each, text in candidates(words).items() if each.startswith(word)}
    if shell != "bash":
        return "".join(f"{each}\t{text}\n" if text else f"{each}\n" for each, text in found.items())
    # bash breaks words at = and :, and replaces the last piece only
    start = max(word.rfind(mark) for mark in "=:") + 1
    return "".join(f"{each[start:]}\n".replace(" ", "\\ ") for each in found)


def candidates(words: Sequence[str]) -> Candidates:
    """What can stand in place of the last word."""
    with open(TABLE, encoding="utf-8") as file:  # noqa: PTH123
        table: dict[str, Any] = json.load(file)
    *before, word = words or [""]
    commands, path, num_arguments, kind = table["commands"], "", 0, None
    root = commands[""]
    for each in before:
        command = commands[path]
        options = {**root["options"], **command["options"]}
        if kind is not None:  # it is the value of an option
            kind = None
        elif each.startswith("-"):
            kind = None if "=" in each else options.get(each, {}).get("kind")
        elif f"{path} {each}".strip() in commands and not command["arguments"]:
            path = f"{path} {each}".strip()
        else:
            num_arguments += 1
    command = commands[path]
    options = {**root["options"], **command["options"]}
    if kind is not None:
        return _values(kind, word, table, before)
    if word.startswith("-"):
        name, equals, value = word.partition("=")
        if equals and (kind := options.get(name, {}).get("kind")):
            return {f"{name}={each}": text for each, text in _values(kind, value, table, before).items()}
        return {name: option["help"] for name, option in options.items()}
    below = {name: commands[f"{path} {name}".strip()]["help"] for name in command["commands"]}
    arguments = command["arguments"]
    if num_arguments >= len(arguments) and not (arguments and arguments[-1].endswith("...")):
        return below
    kind = arguments[min(num_arguments, len(arguments) - 1)]
    return below | _values(kind, word, table, before)


def _values(kind: str, word: str, table: dict[str, Any], before: Sequence[str]) -> Candidates:
    """The values of an option or an argument."""
    if kind.startswith("KEY="):
        return _assignments(word, table, before)
    kind = kind.removesuffix("...").rstrip(",")
    names: dict[str, Candidates] = table["names"]
    first = kind.partition("|")[0].partition(",")[0]
    if first in _FOLDERS:
        return {path: "" for root in _FOLDERS[first] for path in _folders(root, _DEPTHS.get(root, 1))}
    if first == "NAME":  # of the kind before it
        return names.get(before[-1] if before else "", {})
    if first == "SETTING":
        return _segments(word, table["explained"])
    if "," in kind:
        done = word[: word.rfind(",") + 1]
        return {f"{done}{each}": text for each, text in names.get(first, {}).items()}
    return names.get(first, {})


def _assignments(word: str, table: dict[str, Any], before: Sequence[str]) -> Candidates:
    """KEY=VALUE, one segment of the key at a time, and then values, where they are names."""
    own, colon, rest = word.rpartition(":")
    if colon and own in table["names"]["STRATEGY"]:  # of one strategy, as `fedsign compare` takes it
        return {f"{own}:{each}": text for each, text in _assignments(rest, table, before).items()}
    key, equals, value = word.partition("=")
    chosen = dict(each.split("=", 1) for each in before if "=" in each)
    keys: dict[str, Any] = dict(table["keys"])
    for place, components in table["components"].items():
        of = components.get(chosen.get(f"{place}.name"))
        for settings in [of] if of is not None else components.values():
            keys |= {f"{place}.{name}": setting for name, setting in settings.items()}
    if equals:
        done = value[: value.rfind(",") + 1]
        return {f"{key}={done}{each}": text for each, text in keys.get(key, {}).get("values", {}).items()}
    return _segments(word, {f"{name}=": setting["help"] for name, setting in keys.items()})


def _segments(word: str, paths: Candidates) -> Candidates:
    """The next segment of dotted paths.

    >>> _segments("client.", {"client.lr=": "learning rate", "client.optimizer.name=": "", "rounds=": ""})
    {'client.lr=': 'learning rate', 'client.optimizer.': ''}
    """
    start = word.rfind(".") + 1
    found: Candidates = {}
    for path, text in paths.items():
        if path.startswith(word):
            end = path.find(".", start) + 1
            found.setdefault(path[:end] if end else path, "" if end else text)
    return found


def _folders(path: str, depth: int) -> Iterator[str]:
    try:
        with os.scandir(path) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except OSError:
        return
    for name in names:
        if depth == 1:
            yield f"{path}/{name}"
        else:
            yield from _folders(f"{path}/{name}", depth - 1)


def _split(line: str) -> list[str]:
    """Words as a shell splits them; the last one is empty after a space, and may lack its closing quote."""
    for closing in ("", "'", '"'):
        try:
            return shlex.split(line + closing) + [""] * (not closing and line[-1:].isspace())
        except ValueError:
            continue
    return line.split()
