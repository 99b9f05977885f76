"""The page's section on hyperparameter search: budgets, search spaces, chosen values, and all trials."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedsign.comparison.labels import short_label
from fedsign.comparison.summary import Summary, Trial
from fedsign.report.chart import Axis, Chart, Series, nice_ticks
from fedsign.report.run_charts import line_chart
from fedsign.report.wording import MISSING, duration, plural, setting


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One setting of one strategy: the chosen value and its search space."""

    value: str
    space: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One search: a strategy under a condition."""

    label: str
    color: int
    budget: str
    before: str  # validation value of the given experiment
    after: str  # validation value of the chosen trial
    trial: str  # number of the chosen trial
    lost: str
    time: str
    cells: Sequence[Cell]


@dataclass(frozen=True, kw_only=True, slots=True)
class Dot:
    """A trial in a panel; coordinates from 0 to 1, from the left and the bottom."""

    x: float
    y: float
    color: int
    chosen: bool
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """Validation values against one setting."""

    title: str
    ends: tuple[str, str]  # range of the setting
    values: tuple[str, str]  # range of validation values shown
    dots: Sequence[Dot]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """All searches under one condition."""

    condition: str
    keys: Sequence[str]
    rows: Sequence[Row]
    charts: Sequence[Chart]
    panels: Sequence[Panel]
    trials: Sequence[tuple[Trial, str, str, str]]  # with label, choice and value


def sections(summary: Summary) -> list[Tuned]:
    """One section per condition; empty without a search."""
    searches = summary.tuning.get("searches", ())
    conditions = [each["condition"] for each in searches]
    distinct = [each for index, each in enumerate(conditions) if each not in conditions[:index]]
    return [_section(summary, each) for each in distinct]


def lead(summary: Summary) -> str:
    """The budget of each strategy, in words."""
    tuning = summary.tuning
    if not tuning:
        return ""
    budgets = {(each["trials"], each["runs"], each["rounds"]) for each in tuning["searches"]}
    seeds = ", ".join(map(str, tuning["seeds"]))
    share = f"{100 * tuning['validation_fraction']:g} %"
    judged = (
        f"judged by the mean {summary.metric_name} on the {share} of the training samples that were held out; the "
        "test samples had no say. The first trial is the experiment as given. Then each was trained again with its "
        "best settings, on all training samples and with seeds that no trial has seen: those are the results above. "
        f"Seeds of tuning: {seeds}."
    )
    for each in {each["strategy"]: each for each in tuning["searches"] if "special_case" in each}.values():
        special = each["special_case"]
        judged += (
            f" The last trial of {_label(summary, each['strategy'])} has the best settings of "
            f"{_label(summary, special['strategy'])}, which it nearly is with {short_label(special['settings'])}."
        )
    if tuning["lead"]:
        return f"{tuning['lead']} All were {judged}"
    trials, runs, rounds = next(iter(budgets))
    return f"Every strategy had {plural(trials, 'trial')}, {plural(runs, 'run')} of {rounds:,} rounds in all, {judged}"


def _section(summary: Summary, condition: Mapping[str, Any]) -> Tuned:
    searches = [each for each in summary.tuning["searches"] if each["condition"] == condition]
    chosen = [trial.choice for trial in summary.trials if trial.chosen and trial.condition == condition]
    keys = list(dict.fromkeys(key for each in (*(search["space"] for search in searches), *chosen) for key in each))
    of = {
        each["strategy"]: [
            trial for trial in summary.trials if (trial.strategy, trial.condition) == (each["strategy"], condition)
        ]
        for each in searches
    }
    trials = [trial for each in of.values() for trial in each]
    values = [trial.validation_mean for trial in trials if trial.validation_mean is not None]
    # The axis starts at the worst quartile: a trial that learned nothing would flatten all others.
    middle = sorted(values)[len(values) // 4 if summary.higher_is_better else -1 - len(values) // 4] if values else 0.0
    best = (max if summary.higher_is_better else min)(values, default=1.0)
    ticks = nice_ticks(min(middle, best), max(middle, best))
    return Tuned(
        condition=short_label(condition),
        keys=keys,
        rows=[_row(summary, each, of[each["strategy"]], keys) for each in searches],
        charts=[_progress(summary, searches, of), *_learning(summary, searches)],
        panels=[
            _panel(summary, key, searches, of, (ticks[0], ticks[-1]))
            for key in keys
            if any(key in each["space"] for each in searches)
            and all(not each["space"][key]["values"] for each in searches if key in each["space"])
        ],
        trials=[
            (each, _label(summary, each.strategy), short_label(each.choice), _value(summary, each)) for each in trials
        ],
    )


def _row(summary: Summary, search: Mapping[str, Any], trials: Sequence[Trial], keys: Sequence[str]) -> Row:
    chosen = next((trial for trial in trials if trial.chosen), None)
    given = next((trial for trial in trials if trial.number == 0), None)
    lost = sum(bool(trial.num_lost) for trial in trials)
    values = {} if chosen is None else {key: setting(value) for key, value in chosen.choice.items()}
    return Row(
        label=_label(summary, search["strategy"]),
        color=_color(summary, search["strategy"]),
        budget=search.get("budget") or f"{search['trials']:,} trials, {search['rounds']:,} rounds",
        before=MISSING if given is None or not search["space"] else _value(summary, given),
        after=MISSING if chosen is None else _value(summary, chosen),
        trial=MISSING if chosen is None or chosen.number is None or not search["space"] else f"{chosen.number + 1}",
        lost=f"{lost}" if lost else MISSING,
        time=duration(sum(trial.seconds for trial in trials) + search.get("seconds", 0.0)),
        cells=[
            Cell(value=values.get(key, MISSING), space=search["space"].get(key, {}).get("text", "")) for key in keys
        ],
    )


def _progress(summary: Summary, searches: Sequence[Mapping[str, Any]], of: Mapping[str, Sequence[Trial]]) -> Chart:
    """The best validation value so far, by trial."""
    series, spaces = [], {each["strategy"]: each["space"] for each in searches}
    for strategy, trials in of.items():
        best: list[float | None] = []
        for trial in trials:
            known = [
                each for each in [*best[-1:], None if trial.num_lost else trial.validation_mean] if each is not None
            ]
            best.append((max if summary.higher_is_better else min)(known, default=None))
        numbers = [(trial.number or 0) + 1 for trial in trials]
        if not spaces[strategy] and best:  # a strategy without a search is drawn as a level for comparison
            numbers = list(range(1, max(map(len, of.values())) + 1))
            best = [best[0] for _ in numbers]
        series.append(Series(name=_label(summary, strategy), x=numbers, y=best, color=_color(summary, strategy)))
    text = "Best validation value after a number of trials; the first trial is the experiment as given."
    return line_chart(
        f"Best validation {summary.metric_name}", series, x="trial", percent=summary.scale.percent, text=text
    )


def _learning(summary: Summary, searches: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """The losses of gradient-based tuning, by step."""
    charts = []
    for each in (each for each in searches if each.get("losses")):
        name = _label(summary, each["strategy"])
        series = Series(
            name=name, x=range(len(each["losses"])), y=each["losses"], color=_color(summary, each["strategy"])
        )
        text = "On the held-out samples after the rounds of each step; rounds differ from step to step."
        charts.append(line_chart("Validation loss of the steps", [series], x="step", text=text))
    return charts


def _panel(
    summary: Summary,
    key: str,
    searches: Sequence[Mapping[str, Any]],
    of: Mapping[str, Sequence[Trial]],
    limits: tuple[float, float],
) -> Panel:
    spaces = [each["space"][key] for each in searches if key in each["space"]]
    ends = [each[end] for each in spaces for end in ("low", "high")]
    is_log = all(each["is_log"] for each in spaces)
    across = Axis(scale="log" if is_log else "linear", limits=(min(ends), max(ends)))
    low, high = limits
    dots = []
    for strategy, trials in of.items():
        for trial in trials:
            value, judged = trial.choice.get(key), trial.validation_mean
            if judged is None or trial.num_lost or not isinstance(value, int | float):
                continue
            text = (
                f"{_label(summary, strategy)}, trial {(trial.number or 0) + 1}: {setting(value)}, "
                f"{_value(summary, trial)}"
            )
            height = min(max((judged - low) / (high - low), 0.0), 1.0)
            dots.append(
                Dot(
                    x=min(max(across.position(value), 0.0), 1.0),
                    y=height,
                    color=_color(summary, strategy),
                    chosen=trial.chosen,
                    text=text,
                )
            )
    dots.sort(key=lambda dot: dot.chosen)  # draw the chosen ones on top
    values = (summary.scale.with_unit(low), summary.scale.with_unit(high))
    return Panel(title=key, ends=(f"{min(ends):g}", f"{max(ends):g}"), values=values, dots=dots)


def _value(summary: Summary, trial: Trial) -> str:
    if trial.num_lost:
        return "diverged" if trial.num_lost == len(trial.values) else f"{plural(trial.num_lost, 'seed')} diverged"
    return summary.scale.mean_and_std(trial.validation_mean, trial.validation_std)


def _label(summary: Summary, strategy: str) -> str:
    return str(summary.tuning["labels"][strategy])


def _color(summary: Summary, strategy: str) -> int:
    return [*summary.tuning["labels"]].index(strategy)
