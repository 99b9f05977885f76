"""`fedsign ablate`: available controls, metrics read off them, and resuming an ablation."""

import json
import math
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from benchmarks.ablations import __main__ as published
from fedsign.ablation import reading
from fedsign.ablation.controls import FEDAVG, controls_of, essential
from fedsign.ablation.page import as_json, differences, render
from fedsign.ablation.reading import read, share_of_gain
from fedsign.comparison.folder import Comparison
from fedsign.comparison.verdict import UNDECIDED, Says
from fedsign.config import load
from fedsign.errors import ConfigError, ResultsError
from fedsign.report import plots
from simulations.ablation.execution import ablate, method_of, prepared
from simulations.api import config_of
from simulations.comparison.execution import go_on
from strategies.base import Strategy

SMALL: dict[str, Any] = {
    "rounds": 5,
    "callbacks": [],
    "partition": {"num_clients": 6, "alpha": 1.0},
    "server": {"cohort_size": 3},
    "client": {"local_epochs": 1},
    "model": {"hidden": [16]},
    "strategy": {"name": "fedsign", "gamma": 0.02},
}
SOME = ("own-sign", "weight-norms", "at-fedavg-norms", "init-3")


class Shy(Strategy):
    """A user's own, with nothing that the table knows."""


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return ablate("fedsign", SMALL, seeds=2, controls=SOME, out=tmp_path_factory.mktemp("ablation") / "a", workers=1)


def lines(comparison: Comparison, key: str) -> list[list[dict[str, Any]]]:
    found = [comparison.result_of(cell) for cell in comparison.plan.cells if cell.strategy == key]
    return [list(each.records) for each in found]


@pytest.mark.parametrize("strategy", ["fedsign", "fedprox", "feddyn", "moon", "tests.ablation.test_ablate:Shy"])
def test_every_control_is_another_experiment_with_the_same_budget(strategy: str) -> None:
    config = prepared(strategy, config_of({"rounds": 7}))
    rows = controls_of(method_of(config))
    keys = [row.key for row in rows]
    assert keys[:2] == [FEDAVG, strategy] and len(keys) == len(set(keys)) and essential(strategy).key in keys
    made = [config.replace(**row.changes) for row in rows if row.norms is None]
    assert len({each.to_toml() for each in made}) == len(made)
    for each in made:
        assert (each.rounds, each.seed, each.server.cohort_size) == (7, config.seed, config.server.cohort_size)
        assert (each.data, each.partition, each.client.local_epochs) == (config.data, config.partition, 5)


def test_controls_at_norms_have_the_norms_of_the_run_of_their_seed(comparison: Comparison) -> None:
    for control, like in (("weight-norms", "fedsign"), ("at-fedavg-norms", FEDAVG)):
        ours, its = lines(comparison, control), lines(comparison, like)
        assert len(ours) == len(its) == 2 and its[0] != its[1]
        for mine, theirs in zip(ours, its, strict=True):
            wanted = [line["weight_norm"] for line in theirs]
            assert [line["weight_norm"] for line in mine] == pytest.approx(wanted, rel=1e-5)
    far = (
        [line["weight_norm"] for line in lines(comparison, FEDAVG)[0]],
        [line["weight_norm"] for line in lines(comparison, "fedsign")[0]],
    )
    assert abs(far[0][-1] - far[1][-1]) > 0.5  # or there would be nothing to hold


def test_finished_runs_are_not_run_again(comparison: Comparison) -> None:
    times = {path: path.stat().st_mtime_ns for path in comparison.cells.rglob("rounds.jsonl")}
    again = ablate("fedsign", SMALL, seeds=2, controls=SOME, out=comparison.path, workers=1)
    assert {path: path.stat().st_mtime_ns for path in again.cells.rglob("rounds.jsonl")} == times
    with pytest.raises(ResultsError, match="was made by 'fedsign ablate'"):
        go_on(comparison.path)
    with pytest.raises(
        ResultsError, match=r"holds another plan: controls were \[.*'init-3'\] there and are \['own-sign'\] now;"
    ):
        ablate("fedsign", SMALL, seeds=2, controls=["own-sign"], out=comparison.path)
    other = {**SMALL, "rounds": 6}
    with pytest.raises(ResultsError, match="holds another plan: the experiment's configuration differs;"):
        ablate("fedsign", other, seeds=2, controls=SOME, out=comparison.path)
    with pytest.raises(ConfigError, match="no seed was given"):
        ablate("fedsign", SMALL, seeds=0, out=comparison.path)
    with pytest.raises(ConfigError, match="control 'own' of fedsign is not known"):
        ablate("fedsign", SMALL, controls=["own"], out=comparison.path)


def test_an_ablation_that_was_stopped_before_its_controls_at_norms_goes_on(comparison: Comparison) -> None:
    """As a stop leaves it: the plan knows no such control yet, and runs that they follow have ended since."""
    whole = comparison.plan
    followers = [cell for cell in whole.cells if cell.strategy in ("weight-norms", "at-fedavg-norms")]
    before = {cell.id: list(comparison.result_of(cell).records) for cell in followers}
    names = {cell.strategy for cell in followers}
    labels = {key: label for key, label in whole.labels.items() if key not in names}
    comparison.write_plan(
        replace(whole, cells=tuple(cell for cell in whole.cells if cell not in followers), labels=labels)
    )
    for cell in followers:
        shutil.rmtree(comparison.cells / cell.id)
    again = ablate("fedsign", SMALL, seeds=2, controls=SOME, out=comparison.path, workers=1)
    assert again.plan.cells == whole.cells
    assert {cell.id: list(again.result_of(cell).records) for cell in followers} == before


