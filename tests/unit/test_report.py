"""The page of a run: correct numbers, described charts, no external resources, untrusted text escaped."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedsign.config import ExperimentConfig
from fedsign.errors import ResultsError
from fedsign.report import plots, run_charts, summary
from fedsign.report.chart import LARGEST, Chart, Series, decades, nice_ticks, value_axis
from fedsign.report.figures import draw, write
from fedsign.report.page import render, write_report
from fedsign.report.population import MAX_COLUMNS, Population
from fedsign.report.wording import NARROW_SPACE
from fedsign.storage.results import Record, RunFolder
from simulations.api import run
from simulations.callbacks.base import Callback

DIGITS = [str(digit) for digit in range(10)]
HOSTILE = '<script>alert("&")</script>'


def a_line(round: int, *, loss: float | None = 0.5, num_clients: int = 4, **values: Any) -> Record:
    """One line of rounds.jsonl."""
    return {
        "round": round,
        "loss": loss,
        "accuracy": 0.5,
        "train_loss": loss,
        "clients": [round % num_clients],
        "num_replies": 1,
        "failures": [],
        "bytes_down": 1000,
        "bytes_up": 500,
        **values,
    }


def a_run(
    path: Path,
    rounds: Sequence[Record] = (),
    *,
    counts: Sequence[Sequence[int]] = ((5,) * 10,) * 4,
    class_names: Sequence[str] = DIGITS,
    metrics: Sequence[str] = ("accuracy",),
    strategy: str = "fedsign",
    outcome: Record | None = None,
    failures: Sequence[Record] = (),
) -> RunFolder:
    """A run's folder as the program writes it."""
    folder = RunFolder(path)
    toml = f"""
        name = "trial"
        seed = 3
        rounds = 40
        metrics = {json.dumps(list(metrics))}
        data = {{ name = "digits" }}
        partition = {{ name = "dirichlet", num_clients = {len(counts)} }}
        model = {{ name = "mlp", hidden = [8, 8] }}
        strategy = {{ name = {json.dumps(strategy)}, gamma = 0.003 }}
        server = {{ cohort_size = 1 }}
        client = {{ lr = 0.05, optimizer = {{ name = "sgd" }} }}
        """
    (path / "config.toml").write_text(toml, encoding="utf-8")
    folder.write_json("environment.json", {"fedsign": "0.1.0", "git": ""})
    folder.write_json("partition.json", {"class_names": list(class_names), "counts": list(counts)})
    if outcome is not None:
        folder.conclude(outcome)
    for name, lines in (("rounds", rounds), ("failures", failures)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    timings = [{"round": line["round"], "train_s": 1.5, "evaluate_s": 0.5} for line in rounds]
    (path / "timings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in timings))
    return folder


def page_of(folder: RunFolder) -> str:
    return write_report(folder).read_text(encoding="utf-8")


def pictures(page: str) -> list[ElementTree.Element]:
    """Every <svg> of a page, parsed: fails where one is not well-formed."""
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def data(page: str) -> dict[str, Any]:
    """What the script of a page draws, by the titles of the charts."""
    titles = re.findall(r"<h3>([^<]*)</h3></figcaption>", page)
    found = re.findall(r'<script type="application/json">(.*?)</script>', page, re.DOTALL)
    return dict(zip(titles, map(json.loads, found), strict=True))


def words(page: str) -> str:
    """The page's text with single spaces."""
    text = re.sub(r"<style>.*?</style>|<script.*?</script>", "", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", text).replace(NARROW_SPACE, " ").split())


EDGES: dict[str, dict[str, Any]] = {
    "no round": {"rounds": []},
    "one round": {"rounds": [a_line(1)]},
    "only nulls": {"rounds": [a_line(n, loss=None, accuracy=None) for n in range(1, 13)]},
    "a null in the middle": {"rounds": [a_line(n, loss=None if n == 3 else 1.0) for n in range(1, 6)]},
    "an exploding loss": {"rounds": [a_line(n, loss=10.0 ** (n * 15)) for n in range(1, 21)]},
    "constant values": {"rounds": [a_line(n, loss=0.0, accuracy=1.0) for n in range(1, 13)]},
    "negative losses": {"rounds": [a_line(n, loss=-0.1 * n) for n in range(1, 13)]},
    "5000 rounds": {"rounds": [a_line(n, loss=1 / n) for n in range(1, 5001)]},
    "one client": {"rounds": [a_line(1)], "counts": [[7] * 10]},
    "a client without samples": {"rounds": [a_line(1)], "counts": [[7] * 10, [0] * 10]},
    "1000 clients": {"rounds": [a_line(1)], "counts": [[n, 1] + [0] * 8 for n in range(1000)]},
    "100 classes": {
        "rounds": [a_line(1)],
        "class_names": [f"class {n}" for n in range(100)],
        "counts": [[n % 7 for n in range(100)]] * 60,
    },
    "regression": {
        "rounds": [a_line(n, rmse=3.21) for n in range(1, 4)],
        "metrics": ["my.module:rmse"],
        "class_names": [],
        "counts": [[3], [400], [20]],
    },
    "no metric": {"rounds": [a_line(1)], "metrics": []},
    "hostile names": {"class_names": [HOSTILE, "\x00\x1b[31m"], "counts": [[1, 2]], "strategy": HOSTILE},
    "a long reason": {"failures": [{"round": 1, "partition": 3, "reason": "long" * 5000, "details": ""}]},
    "half a character": {"failures": [{"round": 1, "partition": 3, "reason": "\ud800", "details": ""}]},
}


@pytest.mark.parametrize("edge", EDGES)
def test_charts_have_a_text_alternative_and_a_static_picture_inside_its_box(edge: str, tmp_path: Path) -> None:
    page = page_of(a_run(tmp_path, **EDGES[edge]))
    drawn = re.findall(r'role="img" aria-label="([^"]*)"', page)
    assert len(drawn) == len(data(page)) + ("<h2>Clients</h2>" in page) >= 2 and all(drawn)
    for svg in pictures(page):
        numbers = " ".join(path.attrib["d"] for path in svg.iter("path"))
        assert "nan" not in numbers and "inf" not in numbers
    for place in re.findall(r'style="(?:left|bottom):([^%]*)%"', page):
        assert 0 <= float(place) <= 100


@pytest.mark.parametrize("edge", EDGES)
def test_nothing_is_loaded_and_no_script_but_ours_runs(edge: str, tmp_path: Path) -> None:
    page = page_of(a_run(tmp_path, **EDGES[edge]))
    markup = page.replace(plots.scripts(), "")
    assert "://" not in markup and "url(" not in markup and "@import" not in markup
    assert set(re.findall(r"""(?:src|href|srcset|action)\s*=\s*["']([^"']*)""", markup)) == {"data:,"}
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src '{plots.script_hash()}'"
    assert page.count("<script>") == 1 and policy in page


def test_names_reasons_and_configuration_are_escaped(tmp_path: Path) -> None:
    failures = [{"round": 1, "partition": 0, "reason": HOSTILE, "details": ""}]
    outcome = {"status": "failed", "error": HOSTILE}
    names = {"class_names": [HOSTILE], "counts": [[3]], "strategy": HOSTILE}
    page = page_of(a_run(tmp_path, [a_line(1)], failures=failures, outcome=outcome, **names))
    assert HOSTILE not in page and page.count("<script>") == 1
    assert page.count("&lt;script&gt;alert(") >= 4  # title and head, sentence, reason, configuration


def test_numbers_are_those_of_the_lines(tmp_path: Path) -> None:
    """Accuracies 0.10, 0.11, ... 0.29 end with (0.25 + ... + 0.29) / 5 = 0.27; losses 20/n for n = 16..20
    have the mean 4 * (1/16 + 1/17 + 1/18 + 1/19 + 1/20) = 1.118; 20 rounds of 1.5 s + 0.5 s are 40 s."""
    lines = [a_line(n, loss=20 / n, accuracy=0.09 + 0.01 * n) for n in range(1, 21)]
    text = words(page_of(a_run(tmp_path, lines, outcome={"status": "finished", "rounds": 20})))
    assert "finished" in text and "trial" in text and "gamma 0.003" in text
    assert "test accuracy 27.0 % mean of the last 5 rounds" in text
    assert "test loss 1.12 mean of the last 5 rounds" in text
    assert "rounds 20 of 40 planned" in text and "clients per round 1 of 4" in text
    assert "bytes down 20.0 kB" in text and "bytes up 10.0 kB" in text
    assert "wall time 40.0 s 2.0 s a round" in text
    assert "In 20 rounds a client was sampled 5 times" in text  # clients n % 4
    assert "client.optimizer name sgd" in text and "hidden 8, 8" in text
    assert (
        "/config.toml" in text.partition("In the folder where it was started: fedsign run ")[2]
        and "git no repository" in text
    )


@pytest.mark.needs("tables")  # which says that `path` names the data
def test_a_page_names_the_datas_file(tmp_path: Path) -> None:
    folder = a_run(tmp_path, [a_line(1)])
    config = tmp_path / "config.toml"
    config.write_text(config.read_text().replace('name = "digits"', 'name = "csv", path = "tables/wine.csv"'))
    assert "data wine.csv" in words(page_of(folder))


def test_a_model_of_many_settings_is_described_by_the_first_that_say_something() -> None:
    part = {"name": "gpt", "start": "", "weights": [], **{f"key{n}": n for n in range(9)}}
    assert summary._settings(part) == "key0 0, key1 1, key2 2, key3 3, key4 4, key5 5, 3 more"
    assert summary._settings({"name": "mlp", "start": "", "hidden": [8, 8]}) == "hidden 8, 8"


def test_a_metric_that_is_no_share_is_not_in_percent(tmp_path: Path) -> None:
    text = words(page_of(a_run(tmp_path, **EDGES["regression"])))
    assert "test rmse 3.21 mean of the last 3 rounds" in text and "321" not in text
    assert "smallest has 3, the median 20, the largest 400." in text and "classes on average" not in text


def test_bytes_are_added_up_over_the_rounds(tmp_path: Path) -> None:
    """40 rounds of 1000 bytes down and 500 up."""
    page = page_of(a_run(tmp_path, [a_line(n) for n in range(1, 41)]))
    down, up = data(page)["Traffic so far, kB"]["series"]
    assert (down["y"][-1], up["y"][-1]) == (40, 20)
    assert "server to clients 40.0" in words(page) and "clients to server 20.0" in words(page)
    assert "clients to server over 40 rounds, from 0.500 to 20.0" in page


def test_drift_and_validation_are_drawn_where_the_rounds_carry_them(tmp_path: Path) -> None:
    more = {"client_drift": 1.25, "update_norm": 3.0, "validation_accuracy": 0.875, "validation_loss": 0.75}
    for name, lines in (
        ("without", [a_line(n, client_drift=None) for n in range(1, 4)]),
        ("with", [a_line(n, **more) for n in range(1, 4)]),
    ):
        (tmp_path / name).mkdir()
        page = page_of(a_run(tmp_path / name, lines))
        said = words(page)
        assert ("Client drift" in said) == ("on validation samples" in said) == (name == "with")
        assert ("87.5 %" in said) == ("1.25" in said) == ("0.750" in said) == (name == "with")


def test_a_null_is_a_gap_and_is_named(tmp_path: Path) -> None:
    page = page_of(a_run(tmp_path, **EDGES["a null in the middle"]))
    assert "diverged in round 3: loss was not finite" in words(page)
    assert data(page)["Loss"]["series"][0]["y"] == [1, 1, None, 1, 1]
    loss = next(
        svg for svg in pictures(page[page.index("<h3>Loss</h3>") :]) if svg.find("path[@class='grid']") is not None
    )
    test_line = next(path for path in loss.iter("path") if path.get("class") == "line c1")
    assert test_line.attrib["d"].count("M") == 2  # rounds 1-2 and 4-5


def test_a_run_without_nulls_did_not_diverge(tmp_path: Path) -> None:
    assert "diverged" not in page_of(a_run(tmp_path, [a_line(1), a_line(2)]))


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (None, "This run is in progress or was interrupted"),
        ({"status": "failed", "error": "round 7 ended with 0 usable replies"}, "round 7 ended with 0"),
        ({"status": "finished", "rounds": 0}, "finished"),
    ],
)
def test_the_page_says_how_the_run_ended(outcome: Record | None, said: str, tmp_path: Path) -> None:
    assert said in words(page_of(a_run(tmp_path, outcome=outcome)))


def test_a_failure_in_both_files_is_listed_once(tmp_path: Path) -> None:
    """rounds.jsonl has the failures of complete rounds; that of round 2, which failed, is in the other only."""
    lines = [a_line(1, failures=[{"client": 3, "reason": "out of memory"}])]
    both = {"round": 1, "partition": 3, "reason": "out of memory", "details": "..."}
    last = {"round": 2, "partition": 1, "reason": "no reply", "details": ""}
    page = page_of(a_run(tmp_path, lines, failures=[both, last, last]))
    assert page.count("out of memory") == 1 and page.count("no reply") == 1


def test_a_run_stopped_before_its_partition_has_a_page(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    (tmp_path / "partition.json").unlink()
    assert "Learning curves" in page_of(folder) and "<h2>Clients</h2>" not in page_of(folder)


def test_a_damaged_configuration_is_a_results_error(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    (tmp_path / "config.toml").write_text("name = ")
    with pytest.raises(ResultsError, match=r"config\.toml"):
        write_report(folder)


def test_the_page_is_the_same_when_made_again(tmp_path: Path) -> None:
    folder = a_run(tmp_path, [a_line(1), a_line(2)])
    assert page_of(folder) == page_of(folder)


def test_of_many_clients_an_even_choice_with_both_extremes_is_shown(tmp_path: Path) -> None:
    population = Population(
        class_names=[], counts=[[size] for size in range(1, 1001)], times_sampled=[0] * 1000, num_rounds=0
    )
    shown = population.shown()
    assert len(set(shown)) == MAX_COLUMNS and {0, 999} <= set(shown)
    assert "Shown are 60 of the 1,000" in words(page_of(a_run(tmp_path, **EDGES["1000 clients"])))


def test_thousands_of_rounds_keep_their_spike_and_their_gap(tmp_path: Path) -> None:
    values = [None if x == 5000 else 100.0 if x == 3456 else 0.0 for x in range(10_000)]
    points = plots.points_of(Series(name="loss", x=range(10_000), y=values))
    kept = plots.thin(points, at_most=2000)
    assert len(kept) <= 2002 and points[3456] in kept and points[5000] in kept
    assert kept[0] == points[0] and kept[-1] == points[-1] and kept == sorted(kept, key=lambda point: point[0])
    assert len(page_of(a_run(tmp_path, **EDGES["5000 rounds"]))) < 600_000


def test_a_live_page_has_the_numbers_and_no_static_picture(tmp_path: Path) -> None:
    run = summary.read(a_run(tmp_path, [a_line(1), a_line(2)]))
    live, done = render(run, live=True), render(run)
    assert data(live) == data(done) and set(data(live)) == {"Test accuracy", "Loss", "Traffic so far, kB"}
    assert ('class="static"' in live, done.count('class="static"')) == (False, 3)


def test_the_license_of_uplot_is_named() -> None:
    folder = Path(plots.__file__).with_name("uplot")
    assert "MIT License" in (folder / "LICENSE").read_text() and "github.com/leeoniya/uPlot" in plots.scripts()[:100]
    assert len(plots.scripts().encode()) < 150_000


@pytest.mark.parametrize("is_log", [False, True])
def test_points_are_where_the_axis_says(is_log: bool) -> None:
    """Linear from 0 to 4: 1 is at a quarter.  Logarithmic from 1 to 10,000: 10 is at a quarter, 100 at the half."""
    values = [1.0, 10.0, 100.0, 1.0, 1e4, 1.0] if is_log else [1.0, 2.0, 4.0]
    chart = run_charts.line_chart("Loss", [Series(name="loss", x=range(len(values)), y=values)])
    ((_, _, path),) = plots.paths(chart)
    heights = [float(point.split()[1]) for point in path.removeprefix("M").split("L")]
    assert heights == ([1000, 750, 500, 1000, 0, 1000] if is_log else [750, 500, 0])


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=30))
def test_an_axis_of_values_holds_them_and_its_ticks(values: list[float]) -> None:
    axis = value_axis(values)
    assert all(-1e-6 <= axis.position(value) <= 1 + 1e-6 for value in [*values, *axis.ticks()])
    assert len(axis.ticks()) >= 2


def test_a_line_with_faint_draws_of_its_name_stands_in_the_legend_once() -> None:
    """The legend's value is the line's, not that of its draws."""
    draws = [Series(name="noise", x=[1, 2], y=[height, height], is_faint=True) for height in (0.0, 9.0)]
    lines = [Series(name="noise", x=[1, 2], y=[2.0, 3.0]), Series(name="sign", x=[1, 2], y=[1.0, 1.0], color=1)]
    chart = run_charts.line_chart("Loss", [*draws, *lines])
    assert [text.get_text() for text in draw(chart).legends[0].get_texts()] == ["noise", "sign"]
    assert [(name, value) for name, _, value in plots.legend(chart)] == [("noise", "3.00"), ("sign", "1.00")]


def test_matplotlib_draws_what_is_described(tmp_path: Path) -> None:
    """Lines have the description's points, gaps and names; the file has the text alternative."""
    series = [
        Series(name="first", x=[1, 2, 3], y=[1.0, None, 3.0]),
        Series(name="second", x=[1, 2, 3], y=[2.0, 3.0, 4.0], low=[1.0, 2.0, 3.0], high=[3.0, 4.0, 5.0], color=1),
    ]
    chart: Chart = run_charts.line_chart("Loss", series)
    figure = draw(chart)
    (axes,) = figure.axes
    first, second = axes.get_lines()
    assert first.get_xydata().tolist()[0] == [1, 1] and str(first.get_ydata()[1]) == "nan"
    assert second.get_ydata().tolist() == [2, 3, 4] and len(axes.collections) == 1
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["first", "second"]
    assert axes.get_ylim() == chart.y.limits and axes.get_xlim() == (1, 3)
    (path,) = write(lambda: draw(chart), tmp_path / "chart.svg")
    assert "second over 3 rounds, from 2.00 to 4.00" in path.read_text(encoding="utf-8")


@given(
    bounds=st.tuples(st.floats(-1e12, 1e12), st.floats(-1e12, 1e12)).map(sorted),
    at_most=st.integers(3, 10),
)
def test_ticks_ascend_are_round_few_and_cover(bounds: list[float], at_most: int) -> None:
    low, high = bounds
    ticks = nice_ticks(low, high, at_most=at_most)
    step = ticks[1] - ticks[0]
    slack = 1e-6 * step + 1e-9 * max(abs(low), abs(high))
    assert 2 <= len(ticks) <= at_most
    assert all(a < b for a, b in pairwise(ticks))
    assert ticks[0] <= low + slack and ticks[-1] >= high - slack
    mantissa = float(f"{step:.6e}".split("e")[0])
    assert min(abs(mantissa - nice) for nice in (1, 2, 2.5, 5, 10)) < 1e-2


@given(st.floats(1e-12, 1e12), st.floats(1, 1e12))
def test_decades_are_powers_of_ten_and_cover(low: float, ratio: float) -> None:
    ticks = decades(low, low * ratio)
    assert 2 <= len(ticks) <= 6 and ticks[0] <= low and ticks[-1] >= low * ratio
    assert all(f"{tick:e}".startswith("1.000000e") for tick in ticks)


def test_ticks_refuse_what_is_no_range() -> None:
    with pytest.raises(ValueError, match="low <= high"):
        nice_ticks(2, 1)


@given(st.lists(st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False)), max_size=30))
@example([1.0, 51.0, 5e-324])
def test_any_finite_values_can_be_drawn(values: list[float | None]) -> None:
    chart = run_charts.line_chart("Loss", [Series(name="loss", x=range(1, len(values) + 1), y=values)])
    drawn = json.loads(plots.data(chart))["series"][0]["y"]
    assert [value is None for value in drawn] == [value is None or abs(value) > LARGEST for value in values]
    assert "nan" not in str(plots.paths(chart)) and plots.ticks(chart.y) and plots.legend(chart)


def test_importing_the_page_pulls_in_nothing_heavy() -> None:
    code = "import sys, fedsign.report.page; print({'torch', 'flwr', 'matplotlib', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_page_is_written_while_the_run_goes_on_and_a_browser_loads_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simulations.callbacks.report._INTERVAL_S", 0.0)
    monkeypatch.setattr("simulations.callbacks.report._SHARE", 1e9)
    seen: list[str] = []

    class Reader(Callback):
        def on_start(self, folder: RunFolder, config: ExperimentConfig, records: list[Record]) -> None:
            self.page = folder.path / "report.html"

        def on_round(self, record: Record) -> None:
            seen.append(self.page.read_text())

    small = {"rounds": 3, "client": {"local_epochs": 1}, "results": {"root": str(tmp_path)}}
    done = run({**small, "callbacks": ["report"]}, callbacks=[Reader()])
    assert all('http-equiv="refresh"' in page and "unfinished" in page for page in seen) and len(seen) == 3
    assert 'http-equiv="refresh"' not in (done.path / "report.html").read_text()
