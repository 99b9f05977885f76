"""Metrics by client on the page of a run: what is drawn and listed, and that it stays small."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fedsign.client_metrics.report import section
from fedsign.report import summary
from fedsign.report.page import write_report
from fedsign.report.sections import Section
from fedsign.storage.results import RunFolder
from tests.e2e.test_page import CHROMIUM, look
from tests.unit.test_report import a_line, a_run, words

HALVES = [[4, 0], [0, 2], [3, 1]]  # three clients, two classes


def with_clients(
    path: Path, class_accuracies: Sequence[Any], counts: Sequence[Sequence[int]] = HALVES, **run: Any
) -> RunFolder:
    """A run in whose rounds the clients 0 and 1 took part."""
    rounds = [a_line(n) for n in range(1, len(class_accuracies) + 1)]
    folder = a_run(path, rounds, counts=counts, class_names=["a", "b"], **run)
    for round, by_class in enumerate(class_accuracies, start=1):
        record = {"round": round, "clients": [0, 1], "num_examples": [4, 2], "train_loss": [0.1, 0.2]}
        folder.append("clients.jsonl", record | {"drift": [1.0, 3.0], "class_accuracy": by_class})
    return folder


def section_of(folder: RunFolder) -> Section:
    found = section(summary.read(folder))
    assert found is not None
    return found


def test_a_run_without_the_file_has_no_section(tmp_path: Path) -> None:
    assert section(summary.read(a_run(tmp_path, [a_line(1)]))) is None


def test_few_clients_are_lines_of_their_own(tmp_path: Path) -> None:
    """Accuracies 0.8 of class a and 0.4 of class b: the third client, with 3 and 1 samples, has 0.7."""
    (chart,) = section_of(with_clients(tmp_path, [[0.8, 0.4], None, [0.6, 0.2]])).charts
    drawn = {each.name: [*each.y] for each in chart.series}
    assert drawn == {
        "client 0": [0.8, 0.6],
        "client 1": [0.4, 0.2],
        "client 2": [pytest.approx(0.7), pytest.approx(0.5)],
    }
    assert [[*each.x] for each in chart.series] == [[1, 3]] * 3


def test_many_clients_are_quantiles_and_the_two_extremes(tmp_path: Path) -> None:
    """Client k of 0, ..., 20 has the accuracy k/20: the median is 0.5, 80 % lie from 0.1 to 0.9."""
    counts = [[client, 20 - client] for client in range(21)]
    (chart,) = section_of(with_clients(tmp_path, [[1.0, 0.0]], counts)).charts
    median, best, worst = chart.series
    assert ([*median.y], [*median.low], [*median.high]) == ([0.5], [pytest.approx(0.1)], [pytest.approx(0.9)])
    assert (best.name, [*best.y]) == ("best: client 20", [1.0])
    assert (worst.name, [*worst.y]) == ("worst: client 0", [0.0])


def test_a_client_whose_classes_have_no_test_samples_is_no_extreme(tmp_path: Path) -> None:
    counts = [[0, 5], *([client, 0] for client in range(1, 23))]
    found = section_of(with_clients(tmp_path, [[0.25, None], None], counts))
    median, best, worst = found.charts[0].series
    assert [[*each.y] for each in (median, best, worst)] == [[0.25]] * 3
    assert (best.name, worst.name) == ("best: client 1", "worst: client 1")
    assert found.table is not None and found.table.rows[-1] == ("0", ["5", "1", "2", "–", "1.00", "0"])


def test_counts_that_stay_with_the_clients_give_no_accuracy(tmp_path: Path) -> None:
    folder = with_clients(tmp_path, [[0.8, 0.4]], [])
    folder.write_json("partition.json", {"class_names": ["a", "b"], "counts": [], "counts_are_private": True})
    found = section_of(folder)
    assert not found.charts and found.table is not None
    assert [(name, cells[0]) for name, cells in found.table.rows] == [("1", "2"), ("0", "4")]


def test_the_table_begins_with_the_lowest_accuracy(tmp_path: Path) -> None:
    failures = [{"round": 1, "partition": 2, "reason": "ill"}, {"round": 2, "partition": 2, "reason": "ill"}]
    table = section_of(with_clients(tmp_path, [[0.8, 0.4]] * 2, failures=failures)).table
    assert table is not None
    assert [*table.heads] == ["client", "samples", "classes", "rounds", "accuracy", "update norm", "failures"]
    assert [(name, *cells) for name, cells in table.rows] == [
        ("1", "2", "1", "2", "40.0\u202f%", "3.00", "0"),
        ("2", "4", "2", "0", "70.0\u202f%", "–", "2"),
        ("0", "4", "1", "2", "80.0\u202f%", "1.00", "0"),
    ]


def test_sites_show_the_accuracy_that_they_measured(tmp_path: Path) -> None:
    folder = with_clients(tmp_path, [None])
    folder.append(
        "sites.jsonl", {"round": 1, "sites": [{"client": 1, "accuracy": 0.25}, {"client": 0, "accuracy": 0.5}]}
    )
    found = section_of(folder)
    assert not found.charts and "own test samples" in found.lead
    assert found.table is not None
    assert [(name, cells[3]) for name, cells in found.table.rows] == [
        ("1", "25.0\u202f%"),
        ("0", "50.0\u202f%"),
        ("2", "–"),
    ]


def test_without_accuracy_the_table_begins_with_the_largest_updates(tmp_path: Path) -> None:
    found = section_of(with_clients(tmp_path, [None]))
    assert not found.charts and found.table is not None and "accuracy" not in found.table.heads
    assert [name for name, _ in found.table.rows] == ["1", "0", "2"]


def test_the_counted_clients_of_a_large_population_are_named_by_their_numbers(tmp_path: Path) -> None:
    folder = with_clients(tmp_path, [[1.0, 0.0]], [[1, 1], [2, 0]])
    content = {"class_names": ["a", "b"], "counts": [[1, 1], [2, 0]], "counted_clients": [0, 999]}
    folder.write_json("partition.json", content)
    found = section_of(folder)
    assert [each.name for each in found.charts[0].series] == ["client 0", "client 999"]
    assert found.table is not None and [name for name, _ in found.table.rows] == ["0", "999", "1"]


def test_a_page_of_many_clients_and_rounds_stays_small_and_needs_no_torch(tmp_path: Path) -> None:
    counts = [[client + 1, 1000 - client] for client in range(1000)]
    folder = with_clients(tmp_path, [[n / 1000, 0.5] for n in range(1000)], counts)
    code = f"""
import sys
from pathlib import Path
from fedsign.report.page import write_report
from fedsign.storage.results import RunFolder
write_report(RunFolder(Path({str(tmp_path)!r})))
print({{"torch", "flwr", "matplotlib"}} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
    page = (folder.path / "report.html").read_text(encoding="utf-8")
    assert len(page) < 700_000
    assert "The first 100 of 1,000; clients.jsonl has all of them." in words(page)


@pytest.mark.page
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path")
@pytest.mark.parametrize("num_clients", [20, 40])
def test_it_fits_a_phone_and_a_desk(num_clients: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    counts = [[client + 1, 1000] for client in range(num_clients)]
    write_report(with_clients(folder, [[n / 30, 1 - n / 30] for n in range(30)], counts))
    for width in (360, 1200):
        found, console = look(folder, width, tmp_path / f"profile{width}")
        assert (found["innerWidth"], console) == (width, "")
        assert found["scrollWidth"] <= width
        assert len(found["drawn"]) == 4  # the metric, the loss, the traffic, and the clients' accuracy
        assert all(left >= 0 and right <= width and height > 100 for left, right, height in found["drawn"])