def test_the_page_and_the_numbers_say_what_the_runs_say(comparison: Comparison) -> None:
    found = read(comparison)
    page, numbers = render(found), json.loads(json.dumps(as_json(found)))
    assert [row["key"] for row in numbers["rows"]] == [FEDAVG, "fedsign", *SOME]
    assert numbers["experiment"]["strategy"]["gamma"] == SMALL["strategy"]["gamma"]
    values = {row["key"]: [*row["values"].values()] for row in numbers["rows"]}
    by_hand = np.mean(np.subtract(values["fedsign"], values["own-sign"]))
    assert found.needed is not None and found.needed.mean == pytest.approx(by_hand)
    for text in ("Ablated parts", "Received signs not kept, log scale", "FedAvg at FedSign’s weight norms"):
        assert text in page
    assert all(sentence.replace("'", "&#39;") in page for sentence in found.sentences)


def test_a_control_that_diverged_leaves_room_for_the_others(comparison: Comparison) -> None:
    found = read(comparison)
    *others, row = found.rows
    assert row.to_fedavg is not None
    far = replace(row.to_fedavg, interval=replace(row.to_fedavg.interval, mean=-1e6, low=-2e6, high=-1e5))
    far_row = replace(found, rows=(*others, replace(row, to_fedavg=far)))
    chart = differences(far_row)
    assert chart.x.limits is not None and chart.x.limits[0] > -1e5
    (mark,) = plots.rows(chart)[-1]["marks"]
    assert mark["low"] == mark["place"] == mark["high"] == 0.0 and mark["beyond"] == ["left"]
    assert "−1.00e+08 [−2.00e+08" in mark["text"] and 'class="beyond left"' in render(far_row)


def test_a_share_of_the_gain_has_fiellers_interval() -> None:
    """Its ends are the shares x for which the paired t-test of control - x * regularizer gives p = 0.05."""
    random = np.random.default_rng(0)
    gain = 2 + random.normal(size=12)
    reached = 0.6 * gain + 0.3 * random.normal(size=12)
    of = [dict(enumerate(map(float, values))) for values in (reached, gain, np.zeros(12))]
    share = share_of_gain(*of)
    assert share is not None and share.low is not None and share.high is not None
    assert share.mean == pytest.approx(reached.mean() / gain.mean())
    for end in (share.low, share.high):
        assert stats.ttest_1samp(reached - end * gain, 0).pvalue == pytest.approx(0.05, rel=1e-9)
    assert math.isclose(stats.ttest_1samp(reached - share.mean * gain, 0).pvalue, 1.0)


@pytest.mark.parametrize("says", ["better", UNDECIDED])
def test_shares_are_shown_only_of_a_gain_whose_verdict_is_better(
    says: Says, comparison: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gain's own interval is above 0 either way."""

    def told(*given: Any, **more: Any) -> dict[tuple[str, str], reading.Difference]:
        found = reading_differences(*given, **more)
        gain = found["fedsign", FEDAVG]
        found["fedsign", FEDAVG] = replace(gain, says=says, interval=replace(gain.interval, mean=0.1, low=0.01))
        return found

    reading_differences = reading.differences
    monkeypatch.setattr(reading, "differences", told)
    assert any(row.share is not None for row in read(comparison).rows) == (says == "better")


def test_what_has_no_regularizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="fedavg was given, which is what a regularizer is compared with"):
        prepared(FEDAVG, config_of({}))
    with pytest.raises(ConfigError, match="is Flower's own"):
        method_of(prepared("flower_fedadam", config_of({})))


@pytest.mark.parametrize(
    ("path", "data"),
    [
        (path, tomllib.loads(path.read_text(encoding="utf-8")).get("data", {}).get("name", "digits"))
        for path in sorted(Path(__file__).parents[2].joinpath("benchmarks", "ablations").glob("*.toml"))
    ],
    ids=lambda given: given.stem if isinstance(given, Path) else given,
)
def test_the_experiments_of_the_published_ablations_are_configurations(path: Path, data: str) -> None:
    config = load(path, [])
    assert (
        config.name == path.stem
        and config.data.name == data
        and config.strategy.name == "fedsign"
        and config.client.path == "auto"
    )


def test_a_loss_has_no_shares_and_is_not_explained_as_a_gain(tmp_path: Path) -> None:
    strong = {**SMALL, "rounds": 8, "strategy": {"name": "fedsign", "gamma": 5.0}}
    found = read(ablate("fedsign", strong, seeds=3, controls=["own-sign"], out=tmp_path / "a", workers=1))
    assert found.gain is not None and found.gain.interval.mean < 0
    assert [row.share for row in found.rows] == [None] * 3
    assert not any("the gain" in sentence for sentence in found.sentences)


def test_the_page_of_the_published_ablations_is_what_the_results_make() -> None:
    assert published.PAGE.read_text(encoding="utf-8") == published.page(), "run python -m benchmarks.ablations"
