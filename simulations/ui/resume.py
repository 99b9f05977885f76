"""Resume a run or a comparison: say first what is run and imported, then start it in a process of its own."""

import shlex
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsign.errors import ResultsError
from fedsign.storage.digests import digest_of
from simulations.ui.files import Folder, Record, damaged, text_of

_ADDRESSES = frozenset({"address", "listen"})  # settings that hold host:port


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What resuming would do.  `digest` changes with anything that the reader has agreed to."""

    arguments: tuple[str, ...]
    modules: tuple[str, ...]  # module:Name -> code that would be imported
    where: Path  # from where modules are imported
    digest: str

    @property
    def command(self) -> str:
        """The command, to be typed in a shell."""
        return shlex.join(["fedsign", *self.arguments])


def plan_of(folder: Folder, comparison: Folder | None) -> Plan:
    """What resuming a run would do, or its comparison, if it is a cell of one.

    Raises:
        ResultsError: the configuration cannot be read.
    """
    config, text = folder.config()
    if comparison is None:
        arguments = ("run", "--resume", _argument(folder.path))
        modules = _modules(config)
    else:
        plan = comparison.json("comparison.json")
        arguments = ("compare", "--resume", _argument(comparison.path))
        text += repr(plan)
        modules = _modules([config, plan, _parsed(plan.get("config_toml", ""))])
    named = tuple(sorted({*modules}))
    return Plan(
        arguments=arguments,
        modules=named,
        where=Path.cwd(),
        digest=digest_of(repr((text, arguments)).encode("utf-8", "replace")),
    )


def start(plan: Plan, log: Path) -> "subprocess.Popen[bytes]":
    """Start it, with its output in a file; it goes on when the server ends.

    Raises:
        ResultsError: it cannot be started.
    """
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                # -P: a file in this folder must not stand in for a module of Python's or of FedSign's
                [sys.executable, "-P", "-m", "simulations.cli", *plan.arguments],
                cwd=plan.where,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        raise ResultsError(f"'{plan.command}' could not be started ({error}).") from error
    threading.Thread(target=process.wait, daemon=True).start()  # or it would stay as a zombie
    return process


def outcome_of(process: "subprocess.Popen[bytes]", log: Path) -> str:
    """Why a process failed, by the last line of its output; empty if it runs or has ended well."""
    if process.returncode in (None, 0):
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.exists() else []
    return text_of(lines[-1] if lines else f"it ended with exit code {process.returncode}", 600)


def _argument(path: Path) -> str:
    """A path as an argument, relative if it lies below; none begins like an option."""
    here = Path.cwd()
    return f"./{path.relative_to(here)}" if path.is_relative_to(here) else str(path)


def _modules(value: Any, key: str = "") -> Iterator[str]:
    """Every text of a configuration that names an object of a module, or might: what is taken for one is imported."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _modules(each, name)
    elif isinstance(value, list):
        for each in value:
            yield from _modules(each, key)
    elif isinstance(value, str) and key not in _ADDRESSES:
        module, _, name = value.partition(":")
        if module and name and "/" not in module and "\n" not in value:
            yield text_of(value)


def _parsed(text: Any) -> Record:
    try:
        return tomllib.loads(str(text))
    except (ValueError, RecursionError) as error:
        raise damaged("comparison.json", error) from error
