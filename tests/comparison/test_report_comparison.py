"""The page of a comparison: honest wording, correct numbers, described charts, no external resources."""

import re
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from fedsign.comparison import charts
from fedsign.comparison.headline import described, headline
from fedsign.comparison.labels import short_label
from fedsign.comparison.latex import details_table
from fedsign.comparison.report import render, render_card, write_comparison
from fedsign.comparison.summary import Curve, Entry, Summary, ToTarget
from fedsign.comparison.tables import pooled, results
from fedsign.comparison.verdict import ranked
from fedsign.intervals import mean_and_std, paired_difference
from fedsign.report import plots
from fedsign.report.chart import Axis, Chart, Series
from fedsign.report.wording import NARROW_SPACE
from tests.unit.report_samples import ALPHAS, FAILURE, STRATEGIES, a_comparison

HOSTILE = '<script>alert("&")</script>'

CASES: dict[str, dict[str, Any]] = {
    "usual": {"grid": {"strategy.gamma": [0.001, 0.01]}},
    "one seed": {"seeds": 1, "rounds": 12},
    "one round": {"rounds": 1},
    "eight by three": {"strategies": list(STRATEGIES), "conditions": ALPHAS, "rounds": 30, "seeds": 3},
    "lower is better": {"metric": "rmse", "target": 0.5},
    "diverged": {"diverged": [("feddyn", 0), *(("fedprox", seed) for seed in range(5))]},
    "failed": {"failed": [("feddyn", 0), *(("fedprox", seed) for seed in range(5))], "unfinished": [("fedsign", 1)]},
    "unfinished": {"unfinished": [("fedsign", 1), ("fedavg", 0)]},
    "nothing finished": {"unfinished": [(name, seed) for name in STRATEGIES for seed in range(5)]},
    "hostile names": {"labels": dict.fromkeys(STRATEGIES, HOSTILE) | {"fedavg": "x" * 60}, "name": HOSTILE},
    "exploding": {"extra": {"loss": 1e200, "train_loss": 1e20}},
    "no drift": {"extra": {"client_drift": None}},
}


def page_of(path: Path, **case: Any) -> str:
    return write_comparison(a_comparison(path, **case)).read_text(encoding="utf-8")


def words(page: str) -> str:
    """The page's text with plain single spaces."""
    text = re.sub(r"<style>.*?</style>|<script.*?</script>", "", page, flags=re.DOTALL)
    text = unescape(re.sub(r"<[^>]+>", " ", text)).replace(NARROW_SPACE, " ").replace("\u00a0", " ")
    return " ".join(text.split())


def curve_of(path: Path, curve: Curve, metric: str = "accuracy") -> Series:
    """The line of one strategy's curve."""
    summary = a_summary(path, metric=metric, first=(0.5,))
    entry = replace(summary.entries[0], curves={metric: curve})
    chart = charts.curves(replace(summary, entries=(entry,)), {}, metric, title="any")
    assert chart is not None
    return chart.series[0]


def differences_of(summary: Summary) -> Chart:
    chart = charts.differences(summary)
    assert chart is not None
    return chart


def an_entry(strategy: str, values: tuple[float | None, ...], reference: tuple[float | None, ...]) -> Entry:
    """An entry that only has final values."""
    mean, std = mean_and_std(values)
    pairs = [dict(enumerate(each)) for each in (values, reference)]
    return Entry(
        strategy=strategy,
        label=strategy.capitalize(),
        condition={},
        choice={},
        num_choices=1,
        seeds=tuple(range(len(values))),
        values=values,
        mean=mean,
        std=std,
        difference=None if strategy == "first" else paired_difference(*pairs, higher_is_better=True),
        to_target=None,
        bytes_down=None,
        bytes_up=None,
        curves={},
        failures=0,
        num_failed=0,
        unfinished=0,
        folders=(),
    )


