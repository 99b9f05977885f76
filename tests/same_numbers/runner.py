"""Run configurations with the packages of one commit: `python -P runner.py OUT FILE.toml...`.

PYTHONPATH names the commit's checkout. This is a script outside the packages, since that commit may lack it.  It
uses only public interfaces: `simulations.run` and the command line.  Each configuration is run in its own fork,
which saves imports and isolates it: its numbers are the same whether it is run alone or among others.

A configuration holds changes to `_base.toml`, which changes the default experiment.  Its table
`execution` says how to run it: `stop_after` = the round after which the run is stopped and resumed; `commands` =
commands to run after it, or with `run = false` instead of it, whose standard output is JSON.
"""

import atexit
import json
import os
import re
import shutil
import signal
import sys
import time
import tomllib
import traceback
from collections.abc import Mapping
from contextlib import redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGES = ("fedsign", "strategies", "clients", "simulations")
LIMIT_S = 600  # for a configuration
FORMER = "normalize=normalise parameterization=parameterisation analyze=analyse"  # keys before fedsign.former_names
HERE = Path(__file__).parent


def main(out: Path, files: list[Path]) -> None:
    """Run all; prints `{"name", "ok", "seconds"}` for each, what went wrong is in `OUT/NAME/log.txt`."""
    _check_origin(Path(os.environ["PYTHONPATH"]))
    import sklearn.datasets  # noqa: F401 - once, and not in each fork

    from simulations import run  # noqa: F401

    for file in files:
        folder = out / file.stem
        folder.mkdir(parents=True)
        started = time.perf_counter()
        child = os.fork()
        if child == 0:
            failed = _guarded(file, folder)
            atexit._run_exitfuncs()  # Ray ends its processes
            os._exit(failed)  # the interpreter's own end would walk over all memory shared with the parent: a second
        _, status = os.waitpid(child, 0)
        seconds = round(time.perf_counter() - started, 1)
        print(json.dumps({"name": file.stem, "ok": status == 0, "seconds": seconds}), flush=True)


def _check_origin(code: Path) -> None:
    for package in PACKAGES:
        found = Path(str(import_module(package).__file__))
        if not found.is_relative_to(code):
            raise SystemExit(f"{package} was imported from {found}; expected a folder below {code}.")


def _guarded(file: Path, folder: Path) -> int:
    """Run one in its own folder, what it prints in a file."""
    signal.alarm(LIMIT_S)
    os.chdir(folder)
    log = os.open("log.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        _run(file)
    except BaseException:  # noqa: BLE001 - also SystemExit
        traceback.print_exc()
        return 1
    return 0


def _run(file: Path) -> None:
    from simulations import run

    shutil.copy(HERE / "own_parts.py", ".")  # found in the current folder, like a user's file
    sys.path.append(str(Path.cwd()))
    import_module("own_parts").write_inputs(Path("inputs"))
    tree = merged(_read(file.with_name("_base.toml")), _read(file))
    execution = tree.pop("execution", {})
    if execution.get("run", True):
        stop = execution.get("stop_after", tree["rounds"])
        done = run({**tree, "rounds": stop})
        if stop != tree["rounds"]:
            done = run({"rounds": tree["rounds"]}, resume=done.path)
        Path(done.path).rename("run")
    for number, arguments in enumerate(execution.get("commands", [])):
        with Path(f"command-{number}.json").open("w") as answer, redirect_stdout(answer):
            _command(arguments)


def _command(arguments: list[str]) -> None:
    sys.argv = ["fedsign", *arguments]
    try:
        import_module("simulations.cli").main()
    except SystemExit as end:
        if end.code:
            raise


def merged(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A tree with changes, at any depth; a table with another `name` takes the place of the former one."""
    result = dict(tree)
    for key, value in changes.items():
        before = result.get(key)
        both = isinstance(value, dict) and isinstance(before, dict)
        is_other = both and "name" in value and value["name"] != before.get("name")
        result[key] = merged(before, value) if both and not is_other else value
    return result


def _read(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    if find_spec("fedsign.data.partition.prefix") is None:
        text = re.sub(r"\b(dirichlet|quantity)_prefix\b", r"\1", text)  # the only cut that there was
    if find_spec("fedsign.former_names") is None:
        for key, former in (pair.split("=") for pair in FORMER.split()):
            text = re.sub(rf"\b{key}\b", former, text)
    return tomllib.loads(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
