"""docs/ablations.md, from benchmarks/ablations/results: `python -m benchmarks.ablations`.

A result is what `fedsign ablate fedsign benchmarks/ablations/NAME.toml --json` prints.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.tables import MISSING, Result, table
from fedsign.ablation.reading import CONVERGED
from fedsign.comparison.labels import Scale
from fedsign.intervals import Interval, mean_and_std
from fedsign.report.wording import figure
from fedsign.storage.disk import write_text

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "ablations.md"
RESULTS = ROOT / "benchmarks" / "ablations" / "results"
TITLES = {
    "digits-mlp-gamma0.003": "Digits, MLP, gamma 0.003",
    "digits-mlp": "Digits, MLP, gamma 0.0003",
    "digits-cnn": "Digits, CNN, gamma 0.0003",
    "mnist-mlp": "MNIST, MLP, gamma 0.0003",
    "mnist-cnn": "MNIST, CNN, gamma 0.0003",
    "cifar10-mlp": "CIFAR-10 (JPEG), MLP, gamma 0.0003",
    "cifar10-cnn": "CIFAR-10 (JPEG), CNN, gamma 0.0001",
}
NOT_RUN = "not run yet"
_HEAD = """\
# Does the sign matter?

<!-- Written by `python -m benchmarks.ablations` from benchmarks/ablations/results; do not edit. -->

FedSign pushes every weight along its sign in the received model. [`fedsign ablate`](how-to/ablate.md) measures
how much of its gain depends on these signs: it trains FedSign, FedAvg, and one control per simpler explanation with
the same rounds, clients, splits (`partition.name=dirichlet_prefix`), and seeds.

Differences are paired by seed, in points of test accuracy, each with its own 95 % interval. Verdicts come
from tests corrected for all differences of an ablation: **+** better, **−** worse, ? too few seeds to tell. The
*effect of the received signs* is FedSign − own sign, where *own sign* pushes each weight equally hard along its own
current sign and ignores the received model. A method has *converged* if its accuracy on validation samples rises by
less than 0.2 points in the last fifth of the rounds.

The experiments, and how gamma was chosen: [benchmarks/ablations](../benchmarks/ablations/README.md)."""
_MARKS = {"better": " **+**", "worse": " **−**"}
_POINTS = Scale(decimals=2, percent=True, factor=100)


def main() -> None:
    """Write the page."""
    write_text(PAGE, page())
    print(PAGE.relative_to(ROOT))


def page() -> str:
    """Return its text."""
    results = {
        name: json.loads(path.read_text(encoding="utf-8"))
        for name in TITLES
        if (path := RESULTS / f"{name}.json").exists()
    }
    sections = [f"## {TITLES[name]}\n\n{_section(result)}" for name, result in results.items()]
    return "\n\n".join([_HEAD, _verdict([*results.values()]), _summary(results), *sections]) + "\n"


def _verdict(results: Sequence[Result]) -> str:
    """Count the experiments that show an effect."""
    by_key = [{row["key"]: row for row in result["rows"]} for result in results]
    gains = [_says(rows["fedsign"]["to_fedavg"]) for rows in by_key]
    needs = [_says(rows["own-sign"]["to_regularizer"]) for rows in by_key].count("worse")
    norms = [_says(rows["weight-norms"]["to_regularizer"]) for rows in by_key].count("better")
    return (
        f"**Results**: FedSign is shown to be better than FedAvg in {gains.count('better')} of {len(results)} "
        f"experiments, and worse in {gains.count('worse')}. The received signs are shown to help in {needs}. FedAvg "
        f"rescaled to FedSign's weight norms, without any sign term, is shown to be better than FedSign in {norms}."
    )


def _summary(results: dict[str, Result]) -> str:
    rows = []
    for name, title in TITLES.items():
        if name not in results:
            rows.append([title, NOT_RUN, *[""] * 5])
            continue
        by_key = {row["key"]: row for row in results[name]["rows"]}
        regularizer, own = by_key["fedsign"], by_key["own-sign"]
        better = [row["label"] for row in results[name]["rows"] if _says(row["to_regularizer"]) == "better"]
        rows.append(
            [
                title,
                f"{_num_seeds(results[name])}, {results[name]['experiment']['rounds']}",
                ", ".join("yes" if by_key[key]["rise"] < CONVERGED else "no" for key in ("fedavg", "fedsign")),
                _accuracy(by_key["fedavg"], _num_seeds(results[name])),
                _points(regularizer["to_fedavg"]),
                _points(own["to_regularizer"], is_turned=True),
                ", ".join(better) or "none",
            ]
        )
    head = (
        *("", "seeds, rounds", "converged: FedAvg, FedSign", "FedAvg", "FedSign − FedAvg"),
        *("effect of the received signs", "better than FedSign"),
    )
    return table(head, rows, left=7)


def _section(result: Result) -> str:
    head = ("", "accuracy", "− FedAvg", "− FedSign", "best (round)", "rise in last fifth", "weight norm")
    rows = [
        [
            row["label"],
            _accuracy(row, _num_seeds(result)),
            _points(row["to_fedavg"]),
            _points(row["to_regularizer"]),
            MISSING if row["peak"] is None else f"{_POINTS.number(row['peak'][0])} ({row['peak'][1]})",
            _POINTS.signed(row["rise"]),
            figure(row["weight_norm"]),
        ]
        for row in result["rows"]
    ]
    sentences = "\n".join(f"- {each}" for each in result["sentences"])
    return f"{sentences}\n\n{table(head, rows, left=1)}"


def _num_seeds(result: Result) -> int:
    """Count the seeds with a result; failed runs have none."""
    return max(len(row["values"]) for row in result["rows"])


def _accuracy(row: Result, num_seeds: int) -> str:
    num = sum(each is not None for each in row["values"].values())
    lost = f", {num} of {num_seeds} seeds" if num < num_seeds else ""
    return f"{_POINTS.mean_and_std(*mean_and_std(row['values'].values()))}{lost}"


def _says(difference: Result | None) -> str | None:
    return None if difference is None else difference["says"]


def _points(difference: Result | None, *, is_turned: bool = False) -> str:
    """Format `+1.50 [+0.93, +2.06]` and the verdict; with `is_turned`, for the opposite difference."""
    if difference is None:
        return MISSING
    interval, says = Interval(**difference["interval"]), difference["says"]
    if is_turned:
        low, high = (None if end is None else -end for end in (interval.high, interval.low))
        interval = replace(interval, mean=-interval.mean, low=low, high=high)
        says = {"better": "worse", "worse": "better"}.get(says, says)
    return f"{_POINTS.interval(interval)}{_MARKS.get(says, ' ?')}"


if __name__ == "__main__":
    main()