def a_summary(path: Path, metric: str = "accuracy", **values: tuple[float | None, ...]) -> Summary:
    """A summary of final values, the first strategy being the reference."""
    reference = values["first"]
    return Summary(
        name="trial",
        path=path,
        metric=metric,
        higher_is_better=metric == "accuracy",
        last=5,
        target=None,
        reference="first",
        conditions=({},),
        entries=tuple(an_entry(name, given, reference) for name, given in values.items()),
        num_cells=1,
        num_finished=1,
    )


@pytest.mark.parametrize("name", CASES)
def test_charts_are_described_and_inside_their_box(name: str, tmp_path: Path) -> None:
    page = page_of(tmp_path, **CASES[name])
    drawn = re.findall(r'role="img" aria-label="([^"]*)"', page)
    assert len(drawn) >= (0 if name == "nothing finished" else 4) and all(drawn)
    paths = " ".join(re.findall(r' d="([^"]*)"', page.replace(plots.scripts(), "")))
    assert "nan" not in paths and "inf" not in paths
    assert all(0 <= float(place) <= 100 for place in re.findall(r'style="(?:left|bottom|--zero):([^%]*)%', page))


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_loaded_and_no_script_but_ours_runs(name: str, tmp_path: Path) -> None:
    page = page_of(tmp_path, **CASES[name])
    markup = page.replace(plots.scripts(), "")
    assert "://" not in markup and "url(" not in markup and "@import" not in markup
    assert set(re.findall(r"""(?:src|href|srcset|action)\s*=\s*["']([^"']*)""", markup)) == {"data:,"}
    assert page.count("<script>") == 1 and f"script-src '{plots.script_hash()}'" in page


def test_the_largest_page_is_below_600_kb(tmp_path: Path) -> None:
    case = CASES["eight by three"] | {"rounds": 150}
    assert len(page_of(tmp_path, **case).encode()) < 600_000


def test_every_cell_of_a_table_has_its_heading(tmp_path: Path) -> None:
    """As many cells in each row as headings, each heading with its scope, and the row's name is one of them."""
    page = page_of(tmp_path, **CASES["eight by three"])
    tables = re.findall(r"<table.*?</table>", page, re.DOTALL)
    assert len(tables) == 1 + 3 + 1  # over all conditions, under each, and one of failed replies
    for table in tables:
        head, body = table.split("</thead>")
        assert head.count("<th ") == head.count('scope="col"') > 2
        rows = body.split("<tr")[1:]
        assert {row.count("<td") + row.count("<th ") for row in rows} == {head.count("<th ")}
        assert all(row.count('scope="row"') == 1 for row in rows)


def test_the_headline_is_the_paired_difference(tmp_path: Path) -> None:
    """Differences 0.02, 0.03, 0.04: mean 0.03, s = 0.01, t(0.975, 2) = 4.302653 give
    0.03 +- 4.302653 * 0.01 / sqrt(3) = 0.03 +- 0.0248414, that is +0.52 to +5.48 points."""
    summary = a_summary(tmp_path, first=(0.90, 0.91, 0.92), second=(0.92, 0.94, 0.96))
    found = headline(summary)
    said = " ".join(found.sentences).replace(NARROW_SPACE, " ")
    assert (found.best, found.value.replace(NARROW_SPACE, " ")) == ("Second", "94.00 %")
    assert "3.00 points above First (95 % interval of the paired difference: +0.52 to +5.48), better in 3 of 3" in said
    assert "Second is shown to be better than First." in said and "tell" not in said


def test_a_strategy_alone_is_neither_best_nor_untold(tmp_path: Path) -> None:
    found = headline(a_comparison(tmp_path, strategies=["fedavg"], seeds=3))
    assert found.best == "FedAvg" and found.value and not found.sentences
    assert found.remark == "test accuracy, mean of 3 seeds"
    assert headline(a_summary(tmp_path, first=(0.9,))).remark == "test accuracy, one seed"


