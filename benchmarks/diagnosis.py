"""False alarms of the judge: its findings on the runs of the recipes, which are none by design.

python -m benchmarks.diagnosis [--seconds 300] [RECIPE ...]

Runs the quick check of each recipe in this process, for `--seconds` at most, and counts (rule, run) pairs and findings.
Recipes without runs (networks trained by themselves), and those whose data are not on this machine, count nothing.
Results are merged into results/diagnosis.json.  The alarms on seeded defects are in tests/diagnosis/test_judge.py.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fedsign.config import from_toml
from fedsign.diagnosis.run_rules import RULES
from fedsign.errors import FedSignError
from fedsign.storage.results import Record, RunFolder
from simulations import api
from simulations.recipes import table

RESULTS = Path(__file__).parent / "results" / "diagnosis.json"


class Late(BaseException):
    """The time of a recipe is over; a BaseException, so that the run in progress stops."""


def main() -> None:
    """Measure the given recipes, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="*", help="names; by default all")
    parser.add_argument("--seconds", type=int, default=300, help="limit for each recipe")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = json.loads(RESULTS.read_text(encoding="utf-8"))["recipes"] if RESULTS.exists() else {}
    known = table.all_recipes()  # imports their modules, which are patched below
    for name in given.recipes or known:
        runs = runs_of(name, seconds=given.seconds)
        if runs:
            found[name] = summary(runs)
        print(f"{name}: {found.get(name, 'no runs')}", flush=True)
        RESULTS.write_text(json.dumps(report(found), indent=1) + "\n", encoding="utf-8")


def runs_of(name: str, *, seconds: int) -> list[tuple[RunFolder, list[Record], int]]:
    """The runs of a recipe that ended in time: folder, findings of the judge, rounds."""
    runs: list[tuple[RunFolder, list[Record], int]] = []

    def collect(folder: RunFolder) -> None:
        # at once: recipes delete their runs
        findings = [each for each in folder.records("findings.jsonl") if each["source"] == "run"]
        runs.append((folder, [{**each, **what(folder)} for each in findings], len(folder.rounds())))

    with patched(collect), limited(seconds):
        try:
            table.get(name).check(quick=True)
        except (Late, FedSignError) as error:
            print(f"{name}: {type(error).__name__} {error}", file=sys.stderr)
    return runs


def what(folder: RunFolder) -> Record:
    """Strategy and seed of a run."""
    config = from_toml(folder.config_toml)
    return {"strategy": config.strategy.name, "seed": config.seed}


def summary(runs: list[tuple[RunFolder, list[Record], int]]) -> Record:
    """The counts of a recipe."""
    return {
        "runs": len(runs),
        "rounds": sum(rounds for *_, rounds in runs),
        "triples": len(runs) * len(RULES),
        "findings": [finding for _, findings, _ in runs for finding in findings],
    }


def report(found: Mapping[str, Record]) -> Record:
    """The counts of all recipes."""
    triples, findings = (
        sum(each["triples"] for each in found.values()),
        [len(each["findings"]) for each in found.values()],
    )
    runs = sum(each["runs"] for each in found.values())
    share = sum(findings) / triples if triples else None
    rules = [rule.name for rule in RULES]
    return {
        "runs": runs,
        "triples": triples,
        "false_alarms": sum(findings),
        "share": share,
        "rules": rules,
        "recipes": dict(found),
    }


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise Late after some seconds."""

    def late(*_: object) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def patched(collect: Callable[[RunFolder], None]) -> Iterator[None]:
    """Recipes run one after another in this process, and each run is collected when it ends."""
    execute = api._execute

    def executed(workload: Any, engine: Any, folder: RunFolder, callbacks: Any) -> None:
        try:
            execute(workload, engine, folder, callbacks)
        finally:
            collect(folder)

    def serial(jobs: Mapping[Hashable, Callable[[], Any]]) -> dict[Hashable, Any]:
        return {key: job() for key, job in jobs.items()}

    def comparing(compare: Callable[..., Any]) -> Callable[..., Any]:
        def compared(*args: Any, **options: Any) -> Any:
            done = compare(*args, **{**options, "workers": 1})
            for cell in done.plan.cells:
                if (folder := done.run_of(cell)) is not None:
                    collect(folder)
            return done

        return compared

    changed: list[tuple[Any, str, Any]] = [(api, "_execute", executed)]
    for module in [module for name, module in sys.modules.items() if name.startswith("simulations.recipes")]:
        for name, replacement in (("on_all_cores", serial), ("compare", None)):
            if callable(own := getattr(module, name, None)):
                changed.append((module, name, replacement or comparing(own)))
    originals = [(module, name, getattr(module, name)) for module, name, _ in changed]
    try:
        for module, name, replacement in changed:
            setattr(module, name, replacement)
        yield
    finally:
        for module, name, original in originals:
            setattr(module, name, original)


if __name__ == "__main__":
    began = time.monotonic()
    main()
    print(f"{time.monotonic() - began:.0f} s")
