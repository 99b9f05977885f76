"""docs/benchmarks.md and its figures, generated from benchmarks/results: `python -m benchmarks.docs`.

Nothing is measured here and nothing is omitted: rows where FedSign loses are sorted in like the others, and a
competitor that could not be measured says why.
"""

import json
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.competitors import BARE, COMPETITORS, FLOOR, LARGE_MODELS
from benchmarks.docs_alone import SECTIONS
from benchmarks.phases import PHASES
from benchmarks.tables import FORMER, MISSING, Result, measured_on, ms, table
from benchmarks.workloads import all_workloads
from fedsign.former_names import current_record
from fedsign.report import figures
from fedsign.report.chart import Axis, Chart, Series, bar_chart
from fedsign.storage.disk import write_text

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"

_OURS = frozenset(competitor.name for competitor in COMPETITORS if competitor.module == "ours")
_REDUCED = frozenset(
    competitor.name for competitor in COMPETITORS if {"precision", "tf32"} & {*competitor.settings.get("engine", {})}
)
_MEASURES = frozenset({BARE, FLOOR})  # neither ours nor a competitor

_HEAD = """\
# Benchmarks

<!-- Written by `python -m benchmarks.docs` from benchmarks/results; do not edit. -->

FedSign compared with other simulators and a bare PyTorch loop on the same workloads. Each competitor runs in its own
process and environment, with the same torch and one thread per computing process. Competitors take turns, so that
background load affects all of them. The first repetition is a warm-up and is discarded, as
are the first rounds of every repetition.

All train the same clients on the same batches from the same initial parameters. *Learned* means that the accuracy
passed the workload's threshold and, for deterministic workloads, that the loss agrees with the bare loop's within the
workload's tolerance.

FedSign is timed as in `fedsign run`: evaluation and a record on disk every round, checkpoints, and progress display
as by default. The bare loop and the other simulators, as set up here, write and check nothing.

- **x loop**: median round time divided by the bare loop's in the same repetition; median and range over repetitions.
- **CPU**: the same ratio of processor time, which is less sensitive to load; for single-process competitors.
- **mean**: mean round time, including occasional work such as checkpoints.
- **first**: the first round. **start**: from process start to the first round.
- **repeats**: whether all repetitions end with a bit-identical loss.

To repeat: `make bench`, or one workload: `make bench WORKLOADS=w1 REPETITIONS=7` ([how](../benchmarks/README.md)).
"""

_NUMERICS = """\
FedSign uses cuDNN's deterministic algorithms and full float32. The others use torch's defaults: TF32 convolutions and
nondeterministic algorithms. `engine.tf32=true` enables TF32 for convolutions and matrix products."""


def main() -> None:
    """Write the page and the figures."""
    for path, text in pages().items():
        write_text(ROOT / path, text)
        print(path)
    for path, chart in charts().items():
        print(*figures.write(partial(figures.draw, chart, width=figures.PAGE), ROOT / path))


def pages() -> dict[str, str]:
    """Return generated files by path."""
    results = read_results()
    workloads = [result for result in results if result["workload"] not in SECTIONS]
    drawn = charts()
    parts = [_HEAD, *(_section(result, _picture(result) in drawn) for result in workloads if not result["curve"])]
    curves = [result for result in workloads if result["curve"]]
    if curves:
        parts.append(_curves(curves))
    parts += [SECTIONS[result["workload"]](result) for result in results if result["workload"] in SECTIONS]
    return {"docs/benchmarks.md": "\n".join(parts)}


def charts() -> dict[str, Chart]:
    """Return figures by path: milliseconds per round of every competitor."""
    workloads = [result for result in read_results() if result["workload"] not in SECTIONS and not result["curve"]]
    return {_picture(result): chart for result in workloads if (chart := _chart(result)).series}


def _picture(result: Result) -> str:
    device = "" if result["device"] == "cpu" else f"-{result['device']}"
    return f"docs/images/benchmark-{result['workload']}{device}.svg"


def read_results() -> list[Result]:
    """Read the results of `python -m benchmarks`, in the order of the workloads."""
    order = [*all_workloads(), *SECTIONS]
    found = [current_record(json.loads(path.read_text(encoding="utf-8")), FORMER) for path in result_files()]
    return sorted(found, key=lambda result: (result.get("device", ""), order.index(result["workload"])))


def result_files() -> list[Path]:
    """Return result files: one per device and workload, and those of FedSign alone; ignore other files."""
    alone = [RESULTS / f"{name}.json" for name in SECTIONS]
    return [*sorted(RESULTS.glob("*/*.json")), *(path for path in alone if path.exists())]