def test_the_settings_of_each_strategy_are_on_the_page_once(tmp_path: Path) -> None:
    conditions = ({"partition.alpha": 1.0}, {"strategy.alpha": 0.01})
    summary = a_comparison(tmp_path, strategies=["fedavg", "feddyn"], seeds=2)
    settings: dict[tuple[str, int], dict[str, Any]] = {
        ("feddyn", 0): {"alpha": 0.1, "weights": [], "weighting": "uniform"},
        ("feddyn", 1): {"alpha": 0.01, "weights": [], "weighting": "uniform"},
    }
    entries = [
        replace(entry, condition=condition, settings=settings.get((entry.strategy, at), {}))
        for at, condition in enumerate(conditions)
        for entry in summary.entries
    ]
    page = words(render(replace(summary, conditions=conditions, entries=tuple(entries))))
    said = "Settings of the strategies FedDyn alpha 0.1 or 0.01, weighting uniform Configuration of the base experiment"
    assert page.count(said) == 1
    assert "Settings of the strategies" not in words(render(summary))


def test_what_the_test_does_not_show_is_not_told(tmp_path: Path) -> None:
    summary = a_summary(tmp_path, first=(0.90, 0.91, 0.92), second=(0.95, 0.90, 0.93))
    found = headline(summary)
    assert (found.best, found.value) == ("Too few seeds to tell", "")
    said = " ".join(found.sentences)
    assert (
        "Second has the best mean" in said
        and "the test does not show a difference (the smallest corrected p = " in said
    )


def test_a_pair_beside_shown_ones_is_called_undecided(tmp_path: Path) -> None:
    summary = a_summary(
        tmp_path,
        first=(0.90, 0.91, 0.92, 0.9),
        second=(0.93, 0.90, 0.93, 0.91),
        third=(0.5, 0.511, 0.52, 0.5),
    )
    said = " ".join(headline(summary).sentences)
    assert "That is too few seeds to tell the two apart (corrected p = " in said
    assert "First is shown to be better than Third; beside Second, too few seeds to tell." in said


def test_a_reference_that_is_best_is_compared_with_the_next(tmp_path: Path) -> None:
    summary = a_summary(tmp_path, first=(0.9, 0.91, 0.92), second=(0.8, 0.81, 0.821), third=(0.5, 0.5, 0.5))
    said = " ".join(headline(summary).sentences)
    assert "First, the reference, has the best mean; Second comes next: 9.97 points below First" in said
    assert "better in 0 of 3 seeds. First is shown to be better than Second and Third." in said


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ((0.9, 0.91, 0.92), "Second and the reference, First, tie for the best mean, equal in all 3 seeds."),
        # +0.01, -0.01, and 0 points: 0 +- 4.302653 * 0.01 / sqrt(3)
        (
            (0.9001, 0.9099, 0.92),
            "tie for the best mean (95 % interval of the paired difference: −0.02 to +0.02), better in 1 of 3 seeds.",
        ),
        ((0.89, 0.91, 0.92), "First, the reference, has the best mean; Second comes next: 0.33 points below First"),
    ],
)
def test_equal_means_are_a_tie(second: tuple[float, ...], said: str, tmp_path: Path) -> None:
    summary = a_summary(tmp_path, first=(0.9, 0.91, 0.92), second=second)
    assert said in " ".join(headline(summary).sentences).replace(NARROW_SPACE, " ")
    assert ("tie for the best mean, 91.00" in described(summary, {}).sentences[0]) == ("tie" in said)


def test_a_tie_of_several_names_all(tmp_path: Path) -> None:
    same = (0.9, 0.91, 0.92)
    summary = a_summary(tmp_path, first=same, second=same, third=same, fourth=(0.8, 0.81, 0.82))
    assert headline(summary).sentences[0] == "Second, Third and the reference, First, tie for the best mean."


def test_one_seed_claims_no_certainty(tmp_path: Path) -> None:
    summary = a_summary(tmp_path, first=(0.9,), second=(0.95,))
    said = " ".join(headline(summary).sentences)
    assert "5.00 points above First. With one seed there is no interval and no test" in said and "better in" not in said
    page = words(render(summary))
    assert "±" not in page and "With one seed there is no standard deviation and no interval" in page


