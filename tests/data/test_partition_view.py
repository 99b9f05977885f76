"""`fedsign partition` and partition.json describe the partition of any data."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedsign.config import from_dict
from fedsign.data.base import Dataset, Samples
from fedsign.data.partition.base import Split
from fedsign.errors import ConfigError, DataError
from fedsign.workload import Workload
from simulations import partition_view
from simulations.api import partition_record
from simulations.cli import app


def made(dataset: Dataset, *, split: Split) -> Workload:
    """A workload whose data and split are given."""
    work = Workload(from_dict({"partition": {"num_clients": len(split.indices)}, "server": {"cohort_size": 1}}))
    work.__dict__.update(dataset=dataset, split=split)  # where cached_property keeps them
    return work


def data(targets: list[float] | list[int], *, class_names: tuple[str, ...] = ()) -> Dataset:
    train = Samples(features=torch.zeros(len(targets), 1), targets=torch.tensor(targets))
    return Dataset(train=train, test=train, class_names=class_names)


def parts(*indices: list[int]) -> list[Any]:
    return [np.array(part, dtype=np.int64) for part in indices]


def test_the_facts_of_a_split_by_hand() -> None:
    """Labels aaab | bb | a: shares of a are 3/4, 0 and 1, of all samples 4/7; the distances to it are |p - 4/7|."""
    work = made(
        data([0, 0, 0, 1, 1, 1, 0], class_names=("a", "b")),
        split=Split(indices=parts([0, 1, 2, 3], [4, 5], [6]), num_moved=2, moved_label_distance=0.25),
    )
    facts = partition_view.describe(work)
    assert facts["samples"] == {"total": 7, "left_out": 0, "min": 1, "median": 2, "max": 4}
    assert facts["classes"] == {"total": 2, "min": 1, "mean": pytest.approx(4 / 3), "max": 2}
    assert facts["label_skew"] == pytest.approx(((3 / 4 - 4 / 7) + 4 / 7 + 3 / 7) / 3)
    assert facts["counts"] == [[3, 1], [0, 2], [1, 0]]
    said = {name: (value, remark) for name, value, remark in partition_view.rows(facts)}
    assert said["moved"][0] == "2 samples" and "0.2500" in said["moved"][1]
    assert json.loads(json.dumps(facts)) == facts


def test_a_regression_shows_sizes_and_what_a_users_own_partition_left_out() -> None:
    facts = partition_view.describe(made(data([0.5, 1.5, 2.5, 3.5]), split=Split(indices=parts([0, 2], [1]))))
    assert facts["classes"] is None and facts["label_skew"] is None
    said = {name: (value, remark) for name, value, remark in partition_view.rows(facts)}
    assert said["training samples"] == ("3", "1 more are left out")
    assert "label skew" not in said and "classes per client" not in said


@pytest.mark.needs("tables")
def test_data_of_a_file_are_called_after_it(tmp_path: Path) -> None:
    (tmp_path / "wine.csv").write_text("x,target\n" + "".join(f"{n}.5,{n % 2}\n" for n in range(20)))
    tree = {"data": {"name": "csv", "path": str(tmp_path / "wine.csv")}, "partition": {"name": "iid", "num_clients": 2}}
    config = from_dict(tree | {"server": {"cohort_size": 1}})
    assert partition_view.describe(Workload(config))["data"] == "wine.csv"


def test_the_record_of_a_run_says_what_was_moved_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    """Digits among 100 clients: minimum 4 of 14 on average, which no draw gives."""
    work = Workload(from_dict({"partition": {"num_clients": 100}}))
    with caplog.at_level(logging.WARNING, logger="fedsign"):
        record = partition_record(work)
    assert record["num_moved"] == work.split.num_moved > 0
    assert record["moved_label_distance"] == work.split.moved_label_distance
    assert min(sum(row) for row in record["counts"]) == 4
    [line] = caplog.messages
    assert f"{record['num_moved']} of 1,437 samples were moved" in line and "dirichlet" in line


def test_a_run_of_which_nothing_was_moved_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    record = partition_record(Workload(from_dict({})))
    assert (record["num_moved"], record["moved_label_distance"], caplog.messages) == (0, 0.0, [])


def facts_of(num_clients: int, *, class_names: tuple[str, ...] = ("<a>", "b")) -> dict[str, Any]:
    """Of clients with 1 to 7 samples of each class."""
    targets: list[float] | list[int] = []
    indices: list[list[int]] = []
    for client in range(num_clients):
        own = [label for label in range(len(class_names) or 1) for _ in range(1 + client % 7)]
        indices.append([*range(len(targets), len(targets) + len(own))])
        targets += own if class_names else map(float, own)
    split = Split(indices=parts(*indices), num_moved=3)
    return partition_view.describe(made(data(targets, class_names=class_names), split=split)) | {"data": "my <data>"}


@pytest.mark.parametrize(("num_clients", "shown"), [(1, 1), (10, 10), (100, 100), (1_000, 160)])
@pytest.mark.parametrize("class_names", [("<a>", "b"), ()])
def test_the_page_stands_alone_and_shows_the_clients(
    num_clients: int, shown: int, class_names: tuple[str, ...], tmp_path: Path
) -> None:
    partition_view.draw(facts_of(num_clients, class_names=class_names), tmp_path / "split.html")
    page = (tmp_path / "split.html").read_text(encoding="utf-8")
    (samples, *classes) = page.split('<div class="columns">')[1:]
    assert samples.count('<i title="client ') == shown and len(classes) == bool(class_names)
    bars = page.partition('class="bar" d="')[2].partition('"')[0]
    assert bars.count("h.86") == shown
    assert (
        "<script" not in page
        and "my &lt;data&gt;" in page
        and "3 samples" in page
        and "prefers-color-scheme: dark" in page
    )
    assert ("share of each class" in page) == bool(class_names)
    assert "times sampled" not in page, "nothing was trained"
    assert ("Shown are 160 of the 1,000" in page) == (num_clients == 1_000)
    assert "nothing was trained" in page and "beside this page" not in page


@pytest.mark.parametrize("suffix", [".svg", ".pdf", ".png"])
def test_the_picture_is_a_file_of_the_kind_that_its_name_says(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"split{suffix}"
    partition_view.draw(facts_of(30), path)
    begins = {".svg": b"<?xml", ".pdf": b"%PDF", ".png": b"\x89PNG"}
    assert path.read_bytes().startswith(begins[suffix])


def test_a_name_of_another_kind_is_refused_before_data_is_read() -> None:
    with pytest.raises(ConfigError, match=r"--out split\.gif .* \.svg, \.pdf, \.png, \.html"):
        partition_view.inspect(Path("no such file.toml"), [], Path("split.gif"))


def test_the_command_draws_into_the_current_folder_and_json_draws_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["partition", "--json", "--set", "partition.name=shards"])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["partition"] == {"name": "shards", "shards_per_client": 2} and facts["picture"] is None
    assert sum(map(sum, facts["counts"])) == 1437 and not list(tmp_path.iterdir())
    done = CliRunner().invoke(app, ["partition"])
    assert done.exit_code == 0, done.output
    assert "digits: dirichlet, alpha = 0.1" in done.stdout and "partition.svg" in done.stdout
    assert "50 clients with 1,437 training samples" in (tmp_path / "partition.svg").read_text(encoding="utf-8")


def test_what_cannot_be_split_is_the_partitions_own_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="says who owns each sample"):
        partition_view.inspect(None, ["partition.name=natural"], tmp_path / "x.svg")
    assert not list(tmp_path.iterdir())
