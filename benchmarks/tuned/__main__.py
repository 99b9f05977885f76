"""docs/tuned.md, from benchmarks/tuned/results: `python -m benchmarks.tuned`.

`python -m benchmarks.tuned RESULT.json ...` first adds the output of `fedsign compare --json` for an experiment here.
"""

import json
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.tables import MISSING, Result, table
from fedsign.comparison.labels import Scale, short_label
from fedsign.comparison.verdict import FAILED
from fedsign.intervals import Interval
from fedsign.report.wording import plural, setting
from fedsign.storage.disk import write_text
from fedsign.traits import StrategyTraits
from simulations.comparison.search import SPREAD

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tuned.md"
RESULTS = ROOT / "benchmarks" / "tuned" / "results"
TITLES = {"tuned-mnist-cnn": "MNIST, CNN", "tuned-cifar10-cnn": "CIFAR-10 (JPEG), CNN"}
NOT_RUN = "Not run yet."
_HEAD = """\
# Six methods, equally tuned

<!-- Written by `python -m benchmarks.tuned` from benchmarks/tuned/results; do not edit. -->

The six methods in the results table of the FedSign paper, each tuned with the same number of trials over its own
hyperparameters, learning rate, momentum, weight decay, and the scale of the initial weights. Trials are scored on
held-out training samples under Dirichlet(0.5) (`dirichlet_prefix`). The best settings are then trained on all training
samples, under all splits, with seeds that no trial used. The tables show test accuracy in percent; verdicts come from
tests of all pairs over all splits, corrected together. Experiments and commands:
[benchmarks/tuned](../benchmarks/tuned/README.md)."""
AT_CHANCE = 0.12  # accuracy or less, of ten classes; the largest of MNIST has 11 %
_POINTS = Scale(decimals=2, percent=True, factor=100)
_LEFT_OUT = ("environment", "path", "population", "folders")  # specific to a machine, or large


def main(given: Sequence[str]) -> None:
    """Add results, and write the page."""
    for path in given:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
        write_text(RESULTS / f"{result['name']}.json", json.dumps(_kept(result), indent=1) + "\n")
    write_text(PAGE, page())
    print(PAGE.relative_to(ROOT))


def page() -> str:
    """Return its text."""
    sections = [f"## {title}\n\n{_section(RESULTS / f'{name}.json')}" for name, title in TITLES.items()]
    return "\n\n".join([_HEAD, *sections]) + "\n"


def _kept(result: Result) -> Result:
    kept = {name: value for name, value in result.items() if name not in _LEFT_OUT}
    kept["entries"] = [{k: v for k, v in entry.items() if k not in _LEFT_OUT} for entry in result["entries"]]
    config = tomllib.loads(kept.pop("config_toml"))
    return kept | {"rounds": config["rounds"]}


def _section(path: Path) -> str:
    if not path.exists():
        return NOT_RUN
    result = json.loads(path.read_text(encoding="utf-8"))
    searches = result["tuning"]["searches"]
    about = (
        f"{plural(len(result['entries'][0]['seeds']), 'seed')}, {result['rounds']} rounds; {searches[0]['trials']} "
        f"trials per method, with {plural(len(result['tuning']['seeds']), 'seed')} per trial."
    )
    kept = [trial["number"] == 0 for trial in result["trials"] if trial["chosen"]]
    found = f"{kept.count(True)} of {len(kept)} searches kept the default settings (trial 1)."
    if searches[0]["trials"] <= SPREAD:
        found += f" The other trials are quasi-random; model-based proposals begin after trial {SPREAD}."
    parts = [about, _accuracies(result), *_failures(result), *_lost(result), found, _choices(result)]
    return "\n\n".join(parts)


def _failed(result: Result) -> dict[str, str]:
    """Return the strategies that contain the reference and are below it, with their labels."""
    return {
        row["strategy"]: row["label"]
        for row in result["standings"]["rows"]
        if result["reference"] in (StrategyTraits.of(row["strategy"]).special_case or {})
        and row["difference"]["high"] < 0
    }