def with_failed(summary: Summary, strategy: str, num_failed: int) -> Summary:
    """The summary, had more seeds of a strategy been run, and failed."""
    entries = [
        replace(entry, num_failed=num_failed) if entry.strategy == strategy else entry for entry in summary.entries
    ]
    return replace(summary, entries=tuple(entries))


@pytest.mark.parametrize("how", ["failed", "diverged"])
def test_a_strategy_that_lost_a_seed_is_not_the_best(how: str, tmp_path: Path) -> None:
    """The mean of its lucky seeds is higher, but that is not a mean over the same seeds.

    A model that diverges ends its run as failed; a metric alone can be no number, too.
    """
    lucky = (0.99, 0.99) if how == "failed" else (0.99, None, 0.99)
    summary = a_summary(tmp_path, first=(0.90, 0.91, 0.92), second=lucky)
    if how == "failed":
        assert headline(summary).sentences[0].startswith("Second")  # as long as no seed is known to be lost
        summary = with_failed(summary, "second", 1)
    found = headline(summary)
    assert found.sentences[0].startswith("First, the reference, has the best mean")
    assert any(f"Second {how} with 1 of 3 seeds" in said for said in found.sentences)
    assert ranked(summary.entries, higher_is_better=True)[0].strategy == "first"
    page = render(summary)
    assert 'class="is-best"' not in page and "99.00 ± 0.00 (2 of 3 seeds)" in words(page)


def test_where_all_have_lost_seeds_the_best_says_of_how_many_it_is(tmp_path: Path) -> None:
    """First has lost two of four seeds, Second one of three: Second is ahead, for all that First's mean is higher."""
    summary = with_failed(a_summary(tmp_path, first=(0.95, 0.95), second=(0.90, 0.91)), "first", 2)
    found = headline(with_failed(summary, "second", 1))
    assert found.sentences[0].startswith("Second has the best mean")
    assert "Second failed with 1 of 3 seeds; its mean is of the others alone." in found.sentences


def test_failed_and_pending_runs_are_told_apart(tmp_path: Path) -> None:
    """Of 20 runs 6 failed and 1 is to be run; each reason is there, escaped, and so is the way to try again."""
    page = page_of(tmp_path, **CASES["failed"])
    text = words(page)
    assert "13 of 20 runs have finished." in text
    assert "Repeat fedsign compare to run the remaining 1." in text
    assert "6 failed (see “Failures”); --retry-failed runs them again" in text
    assert text.count(FAILURE) == 6 and FAILURE not in page
    assert "FedProx failed with 5 of 5 seeds." in text and "1 cell has not finished" in text
    assert "(4 of 5 seeds)" in text and "FedDyn: 4 of 5 seeds." in text
    done = words(page_of(tmp_path / "done", failed=[("feddyn", 0)]))
    assert "Repeat" not in done and "1 failed (see “Failures”); --retry-failed runs it again" in done
    assert "retry-failed" not in words(page_of(tmp_path / "unfinished", **CASES["unfinished"]))


@pytest.mark.parametrize(
    ("rounds", "said"),
    [(1, "The value of the last round on"), (3, "The mean of the last 3 rounds on"), (9, "last 5 rounds")],
)
def test_a_final_value_names_the_rounds_that_it_is_of(rounds: int, said: str, tmp_path: Path) -> None:
    summary = a_comparison(tmp_path, rounds=rounds, seeds=2)
    assert said in words(render(summary))
    assert said.split(" on")[0].removeprefix("The ") in details_table(summary)


