"""docs/valleys.md, from benchmarks/valleys/results: `python -m benchmarks.valleys`.

`python -m benchmarks.valleys RUN ...` first analyzes runs of the experiments here, which takes half an hour per run.
"""

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import fedsign
from benchmarks.tables import MISSING, Result, table
from fedsign.landscape.directions import NOISES, SPECIAL
from fedsign.report import figures
from fedsign.storage.disk import write_text

ROOT = Path(__file__).parents[2]
PAGE, IMAGES = ROOT / "docs" / "valleys.md", ROOT / "docs" / "images"
RESULTS = ROOT / "benchmarks" / "valleys" / "results"
TITLES = {"valley-resnet20": "ResNet-20, with BatchNorm", "valley-vgg8": "VGG8, without BatchNorm"}
SAMPLES, DRAWS, POINTS, SURFACE_POINTS = 500, 3, 21, 25
_valley = partial(fedsign.analyze.valley, scales=(1.0,), samples=SAMPLES)
_KINDS = {
    "raw": partial(_valley, directions=tuple(NOISES), draws=DRAWS, points=POINTS),
    "signs": partial(_valley, directions=tuple(NOISES), draws=DRAWS, points=POINTS, signs=1.0),
    "special": partial(_valley, directions=tuple(SPECIAL), points=POINTS),
    "surface": partial(_valley, scaling="filter", draws=2, surface=True, points=SURFACE_POINTS),
}
_INTERVAL = ("asymmetry", "asymmetry_low", "asymmetry_high")
_HEAD = f"""\
# Valleys on CIFAR-10 (JPEG)

<!-- Written by `python -m benchmarks.valleys` from benchmarks/valleys/results; do not edit. -->

The asymmetric valleys of arXiv 2405.12489 around two networks trained on all 50,000 images, stored as JPEG. Each
network was trained once, so the intervals are over {DRAWS} noise draws, not over training runs.

The error on {SAMPLES} test images is measured at θ + λ d, with the direction d scaled to the norm of the weights θ.
*Asymmetry* is the mean error over λ in [-1, 0] minus that over [0, 1], in points: above 0, the positive side is
flatter. Symmetric noise is evaluated in both directions, so its asymmetry is 0; the constant {{1}} has one draw. With
BatchNorm, statistics are recomputed on 500 training images at every point, as in the paper. Experiments and commands:
[benchmarks/valleys](../benchmarks/valleys/README.md)."""


def main(given: Sequence[str]) -> None:
    """Analyze runs, and write the page."""
    for path in given:
        _analyze_all(fedsign.load_run(path))
    write_text(PAGE, page())
    print(PAGE.relative_to(ROOT))


def page() -> str:
    """Return its text."""
    sections = [f"## {title}\n\n{_section(name)}" for name, title in TITLES.items()]
    return "\n\n".join([_HEAD, *sections]) + "\n"


def _analyze_all(run: fedsign.Run) -> None:
    name = run.config.run_name
    result: Result = {"rounds": len(run.rounds), "accuracy": run.rounds[-1]["accuracy"]}
    for kind, analyze in _KINDS.items():
        analysis = analyze(run)
        result[kind] = {"summary": [*analysis.summary], "parameters": analysis.facts["num_parameters"]}
        if kind != "raw":
            figures.write(analysis.figures["error"], IMAGES / f"{name}-{kind}.svg")
        print(name, kind, flush=True)
    write_text(RESULTS / f"{name}.json", json.dumps(result, indent=1) + "\n")


def _section(name: str) -> str:
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return "Not run yet."
    result = json.loads(path.read_text(encoding="utf-8"))
    raw, signs, special = (result[kind]["summary"] for kind in ("raw", "signs", "special"))
    noises = [
        [
            row["label"],
            _asymmetry(row),
            _points(other["mean_negative"]),
            _points(other["mean_positive"]),
            _asymmetry(other),
        ]
        for row, other in zip(raw, signs, strict=True)
    ]
    own = [
        [row["label"], _points(row["mean_negative"]), _points(row["mean_positive"]), _asymmetry(row)] for row in special
    ]
    flat = sum((row["asymmetry"] if row["asymmetry_low"] is None else row["asymmetry_low"]) > 0 for row in signs)
    raw_most = max(abs(row["asymmetry"]) for row in raw if not row["is_paired"])
    return "\n\n".join(
        [
            f"{result['raw']['parameters']:,} parameters, {result['rounds']} epochs, test accuracy "
            f"{100 * result['accuracy']:.1f} %. With the model's signs {flat} of {len(signs)} noises are flat on the "
            f"positive side; raw noise of one sign is asymmetric by up to {_points(raw_most)} points (up to 2 counts "
            "as symmetric).",
            table(["noise", "raw", "with signs: error -", "error +", "asymmetry"], noises, left=1),
            f"![Error along seven noises with the model's signs](images/{name}-signs.svg)",
            table(["direction", "error -", "error +", "asymmetry"], own, left=1),
            f"![Error along special directions](images/{name}-special.svg)",
            "The plane of two filter-normalized Gaussian directions (Li et al., arXiv 1712.09913):",
            f"![Error over a plane of filter-normalized directions](images/{name}-surface.svg)",
        ]
    )


def _points(value: float | None) -> str:
    return MISSING if value is None else f"{100 * value:.1f}"


def _asymmetry(row: Result) -> str:
    if row["is_paired"]:
        return "0"
    mean, low, high = (f"{100 * row[key]:+.1f}" if row[key] is not None else "" for key in _INTERVAL)
    return f"{mean} [{low}, {high}]" if low else mean or MISSING


if __name__ == "__main__":
    main(sys.argv[1:])