def _failures(result: Result) -> Iterator[str]:
    """Say that these are no results."""
    reference = result["tuning"]["labels"][result["reference"]]
    if labels := [*_failed(result).values()]:
        yield (
            f"{FAILED[0].upper()}{FAILED[1:]}: {', '.join(labels)}. With a strength of 0, each is {reference}, and the "
            "upper end of its interval is below 0: its difference is no result. These searches did not try "
            f"{reference}'s best settings with a small strength, as `fedsign compare --tune` does now."
        )


def _lost(result: Result) -> Iterator[str]:
    """Name the runs that failed, diverged or ended at chance."""
    runs = [
        (f"{entry['label']}, {short_label(entry['condition'])}, seed {seed}", value)
        for entry in result["entries"]
        for seed, value in zip(entry["seeds"], entry["values"], strict=True)
    ]
    if failed := [run for run, value in runs if value is None]:
        yield f"Failed or diverged, excluded from the means: {'; '.join(failed)}."
    if low := [f"{run} ({_POINTS.number(value)})" for run, value in runs if value is not None and value <= AT_CHANCE]:
        yield f"At chance level, included in the means: {'; '.join(low)}."


def _num_lost(result: Result, strategy: str) -> str:
    means = [trial["validation_mean"] for trial in result["trials"] if trial["strategy"] == strategy]
    return f"{sum(mean is None or mean <= AT_CHANCE for mean in means)} of {len(means)}"


def _accuracies(result: Result) -> str:
    conditions = result["conditions"]
    rows = []
    for standing in result["standings"]["rows"]:
        entries = [
            next(e for e in result["entries"] if e["strategy"] == standing["strategy"] and e["condition"] == condition)
            for condition in conditions
        ]
        difference, is_failed = standing["difference"], standing["strategy"] in _failed(result)
        rows.append(
            [
                standing["label"],
                *(_POINTS.mean_and_std(entry["mean"], entry["std"]) for entry in entries),
                MISSING if difference is None else _POINTS.interval(Interval(**difference)),
                FAILED if is_failed else standing["says"],
            ]
        )
    reference = result["tuning"]["labels"][result["reference"]]
    head = ["", *map(short_label, conditions), f"difference from {reference}, all splits, 95 %", "verdict"]
    return table(head, rows, left=1)


def _choices(result: Result) -> str:
    chosen = [trial for trial in result["trials"] if trial["chosen"]]
    keys = list(dict.fromkeys(key for trial in chosen for key in trial["choice"] if not key.startswith("strategy.")))
    rows = [
        [
            result["tuning"]["labels"][trial["strategy"]],
            _POINTS.number(trial["validation_mean"]),
            _POINTS.number(_as_given(result, trial)),
            str(trial["number"] + 1),
            _num_lost(result, trial["strategy"]),
            *(setting(trial["choice"][key]) if key in trial["choice"] else MISSING for key in keys),
            ", ".join(_own(trial)) or MISSING,
        ]
        for trial in chosen
    ]
    head = [
        "",
        "validation",
        "untuned",
        "trial",
        "failed or at chance",
        *(key.rpartition(".")[2] for key in keys),
        "own settings",
    ]
    return table(head, rows, left=1)


def _as_given(result: Result, chosen: Result) -> float | None:
    """Return the first trial's values, which are the experiment's own settings."""
    (first,) = (
        trial
        for trial in result["trials"]
        if trial["number"] == 0 and all(trial[key] == chosen[key] for key in ("strategy", "condition"))
    )
    value: float | None = first["validation_mean"]
    return value


def _own(trial: Result) -> Iterator[str]:
    for key, value in trial["choice"].items():
        if key.startswith("strategy."):
            yield f"{key.removeprefix('strategy.')} {setting(value)}"


if __name__ == "__main__":
    main(sys.argv[1:])