def test_a_notebook_shows_the_table_and_the_differences(tmp_path: Path) -> None:
    summary = a_comparison(tmp_path, conditions=ALPHAS, labels={"feddyn": HOSTILE}, failed=[("fedprox", 0)])
    card = render_card(summary)
    assert HOSTILE not in card and "<script" not in card and "://" not in card
    assert all(mark.labels[0] in card for mark in differences_of(summary).series)
    text = words(card)
    for row in (row for table in results(summary) for row in table.rows):
        assert f"{row.entry.label} {row.whole_value} {row.difference}".replace(NARROW_SPACE, " ") in text
    for pooled_row in pooled(summary):
        said = f"{pooled_row.standing.label} {pooled_row.value} {pooled_row.difference} {pooled_row.verdict}".strip()
        assert said in text
    assert "57 of 60 runs finished · 3 failed" in text and all(short_label(each) in text for each in ALPHAS)
    assert render_card(a_comparison(tmp_path / "none", **CASES["nothing finished"]))


def test_for_a_metric_that_should_be_low_the_lowest_is_best(tmp_path: Path) -> None:
    summary = a_summary(tmp_path, metric="rmse", first=(3.0, 3.1, 3.2), second=(2.0, 2.11, 2.2))
    found = headline(summary)
    assert (found.best, found.value) == ("Second", "2.103") and found.sentences[0].startswith("Second has the best")
    assert "0.997 below First" in " ".join(found.sentences) and "points" not in " ".join(found.sentences)
    assert differences_of(summary).x.label.endswith("left is better")


def test_numbers_of_the_table_are_those_of_the_summary(tmp_path: Path) -> None:
    summary = a_comparison(tmp_path, target=0.9)
    page = words(render(summary))
    for entry in summary.entries:
        assert entry.mean is not None and entry.std is not None
        assert f"{100 * entry.mean:.2f} ± {100 * entry.std:.2f}" in page
        if entry.difference:
            assert f"[{100 * (entry.difference.low or 0):+.2f}, ".replace("-", "−") in page
    assert "rounds to 90.00 %" in page and "20 of 20 finished" in page


def test_bytes_and_rounds_to_the_target_name_the_seeds_that_reached_it(tmp_path: Path) -> None:
    summary = a_comparison(tmp_path)
    limits = dict.fromkeys(range(5), 55)
    reached = {0: 15, 1: 17, 2: 18, 3: None, 4: None}
    taken = ToTarget(
        target=0.9, reached=reached, limits=limits, is_bound=False, rounds=17.5, bytes_down=1e6, bytes_up=2.5e6
    )
    never = replace(taken, reached=dict.fromkeys(reached), is_bound=True, rounds=55.0)
    first, second, *rest = summary.entries
    entries = (replace(first, to_target=taken), replace(second, to_target=never), *rest)
    page = words(render(replace(summary, entries=entries)))
    assert (
        page.count("17.5 (3 of 5)") == 2
        and page.count("3.5 MB (3 of 5)") == 1
        and page.count("> 55 (0 of 5)") == 2
        and page.count("> 3.5 MB") == 2
    )


def test_trials_say_that_validation_chose(tmp_path: Path) -> None:
    summary = a_comparison(tmp_path, grid={"strategy.gamma": [0.001, 0.01, 0.1]})
    chosen = [trial for trial in summary.trials if trial.chosen]
    assert len(summary.trials) == 3 and len(chosen) == 1
    page = words(render(summary))
    assert "on held-out validation samples; the test set was not used" in page and page.count("✓ chosen") == 1
    assert f"{short_label(chosen[0].choice)} {100 * (chosen[0].validation_mean or 0):.2f} ±" in page


def test_what_went_wrong_stands_in_the_table_and_below(tmp_path: Path) -> None:
    page = words(page_of(tmp_path, **CASES["diverged"]))
    assert page.count("1 diverged") >= 2 and page.count("5 diverged") >= 2
    assert "No line for FedProx and FedDyn: not every seed has a number." in page


def test_clients_are_drawn_once_for_conditions_that_share_them(tmp_path: Path) -> None:
    models = [{"model.name": "mlp"}, {"model.name": "cnn"}]
    summary = a_comparison(tmp_path, conditions=models, rounds=2, seeds=2)
    shared = replace(summary, population=dict.fromkeys(summary.population, next(iter(summary.population.values()))))
    assert render(summary).count("The split of the first seed") == 2
    assert render(shared).count("The split of the first seed") == 1


