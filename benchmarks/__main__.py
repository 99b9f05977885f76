"""`make bench`, or: python -m benchmarks [--workloads w1] [--competitors cohort,pfl_1] [--repetitions 5] [--minutes 30]

Writes one result per workload to benchmarks/results/<device>/<workload>.json. `python -m benchmarks.docs` then writes
docs/benchmarks.md.
"""

import argparse
import datetime
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.competitors import BARE, COMPETITORS, Competitor, competitor_named
from benchmarks.environments import PeerError
from benchmarks.export import export
from benchmarks.machine import arithmetic, machine
from benchmarks.measure import Record, Result, measure_all, measure_once, summarized
from benchmarks.task import Task
from benchmarks.workloads import BenchmarkWorkload, all_workloads

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("FEDSIGN_BENCHMARKS_CACHE", Path.home() / ".cache" / "fedsign-benchmarks"))
_EXTRAS = tuple(  # benchmarks of FedSign alone; a deleted capability takes its own along
    name
    for name in (
        "startup",
        "population",
        "checkpoint",
        "doors",
        "soak",
        "aggregation",
        "analysis",
        "browsing",
        "engines",
        "large",
        "lisa",
        "memory",
        "hypergradients",
        "paro_network",
        "paro_prefetch",
        "sparse",
        "sparse_clients",
        "splits",
    )
    if find_spec(f"benchmarks.alone.{name}")
)
_PROFILED_S = 15.0  # of rounds whose time is attributed to packages


def main() -> None:
    """Parse the options, and run the benchmarks."""
    given = _arguments()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends competitors
    torch.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * given.minutes
    chosen = _chosen_workloads(given.workloads, given.devices)
    for name in _EXTRAS:
        if name in given.workloads:
            import_module(f"benchmarks.alone.{name}").measure(
                given.out / f"{name}.json", repetitions=max(given.repetitions, 3)
            )
    for number, (work, device) in enumerate(chosen):
        left = max(end - time.monotonic(), 0.0) / (len(chosen) - number)
        _measure(work, device, given, until=time.monotonic() + left)


def _measure(work: BenchmarkWorkload, device: str, given: argparse.Namespace, *, until: float) -> None:
    """Run a workload and write its result. Completed repetitions are kept if profiling is interrupted."""
    path = given.out / device / f"{work.name}.json"
    path.parent.mkdir(exist_ok=True)
    folder = export(work, given.cache)
    before = machine()
    competitors = _chosen_competitors(work, device, given.competitors)
    floor = arithmetic(Task(folder, torch.device(device)))

    def kept(records: list[Record]) -> Result:
        result = {
            "workload": work.name,
            "title": work.title,
            "about": work.about,
            "curve": None if work.curve is None else {"axis": work.curve[0], "at": work.curve[1]},
            "device": device,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "repetitions": max(len(record.runs) for record in records),
            "warm_up": {"repetitions": 0 if given.no_warm_up else 1, "rounds": work.warm_up_rounds},
            "machine": before,
            "learned_from": {"min_accuracy": work.min_accuracy, "loss_tolerance": work.loss_tolerance},
            "arithmetic": floor,
            "rows": summarized(work, records),
        }
        _write(path, result)
        return result

    records = measure_all(
        work,
        competitors,
        folder,
        given.cache,
        device=device,
        repetitions=given.repetitions,
        warm_up=not given.no_warm_up,
        until=until,
        say=lambda text: print(text, flush=True),
        keep=kept,
    )
    result = kept(records)
    if not given.no_profile:
        for competitor, row in zip(competitors, result["rows"], strict=True):
            if competitor.module == "ours" and "round_s" in row:
                row["profile_s"] = _profile(
                    work, competitor, folder, given.cache, device, row["mean_round_s"]["median"]
                )
                _write(path, result)
    print(f"{work.name}: {path}", flush=True)


def _write(path: Path, result: Result) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _profile(
    work: BenchmarkWorkload, competitor: Competitor, folder: Path, cache: Path, device: str, round_s: float
) -> Any:
    """Return seconds per round in each package, over enough rounds for the samples to be significant."""
    rounds = max(work.experiment["rounds"], min(2000, round(_PROFILED_S / round_s)))
    try:
        return measure_once(competitor, folder, cache, device=device, settings={"profile": rounds})["profile"]
    except PeerError as error:
        return {"not_measured": str(error)}


def _chosen_workloads(names: Sequence[str], devices: Sequence[str]) -> list[tuple[BenchmarkWorkload, str]]:
    workloads = all_workloads()
    for name in names:
        if name not in (*workloads, "all", "scaling", *_EXTRAS):
            raise SystemExit(f"there is no work '{name}'; expected all, scaling, {', '.join([*_EXTRAS, *workloads])}.")
    chosen = [
        work
        for work in workloads.values()
        if {work.name, "all"} & {*names} or ("scaling" in names and work.curve is not None)
    ]
    return [(work, device) for device in devices for work in chosen if device in work.devices]


def _chosen_competitors(work: BenchmarkWorkload, device: str, names: Sequence[str]) -> list[Competitor]:
    """Return the requested competitors. The bare loop is always included, as the baseline of ratios."""
    for name in names:
        competitor_named(name)
    return [
        competitor
        for competitor in COMPETITORS
        if device in competitor.devices
        and (not work.competitors or competitor.name in work.competitors)
        and (not competitor.workloads or work.name in competitor.workloads)
        and (not names or competitor.name in (*names, BARE))
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Ours and the peers in turn, on the same workloads.")

    def several(text: str) -> list[str]:
        return [name for name in text.split(",") if name]

    here = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    parser.add_argument(
        "--workloads", type=several, default=["all", "startup"], help="w1,w2,...; scaling; startup; all"
    )
    parser.add_argument("--competitors", type=several, default=[], help="without it, all; the bare loop always runs")
    parser.add_argument("--devices", type=several, default=here, help="without it, cpu and, if there is one, cuda")
    parser.add_argument("--repetitions", type=int, default=5, help="besides one that warms up and is dropped")
    parser.add_argument("--minutes", type=float, default=120.0, help="no repetition is begun that would end later")
    for former, name in (("--works", "workloads"), ("--players", "competitors")):
        parser.add_argument(former, dest=name, type=several, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.add_argument(
        "--no-warm-up", action="store_true", help="keep the first repetition; for workloads that take long"
    )
    parser.add_argument("--no-profile", action="store_true", help="do not attribute our rounds' time to phases")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--cache", type=Path, default=CACHE, help="environments of the peers, exported workloads")
    return parser.parse_args()


if __name__ == "__main__":
    main()