def _section(result: Result, has_picture: bool) -> str:
    title = result["title"] + ("" if result["device"] == "cpu" else ", on a GPU")
    rows = _ordered(result["rows"])
    parts = [f"## {title}", result["about"], measured_on(result)]
    if has_picture:
        parts.append(f"![Milliseconds a round of every competitor]({_picture(result).removeprefix('docs/')})")
    head = (
        "",
        "x loop",
        "range",
        "CPU",
        "ms a round",
        "range",
        "mean",
        "first",
        "start, s",
        "MB",
        "loss",
        "accuracy",
        "learned",
        "repeats",
    )
    parts.append(table(head, [_row(row) for row in rows], left=1))
    absent = [f"- **{row['title']}** was not measured: {row['not_measured']}." for row in rows if "not_measured" in row]
    parts += ["\n".join(absent)] if absent else []
    parts += [_NUMERICS] if result["device"] == "cuda" and result["workload"] in LARGE_MODELS else []
    parts += [_standing(rows), _floor(result, rows)]
    profile = _profile(rows)
    parts += [profile] if profile else []
    return "\n\n".join(parts) + "\n"


def _row(row: Result) -> list[str]:
    title = f"**{row['title']}**" if row["competitor"] in _OURS else row["title"]
    if "not_measured" in row:
        return [title, "not measured", *[MISSING] * 12]
    ratio, round_s = row["ratio_to_bare_loop"], row["round_s"]
    learned = row["learned"] and row.get("agrees", True)
    return [
        title,
        f"{ratio['median']:.2f}",
        f"{ratio['lowest']:.2f}-{ratio['highest']:.2f}",
        f"{row['cpu_ratio_to_bare_loop']['median']:.2f}" if "cpu_ratio_to_bare_loop" in row else MISSING,
        ms(round_s["median"]),
        f"{ms(round_s['lowest'])}-{ms(round_s['highest'])}",
        ms(row["mean_round_s"]["median"]),
        ms(row["first_round_s"]["median"]),
        f"{row['start_s']['median']:.1f}",
        str(row["peak_mb"]),
        f"{row['loss']:.4f}",
        f"{row['accuracy']:.3f}",
        "yes" if learned else "**no**",
        {True: "yes", False: "no", None: MISSING}[row["same_every_time"]],
    ]


def _standing(rows: Sequence[Result]) -> str:
    """Describe where FedSign wins and where it loses."""
    measured = [row for row in rows if "ratio_to_bare_loop" in row]
    ours = [row for row in measured if row["competitor"] in _OURS - _REDUCED]
    reduced = [row for row in measured if row["competitor"] in _REDUCED]
    peers = [row for row in measured if row["competitor"] not in _OURS | _MEASURES]
    if not ours or not peers:
        return "No peer was measured, or none of ours."
    best, peer = (min(rows, key=_median_s) for rows in (ours, peers))
    times = _median_s(peer) / _median_s(best)
    first = (
        f"The fastest of ours, {best['title']}, takes {ms(_median_s(best))} ms a round; the fastest peer, "
        f"{peer['title']}, {ms(_median_s(peer))} ms: we are {times:.2f} times as fast."
    )
    lost = [
        f"{one['title']} is slower than {', '.join(faster)}"
        for one in ours
        if (faster := [each["title"] for each in peers if _median_s(each) < _median_s(one)])
    ]
    if reduced:
        least = min(reduced, key=_median_s)
        first += (
            f" In another precision than the peers', {least['title']} takes {ms(_median_s(least))} ms, "
            f"{_median_s(peer) / _median_s(least):.2f} times as fast."
        )
    return f"{first} Where we lose: {'; '.join(lost)}." if lost else f"{first} None of ours is slower than a peer."


def _floor(result: Result, rows: Sequence[Result]) -> str:
    found = result["arithmetic"]
    text = (
        f"**Floor.** A round is {found['flops_per_round'] / 1e6:,.1f} million floating-point operations; a large "
        f"matrix product runs at {found['flops_per_s'] / 1e9:.0f} GFLOP/s on "
        + ("one thread here" if result["device"] == "cpu" else "this device")
        + f", so that no program on it goes below {ms(found['s_per_round'])} ms"
        + ("." if result["device"] == "cpu" else " with all digits of float32.")
    )
    floor = next((row for row in rows if row["competitor"] == FLOOR and "round_s" in row), None)
    if floor is None:
        return text
    ours = [
        f"{row['title']} {_median_s(row) / _median_s(floor):.2f}"
        for row in rows
        if row["competitor"] in _OURS and "round_s" in row
    ]
    kind = (
        "planned beforehand and stacked"
        if floor.get("kind") == "one stack"
        else "one client after another, on one thread, images in torch's usual layout"
    )
    return text + (
        f" The arithmetic of the round and nothing else, {kind}, takes {ms(_median_s(floor))} ms (the row *floor*, "
        f"measured). Ours, in multiples of it: {', '.join(ours) or MISSING}."
    )