def test_a_configuration_that_cannot_be_read_is_shown_as_it_is(tmp_path: Path) -> None:
    assert "name = = 1" in render(replace(a_comparison(tmp_path), config_toml="name = = 1"))


def test_names_are_escaped(tmp_path: Path) -> None:
    page = page_of(tmp_path, **CASES["hostile names"])
    assert HOSTILE not in page and page.count("&lt;script&gt;alert(") > 10


def test_the_page_is_the_same_when_made_again(tmp_path: Path) -> None:
    summary = a_comparison(tmp_path)
    assert render(summary) == render(summary)


def test_strategies_differ_in_color_and_in_line_style() -> None:
    """Eight of each; the ninth has the first's color and another style."""
    looks = [(color % 8, Series(name="", x=(), y=(), color=color).dashes) for color in range(16)]
    assert len({dashes for _, dashes in looks[:8]}) == 8
    assert len(set(looks)) == 16


def test_a_line_ends_at_the_mean_of_the_last_rounds(tmp_path: Path) -> None:
    """0.01 * (16 + ... + 20) / 5 = 0.18; the standard deviations 0.05 stay 0.05."""
    rounds = tuple(range(1, 21))
    line = curve_of(tmp_path, Curve(rounds=rounds, mean=tuple(0.01 * n for n in rounds), std=(0.05,) * 20))
    assert (line.y[-1], line.low[-1], line.high[-1]) == pytest.approx((0.18, 0.13, 0.23))


def test_one_seed_has_no_band(tmp_path: Path) -> None:
    line = curve_of(tmp_path, Curve(rounds=(1, 2, 3), mean=(0.1, 0.2, 0.3), std=(0.0, 0.0, 0.0)))
    assert (line.low, line.high) == ((), ())


def test_a_gap_is_a_gap_in_line_and_band(tmp_path: Path) -> None:
    curve = Curve(rounds=(1, 2, 3, 4, 5), mean=(1.0, 2.0, None, 2.0, 1.0), std=(0.1, 0.1, None, 0.1, 0.1))
    chart = Chart(title="any", series=[curve_of(tmp_path, curve, "rmse")], x=Axis(limits=(1, 5)), y=Axis(limits=(0, 3)))
    drawn = {kind: d for kind, _, d in plots.paths(chart)}
    assert drawn["line"].count("M") == 2 == drawn["spread"].count("M")


def test_a_full_dot_is_what_the_corrected_test_shows(tmp_path: Path) -> None:
    """Differences of 10 and 10.1 points in turn, and an interval without 0 that the correction does not let pass."""
    first = (0.5,) * 5
    summary = a_summary(
        tmp_path,
        first=first,
        second=(0.6, 0.601, 0.6, 0.601, 0.6),
        third=(0.54, 0.505, 0.53, 0.51, 0.53),
        fourth=(0.6, 0.4, 0.7, 0.3, 0.5),
    )
    (interval,) = [entry.difference for entry in summary.entries if entry.strategy == "third"]
    assert interval is not None and interval.low is not None and interval.low > 0
    assert [mark.is_open for mark in differences_of(summary).series] == [False, True, True]


def test_marks_are_where_the_axis_says(tmp_path: Path) -> None:
    """Differences of 10 points exactly, on an axis from 0 to 10: the dot is at its end."""
    chart = differences_of(a_summary(tmp_path, first=(0.5, 0.5), second=(0.6, 0.6)))
    (row,) = plots.rows(chart)
    assert chart.x.limits is not None and chart.x.limits[0] == 0
    assert row["name"] == "Second" and row["marks"][0]["place"] == pytest.approx(1000 / chart.x.limits[1])


def test_decimals_of_plain_numbers_follow_their_size(tmp_path: Path) -> None:
    for value, text in ((0.0421, "0.04210"), (3.2, "3.200"), (1234.5, "1234")):
        assert a_summary(tmp_path, metric="rmse", first=(value,)).scale.number(value) == text
