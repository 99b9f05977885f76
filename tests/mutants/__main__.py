"""Plant one mutant after another, report which test kills it, and fail if too many survive.

python -m tests.mutants                            # all faults, 100 operator mutants, the fast tests
python -m tests.mutants --only faults --pattern privacy --complete
"""

import argparse
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.mutants.mutants import Mutant, faults, operator_mutants

ROOT = Path(__file__).parents[2]
FAST: list[str] = []
COMPLETE = ["--complete"]
SHARE = 0.8  # of the operator mutants that have to be killed
_LIBRARIES = (
    "torch", "numpy", "scipy.stats", "pandas", "flwr.app", "flwr.serverapp", "flwr.clientapp", "pydantic", "hypothesis",
    "matplotlib.pyplot", "safetensors.torch", "typer", "sklearn.metrics", "cryptography.x509", "jinja2", "rich.table",
)  # fmt: skip
_state: dict[str, Any] = {}  # of a worker


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status."""
    asked = _parsed(arguments)
    chosen = _mutants(asked)
    os.environ |= {"OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0"}
    from tests.mutants.recording import recording_of
    from tests.mutants.trial import Copy

    options = COMPLETE if asked.complete else FAST
    with tempfile.TemporaryDirectory(prefix="fedsign-mutants-") as folder:
        copies = [Copy(ROOT, Path(folder) / f"copy-{index}") for index in range(asked.workers)]
        recording = recording_of(copies[0].root, ROOT / ".mutants", options, workers=asked.workers, reuse=asked.reuse)
        for library in _LIBRARIES:
            importlib.import_module(library)
        context = get_context("fork")
        free = context.SimpleQueue()
        for copy in copies:
            free.put(copy)
        found: dict[Mutant, Any] = {}
        with ProcessPoolExecutor(
            asked.workers, mp_context=context, initializer=_begin, initargs=(free, recording)
        ) as pool:
            trials = {pool.submit(_try_out, mutant, options, asked.budget): mutant for mutant in chosen}
            for trial in as_completed(trials):
                mutant = trials[trial]
                found[mutant] = trial.result()
                print(f"{len(found)}/{len(chosen)} {_row(mutant, found[mutant])}", flush=True)
            killers = sorted({each.test for each in found.values() if each.test in recording.durations})
            unsound = pool.submit(_failing, killers, options).result() if killers else []
    return _report(chosen, found, unsound, asked)


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--only", choices=["faults", "operators"])
    parser.add_argument("--pattern", default="", help="a part of a capability, a sentence or a path")
    parser.add_argument("--complete", action="store_true", help="run the complete suite instead of the fast selection")
    parser.add_argument("--reuse", action="store_true", help="the newest recording, even if files have changed since")
    parser.add_argument("--number", type=int, default=100, help="of operator mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--budget", type=float, default=180.0, help="seconds of tests for a mutant")
    parser.add_argument("--out", type=Path, default=ROOT / ".mutants" / "results.json")
    return parser.parse_args(arguments)


def _mutants(asked: argparse.Namespace) -> list[Mutant]:
    seeded = [] if asked.only == "operators" else faults(ROOT)
    drawn = [] if asked.only == "faults" else operator_mutants(ROOT, number=asked.number, seed=asked.seed)
    return [each for each in [*seeded, *drawn] if asked.pattern in f"{each.capability} {each.sentence} {each.path}"]


def _begin(free: Any, recording: Any) -> None:
    _state.update(copy=free.get(), recording=recording)


def _try_out(mutant: Mutant, options: Sequence[str], budget_s: float) -> Any:
    recording = _state["recording"]
    tests = {test: recording.durations[test] for test in recording.tests_for(mutant)}
    return _state["copy"].try_out(mutant, tests, options=options, budget_s=budget_s)


def _failing(tests: Sequence[str], options: Sequence[str]) -> list[Any]:
    """The tests that fail without a mutant, too: their verdicts count for nothing."""
    durations = _state["recording"].durations
    found: list[Any] = _state["copy"].run({test: durations[test] for test in tests}, options=options, budget_s=3600.0)[
        "failed"
    ]
    return found


def _row(mutant: Mutant, outcome: Any) -> str:
    said = outcome.test or f"{outcome.num_run} of {outcome.num_tests} tests run"
    return (
        f"{mutant.capability} | {mutant.path}: {mutant.sentence} | {outcome.status}: {said} | {outcome.seconds:.0f} s"
    )


def _report(
    chosen: Sequence[Mutant], found: dict[Mutant, Any], unsound: Sequence[Any], asked: argparse.Namespace
) -> int:
    rows = [{**asdict(mutant), **asdict(found[mutant])} for mutant in chosen]
    for row in rows:
        row |= {"lines": sorted(row["lines"]), "symbols": sorted(row["symbols"])}
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(
        json.dumps({"complete": asked.complete, "seed": asked.seed, "mutants": rows}, indent=1) + "\n", encoding="utf-8"
    )
    print("\ncapability | mutant | killed by | seconds")
    for mutant in chosen:
        print(_row(mutant, found[mutant]))
    is_enough = not unsound
    for name, is_operator, share in (("faults", False, 1.0), ("operator mutants of the core", True, SHARE)):
        outcomes = [found[mutant].status != "survived" for mutant in chosen if mutant.is_operator is is_operator]
        if outcomes:
            print(
                f"{name}: {sum(outcomes)} of {len(outcomes)} killed ({sum(outcomes) / len(outcomes):.0%}, at least "
                f"{share:.0%} are expected)"
            )
            is_enough &= sum(outcomes) >= share * len(outcomes)
    for test, why in unsound:
        print(f"{test} fails without a mutant as well: {why}")
    return 0 if is_enough else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