def _profile(rows: Sequence[Result]) -> str:
    """Describe where our rounds spend their time, in ms and percent."""
    ours = [row for row in rows if "profile_s" in row and "not_measured" not in row["profile_s"]]
    if not ours:
        return ""
    lines = []
    for phase in PHASES:
        if any(phase in row["profile_s"] for row in ours):
            cells = []
            for row in ours:
                value, total = row["profile_s"].get(phase, 0.0), sum(row["profile_s"].values())
                cells.append(f"{ms(value)} ({100 * value / total:.0f} %)")
            lines.append([phase, *cells])
    lines.append(["together", *(ms(sum(row["profile_s"].values())) for row in ours)])
    head = ("ms a round", *(row["title"] for row in ours))
    return "Where the time goes, by samples of the stack of the main thread over more rounds:\n\n" + table(
        head, lines, left=1
    )


def _curves(results: Sequence[Result]) -> str:
    parts = ["## Scaling"]
    axes = dict.fromkeys((result["device"], result["curve"]["axis"]) for result in results)
    for device, axis in axes:
        points = sorted(
            (result for result in results if (result["device"], result["curve"]["axis"]) == (device, axis)),
            key=lambda result: result["curve"]["at"],
        )
        title = f"### Over {axis}" + ("" if device == "cpu" else ", on a GPU")
        competitors = list(
            dict.fromkeys((row["competitor"], row["title"]) for result in points for row in result["rows"])
        )
        parts += [
            title,
            points[0]["about"].replace(f"{points[0]['curve']['at']:,.0f}", "N", 1),
            measured_on(points[-1]),
        ]
        parts.append("Milliseconds a round, and in brackets times the bare loop:")
        parts.append(
            table(
                (axis, *(name for _, name in competitors)),
                [_point(result, competitors, _round_cell) for result in points],
                left=0,
            )
        )
        if "population" in axis:
            parts.append(
                "Seconds from the process's start to the first round, and in brackets the largest memory in MB:"
            )
            parts.append(
                table(
                    (axis, *(name for _, name in competitors)),
                    [_point(result, competitors, _start_cell) for result in points],
                    left=0,
                )
            )
        reasons = {
            f"- {result['title']}, {row['title']}: {row['not_measured']}."
            for result in points
            for row in result["rows"]
            if "not_measured" in row
        }
        parts += ["\n".join(sorted(reasons))] if reasons else []
    return "\n\n".join(parts) + "\n"


def _point(result: Result, competitors: Iterable[tuple[str, str]], cell: Any) -> list[str]:
    rows = {row["competitor"]: row for row in result["rows"]}
    cells = [cell(rows[name]) if name in rows and "round_s" in rows[name] else MISSING for name, _ in competitors]
    return [f"{result['curve']['at']:,.0f}", *cells]


def _round_cell(row: Result) -> str:
    unsure = "" if row["learned"] and row.get("agrees", True) else " (not learned)"
    return f"{ms(_median_s(row))} ({row['ratio_to_bare_loop']['median']:.2f}){unsure}"


def _start_cell(row: Result) -> str:
    return f"{row['start_s']['median']:.1f} ({row['peak_mb']:,})"


def _chart(result: Result) -> Chart:
    rows = [row for row in _ordered(result["rows"]) if "round_s" in row]
    bars = [
        Series(
            name=row["title"],
            x=(1000 * _median_s(row),),
            y=(index,),
            labels=(f"{ms(_median_s(row))} ms",),
            mark="bar",
            color=2 if row["competitor"] in _MEASURES else 0 if row["competitor"] in _OURS else 1,
        )
        for index, row in enumerate(rows)
    ]
    return bar_chart("Milliseconds a round", Axis(categories=[bar.name for bar in bars]), bars)


def _ordered(rows: Sequence[Result]) -> list[Result]:
    """Sort by speed; competitors that could not be measured come last."""
    return sorted(rows, key=lambda row: _median_s(row) if "round_s" in row else float("inf"))


def _median_s(row: Result) -> float:
    median: float = row["round_s"]["median"]
    return median


if __name__ == "__main__":
    main()
