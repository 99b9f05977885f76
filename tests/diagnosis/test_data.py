"""The data doctor: each rule finds its seeded defect, and clean data have no finding."""

import json
import logging
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer, load_wine
from typer.testing import CliRunner

from fedsign.config import ExperimentConfig, from_dict
from fedsign.data.partition.lazy import NUM_COUNTED
from fedsign.diagnosis import table
from fedsign.diagnosis.data import RULES, examine, run_check
from fedsign.diagnosis.examined import Examined, _keys
from fedsign.diagnosis.finding import Finding
from fedsign.errors import ConfigError, DataError
from fedsign.overrides import parse_override
from fedsign.report.page import render
from fedsign.report.summary import read
from fedsign.workload import Workload
from simulations.api import partition_record, run
from simulations.cli import app
from tests.diagnosis.defects import settings_in

TABLE, IMAGES = "tests.diagnosis.defects:table", "tests.diagnosis.defects:images"
DIRICHLET = {"name": "dirichlet", "num_clients": 10}
IID = {"name": "iid", "num_clients": 10}


def workload(data: dict[str, Any], partition: dict[str, Any] | None = None, **tree: Any) -> Workload:
    return Workload(from_dict({"data": data, "partition": partition or IID, **tree}))


def found(data: dict[str, Any], partition: dict[str, Any] | None = None, **tree: Any) -> list[Finding]:
    return [finding for _, finding in examine(workload(data, partition, **tree))]


REGRESSION = {"task": "regression", "metrics": ["rmse"]}
DEFECTS: list[tuple[str, dict[str, Any], str, str, str]] = [
    # data, changes, rule, numbers in the message, remedy
    ("scales", {}, "feature-scales", "(feature 7)", "--set data.normalize=per_channel"),
    ("large", {}, "feature-range", "root mean square of 48,", "--set data.normalize=per_channel"),
    ("tiny", {}, "feature-range", "from -0.00", "--set data.normalize=per_channel"),
    ("constant", {}, "constant-features", "1 of 12 features", "np.delete(x, [4], axis=1)"),
    (
        "repeated feature",
        {},
        "duplicate-features",
        "1 of 12 features repeat others (feature 5 equals feature 2)",
        "[5]",
    ),
    ("copied samples", {}, "duplicate-samples", "40 of 640 training samples", "leave out"),
    ("leak", {}, "test-overlap", "20 of 140 test samples", "take them out"),
    ("nobody's class", {}, "empty-classes", "1 of 4 classes have no training samples: '3'", "without gaps"),
    ("class of the test", {}, "empty-classes", "1 of 3 classes have no training samples: '2'", "out of the test"),
    ("from 1", {}, "first-label", "labels are from 1 to 3", "subtract 1"),
    ("one class", {}, "one-class", "all 600 training samples have the class '1'", "two classes"),
    ("one class in the test", {}, "one-test-class", "all 120 test samples have the class '0'", "all classes"),
    ("one target", REGRESSION, "one-target", "the target 2", "different targets"),
    ("large targets", REGRESSION, "target-range", "the mean 19.8", "subtract their mean"),
    ("rare class", {}, "single-class-clients", "of 10 clients have samples of one class", "lower"),
]


@pytest.mark.parametrize(("defect", "changes", "rule", "words", "remedy"), DEFECTS, ids=[row[0] for row in DEFECTS])
def test_a_seeded_defect_is_the_one_finding(
    defect: str, changes: dict[str, Any], rule: str, words: str, remedy: str
) -> None:
    data = {"name": TABLE, "defect": defect, "regression": changes == REGRESSION}
    (finding,) = found(data, **changes)
    assert (finding.rule, finding.source, finding.round) == (rule, "data", 0)
    assert words in finding.message and remedy in finding.remedy, str(finding)


@pytest.mark.parametrize(
    ("defect", "rule", "words", "remedy"),
    [
        ("gray", "image-modes", "62 of 200 images examined are gray", "all of them gray or all of them color"),
        ("bytes", "feature-range", "from 0 to 255", "--set data.normalize=unit"),
        ("bands", "feature-scales", "(channel 2)", "--set data.normalize=per_channel"),
        ("12 bits in 16", "feature-range", "from 0 to 0.06", "--set data.normalize=unit"),
        ("blank", "constant-images", "3 of 200 training images have one value in all pixels", "look at some of them"),
    ],
)
def test_a_seeded_defect_of_images_is_the_one_finding(defect: str, rule: str, words: str, remedy: str) -> None:
    (finding,) = found({"name": IMAGES, "defect": defect})
    assert finding.rule == rule and words in finding.message and remedy in finding.remedy, str(finding)


@pytest.mark.parametrize("name", [TABLE, IMAGES])
def test_what_a_remedy_says_clears_the_finding(name: str) -> None:
    rows = (
        DEFECTS
        if name == TABLE
        else [(each, {}, "", "", "") for each in ("gray", "bytes", "bands", "12 bits in 16", "blank")]
    )
    for defect, changes, *_ in rows:
        data = {"name": name, "defect": defect} | ({"regression": True} if changes == REGRESSION else {})
        (finding,) = found(data, **changes)
        overrides = dict(map(parse_override, settings_in(finding.remedy)))
        config = workload(data, **changes).config.replace(**(overrides or {"data.follows": True}))
        assert not examine(Workload(config)), defect


def test_clients_smaller_than_a_batch_are_a_finding_only_where_the_split_is_even() -> None:
    """600 samples over 60 clients are 10 each, fewer than 16; 37 clients can have 16."""
    data, small = {"name": TABLE}, {"num_clients": 60}
    (finding,) = found(data, {"name": "iid", **small})
    assert finding.rule == "small-clients"
    assert finding.message.startswith("60 of 60 clients have fewer samples than client.batch_size=16, the smallest 10")
    assert "--set client.batch_size=10 or --set partition.num_clients=37" in finding.remedy
    assert found(data, {"name": "iid", **small}, client={"batch_size": 10}) == []
    assert found(data, {"name": "iid", "num_clients": 37}) == []
    for uneven in ({"name": "dirichlet"}, {"name": "shards"}, {"name": "virtual", "samples_per_client": 5}):
        assert found(data, {**uneven, **small}) == []
    assert found(data, {"name": "iid", **small}, client={"batch_size": 600}) == [], "a batch of everything"


@pytest.mark.parametrize(
    ("data", "changes"),
    [
        ({"name": TABLE}, {}),
        ({"name": TABLE, "regression": True}, REGRESSION),
        ({"name": TABLE, "defect": "few values"}, {}),  # equal samples are to be expected
        ({"name": TABLE, "defect": "heavy tail", "normalize": "per_channel"}, {}),
        ({"name": TABLE, "defect": "scales", "normalize": "per_channel"}, {}),
        ({"name": TABLE, "defect": "large", "normalize": "unit"}, {}),
        ({"name": IMAGES}, {}),
        ({"name": IMAGES, "defect": "flat"}, {}),  # constant borders, but pixels
        ({"name": IMAGES, "defect": "flat", "normalize": "per_channel"}, {}),
        ({"name": IMAGES, "lazy": True}, {}),
    ],
    ids=str,
)
def test_clean_data_have_no_finding(data: dict[str, Any], changes: dict[str, Any]) -> None:
    assert found(data, **changes) == []


PYTEXT = {"name": "pytext", "block_length": 64}
LANGUAGE = {"task": "language", "metrics": []}
RECIPES: list[Any] = [
    ({"name": "digits"}, {"name": "dirichlet", "num_clients": 50}, {}),
    ({"name": "digits"}, {"name": "dirichlet", "num_clients": 100}, {}),
    ({"name": "digits", "flat": False}, {"name": "iid", "num_clients": 20}, {}),
    ({"name": "digits", "normalize": "per_channel"}, {"name": "shards", "num_clients": 20}, {}),
    ({"name": "synthetic"}, {"name": "dirichlet", "num_clients": 100}, {}),
    ({"name": "synthetic", "iid": True}, {"name": "natural", "num_clients": 50}, {}),
    ({"name": "synthetic", "alpha": 0.0, "beta": 0.0}, {"name": "natural", "num_clients": 50}, {}),
    pytest.param(PYTEXT, {"name": "natural", "num_clients": 10}, LANGUAGE, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("data", "partition", "tree"), RECIPES, ids=str)
def test_the_data_of_the_recipes_have_no_finding_with_any_seed(
    data: dict[str, Any], partition: dict[str, Any], tree: dict[str, Any]
) -> None:
    for seed in range(3):
        assert found(data, partition, seed=seed, **tree) == []


def test_the_rules_of_the_table_are_all_seeded() -> None:
    seeded = {row[2] for row in DEFECTS} | {"image-modes", "constant-images", "small-clients", "unreadable-sample"}
    assert {rule.name for rule in RULES if rule not in table.RULES} == seeded, "others: test_table.py"


def test_a_lazy_data_set_is_examined_by_a_few_samples_and_a_broken_one_is_a_finding() -> None:
    (finding,) = found({"name": IMAGES, "lazy": True, "defect": "bytes"})
    assert finding.rule == "feature-range"
    (finding,) = found({"name": IMAGES, "lazy": True, "defect": "broken"})
    assert finding.rule == "unreadable-sample" and "OSError: image file is truncated" in finding.message


@pytest.mark.needs("tables")
def test_equal_rows_of_a_table_of_categories_are_to_be_expected(tmp_path: Path) -> None:
    """400 rows of 5,112 possible ones (71 ages, 3 wards, 12 clinics, 2 outcomes) have some 16 equal pairs by chance."""
    random = np.random.default_rng(0)
    drawn = zip(*(random.integers(num, size=500) for num in (71, 3, 12, 2)), random.normal(size=500), strict=True)
    rows = [f"{age},w{ward},c{clinic},o{outcome},{target}" for age, ward, clinic, outcome, target in drawn]
    (tmp_path / "t.csv").write_text("age,ward,clinic,outcome,pressure\n" + "\n".join(rows))
    work = workload({"name": "csv", "path": str(tmp_path / "t.csv"), "target": "pressure"}, **REGRESSION)
    data = Examined(work)
    assert data.num_duplicates > 0.01 * len(work.dataset.train), "there would be nothing to expect"
    assert run_check(work) == []


def test_of_a_million_lazy_clients_only_the_counted_ones_are_drawn() -> None:
    work = workload({"name": TABLE}, {"name": "virtual", "num_clients": 1_000_000, "labels": "iid"})
    assert run_check(work) == []
    drawn = work.split.indices._draw.cache_info().misses  # type: ignore[attr-defined]
    assert drawn == NUM_COUNTED, "by the check of the partition; the doctor draws none"


@pytest.mark.parametrize("width", [1, 3, 700])
def test_keys_tell_rows_apart_by_single_bits_and_find_equal_ones(width: int) -> None:
    """Against NumPy's unique rows, on rows that differ in few, low bits."""
    import torch

    rows = torch.zeros(4000, width, dtype=torch.int32)
    random = np.random.default_rng(width)
    rows[np.arange(4000), random.integers(width, size=4000)] += torch.from_numpy(
        random.integers(1000, size=4000).astype(np.int32)
    )
    floats = rows.view(torch.float32)
    expected = np.unique(rows.numpy(), axis=0, return_inverse=True)[1].ravel()
    keys = np.unique(_keys(floats), return_inverse=True)[1].ravel()
    pairs = np.unique(np.stack([expected, keys]), axis=1)
    assert pairs.shape[1] == expected.max() + 1 == keys.max() + 1, "a one-to-one relation of groups"


@pytest.mark.parametrize("load", [load_wine, load_breast_cancer])
@pytest.mark.needs("tables")
def test_own_arrays_train_to_chance_with_a_warning_whose_remedy_reaches_0_95(
    load: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = load(return_X_y=True)
    np.savez(tmp_path / "own.npz", x=x.astype(np.float32), y=y)
    tree: dict[str, Any] = {
        "rounds": 15,
        "callbacks": [],
        "data": {"name": "npz", "path": str(tmp_path / "own.npz")},
        "partition": {"num_clients": 10},
        "results": {"root": str(tmp_path / "runs")},
    }
    with caplog.at_level(logging.WARNING, "fedsign"):
        before = run(tree | {"rounds": 5})
    (record,) = (each for each in before.folder.records("findings.jsonl") if each["source"] == "data")
    finding = Finding(**{key: record[key] for key in ("rule", "source", "message", "remedy", "round")})
    assert finding.rule == "feature-scales" and finding.remedy == "use --set data.normalize=per_channel"
    assert f"{finding}" in caplog.messages and finding.remedy in render(read(before.folder))
    value = before.final("accuracy")
    assert value is not None and value < 0.7, "there would be nothing to warn of"
    tree["data"]["normalize"] = "per_channel"
    after = run(tree)
    value = after.final("accuracy")
    assert value is not None and value > 0.95
    assert after.folder.records("findings.jsonl") == []


@pytest.mark.needs("tables")
@pytest.mark.parametrize(("low", "names"), [(1, ("1", "2", "3")), (5, ("5", "6", "7"))])
def test_labels_from_1_in_npz_make_no_phantom_class(low: int, names: tuple[str, ...], tmp_path: Path) -> None:
    x, y = load_wine(return_X_y=True)
    np.savez(tmp_path / "own.npz", x=x.astype(np.float32), y=y + low)
    work = workload({"name": "npz", "path": str(tmp_path / "own.npz"), "normalize": "per_channel"}, DIRICHLET)
    data = work.dataset
    assert data.class_names == names and data.num_outputs == 3
    assert np.unique(data.train.targets.numpy()).tolist() == [0, 1, 2]
    assert run_check(work) == []
    (sentence,) = data.read_as
    assert f"labels are {', '.join(names)}" in sentence


@pytest.mark.needs("tables")
def test_a_single_class_is_refused_and_leaves_no_run_behind(tmp_path: Path) -> None:
    x, y = load_wine(return_X_y=True)
    np.savez(tmp_path / "own.npz", x=x[y == 1].astype(np.float32), y=y[y == 1])
    tree = {"data": {"name": "npz", "path": str(tmp_path / "own.npz")}, "partition": IID}
    with pytest.raises(DataError, match=r"all 56 training samples have the class '1'.*give samples of at least two"):
        run({**tree, "callbacks": [], "results": {"root": str(tmp_path / "runs")}})
    assert not (tmp_path / "runs").exists()


@pytest.mark.needs("tables")
def test_columns_of_a_table_are_named_with_the_setting_that_leaves_them_out(tmp_path: Path) -> None:
    rows = ["age,site,years,ward,zip,ill"]
    random = np.random.default_rng(0)
    for age in random.normal(50, 10, size=300):
        ward = random.integers(3)
        rows.append(f"{age:.3f},7,{age:.3f},{'ABC'[ward]},{('x', 'y', 'z')[ward]},{random.integers(2)}")
    (tmp_path / "t.csv").write_text("\n".join(rows))
    data = {"name": "csv", "path": str(tmp_path / "t.csv"), "target": "ill"}
    constant, repeated = found(data)
    assert (constant.rule, repeated.rule) == ("constant-features", "duplicate-features")
    assert "(column 'site')" in constant.message and "--set 'data.unused=[\"site\"]'" in constant.remedy
    assert "(columns 'years', 'zip' equal columns 'age', 'ward')" in repeated.message
    assert '--set \'data.unused=["years", "zip"]\'' in repeated.remedy
    assert found({**data, "unused": ["site", "years", "zip"]}) == [], "the remedy"


@pytest.mark.needs("tables")
def test_a_large_target_of_a_table_is_scaled_by_the_remedy(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    x, noise = random.normal(size=(2, 300))
    lines = "\n".join(f"{a},{1e5 + 1e4 * a + b}" for a, b in zip(x, noise, strict=True))
    (tmp_path / "t.csv").write_text(f"x,price\n{lines}")
    data = {"name": "csv", "path": str(tmp_path / "t.csv"), "target": "price"}
    (finding,) = found(data, **REGRESSION)
    assert (finding.rule, finding.remedy) == ("target-range", "use --set data.scale_target=true")
    assert found({**data, "scale_target": True}, **REGRESSION) == []


def sites(folder: Path, *, engine: str = "superlink") -> dict[str, Any]:
    """Two sites, each with features of wrong scales, and of one class, which is no mistake at a site."""
    random = np.random.default_rng(0)
    for site in ("a", "b"):
        x = random.normal(size=(100, 5)).astype(np.float32) * [1, 1, 1, 1, 1000]
        (folder / site).mkdir()
        np.savez(folder / site / "data.npz", x=x, y=np.full(100, int(site == "b")))
    return {
        "data": {"name": "npz", "class_names": ["no", "yes"]},
        "partition": {"name": "sites", "num_clients": 2, "input_shape": [5]},
        "server": {"cohort_size": 2},
        "engine": {"name": engine},
    }


@pytest.mark.needs("tables", "deployment")
def test_a_node_logs_what_it_finds_in_its_own_data_and_sends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from clients.deployment.node import SuperNode
    from clients.node import EXPERIMENT_KEY
    from tests.contract.contexts import make_context

    config = from_dict(sites(tmp_path))
    context = make_context(
        1,
        node_config={"partition-id": 1, "data-root": str(tmp_path / "b")},
        run_config={EXPERIMENT_KEY: config.to_toml()},
    )
    with caplog.at_level(logging.WARNING, "fedsign"):
        assert SuperNode(context).answer_roll_call({}) == {}
    (line,) = caplog.messages
    assert line.startswith("features are orders of magnitude apart")
    assert "at every site" in line and "data.normalize=constants" in line, "statistics of one site are refused"
    assert run_check(Workload(config)) == [], "the server has no data"


@pytest.mark.needs("tables", "deployment")
def test_all_sites_in_one_process_are_examined_together(tmp_path: Path) -> None:
    tree = sites(tmp_path, engine="in_process")
    tree["partition"]["roots"] = [str(tmp_path / site) for site in ("a", "b")]
    assert [each.rule for each in found(**tree)] == ["feature-scales"]


@pytest.mark.needs("tables", "deployment")
def test_a_startup_kit_examines_its_data_for_an_experiment(tmp_path: Path) -> None:
    from simulations.deployment import provision
    from simulations.deployment.check import check_site
    from simulations.deployment.federation import Federation
    from simulations.deployment.startup_kits import open_startup_kit

    (tmp_path / "experiment.toml").write_text(from_dict(sites(tmp_path)).to_toml())
    federation = Federation(
        folder=tmp_path / "federation", name="test", hosts=("127.0.0.1",), port=1, bind="127.0.0.1", insecure=True
    )
    kit = provision.init(federation, [("berlin", None)], lifetime=timedelta(days=365)).kit("berlin")
    text = (kit / "site.toml").read_text().replace('data_root = ""', f'data_root = "{tmp_path / "a"}"')
    (kit / "site.toml").write_text(text)
    rows = {row["what"]: row for row in check_site(open_startup_kit(kit), tmp_path / "experiment.toml")}
    assert rows["samples"] == {"what": "samples", "state": "ok", "detail": "80 for training, 20 for the test"}
    assert rows["feature-scales"]["state"] == "warn"
    text = (tmp_path / "experiment.toml").read_text()
    (tmp_path / "other.toml").write_text(re.sub(r"input_shape = \[\s*5,\s*\]", "input_shape = [6]", text))
    rows = {row["what"]: row for row in check_site(open_startup_kit(kit), tmp_path / "other.toml")}
    assert rows["samples"]["state"] == "broken" and "of the shape [5]; expected [6]" in rows["samples"]["detail"]
    assert "samples" not in {row["what"] for row in check_site(open_startup_kit(kit))}


@pytest.mark.needs("language")
def test_text_has_no_scales_but_overlaps(tmp_path: Path) -> None:
    import random

    drawn = random.Random(0)
    for name in ("train", "test"):
        (tmp_path / name).mkdir()
        text = "".join(drawn.choices("abcdefgh ", k=40_000))
        (tmp_path / name / "a.txt").write_text(text)
    data = {"name": "text_folder", "root": str(tmp_path)}
    assert found(data, task="language", metrics=[]) == []
    (tmp_path / "test" / "a.txt").write_text((tmp_path / "train" / "a.txt").read_text())
    assert [each.rule for each in found(data, task="language", metrics=[])] == ["test-overlap"]


def check(*options: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["data", "check", *options])
    return done.exit_code, done.output


@pytest.mark.needs("tables")
def test_the_command_counts_no_labels_where_samples_have_several(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(50, 3))
    np.savez(tmp_path / "own.npz", x=x, y=np.stack([x[:, 0] > 0, x[:, 1] > 0, x[:, 2] < 9], axis=1).astype(int))
    own = [
        "--set",
        "task=tests.data.test_target:Own",
        "--set",
        "metrics=[]",
        "--set",
        "partition.name=iid",
        "--set",
        "partition.num_clients=10",
    ]
    code, text = check("--set", "data.name=npz", "--set", f"data.path={tmp_path / 'own.npz'}", *own)
    assert code == 0, text
    assert "targets: several labels per sample (3)" in text and "training samples of each class" not in text


def test_the_command_refuses_what_a_run_refuses() -> None:
    done = CliRunner().invoke(app, ["data", "check", "--set", "model.name=niid_cnn"])
    with pytest.raises(ConfigError, match="16x16 or more") as refused:
        run({"model": {"name": "niid_cnn"}})
    assert isinstance(done.exception, ConfigError) and str(done.exception) == str(refused.value)


def test_the_command_says_what_a_run_warns_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fedsign"):
        partition_record(Workload(from_dict({"partition": {"num_clients": 100}})))
    (warning,) = caplog.messages
    code, text = check("--set", "partition.num_clients=100")
    assert code == 0 and text.splitlines()[-1] == f"warning: {warning}" and "samples were moved" in warning


def test_the_command_lists_findings_and_fails_only_if_a_run_would_be_refused() -> None:
    code, text = check()
    first, features, classes = text.splitlines()
    assert (code, first) == (0, "1,437 training and 360 test samples, 50 clients: no finding")
    assert features == "features of a sample: 64"
    counts = np.bincount(workload({"name": "digits"}).dataset.train.targets)
    expected = ", ".join(f"{digit} {count}" for digit, count in enumerate(counts))
    assert classes == f"training samples of each class: {expected}"
    named = ["--set", f"data.name={TABLE}", "--set"]
    code, text = check(*named, "data.defect=leak")
    assert code == 0 and text.splitlines()[-1].startswith("test-overlap: 20 of 140 test samples")
    code, text = check(*named, "data.defect=one class", "--json")
    assert code == 1
    assert [(each["rule"], each["is_refused"]) for each in json.loads(text)] == [("one-class", True)]
    assert DataError.exit_code == ConfigError.exit_code == 2, "what it exits with if data cannot be read"


@pytest.mark.needs("comparison")
def test_a_comparison_warns_of_its_data_once_and_refuses_one_class(caplog: pytest.LogCaptureFixture) -> None:
    from simulations.comparison.execution import _check_parts

    def cells(defect: str) -> list[ExperimentConfig]:
        data = {"name": TABLE, "defect": defect}
        names = ("fedavg", "feddyn")
        return [from_dict({"data": data, "partition": IID, "strategy": {"name": name}}) for name in names]

    with caplog.at_level(logging.WARNING, "fedsign"):
        _check_parts(cells("scales"))
    (warning,) = caplog.messages
    assert warning.endswith("use --set data.normalize=per_channel.")
    with pytest.raises(DataError, match="all 600 training samples have the class"):
        _check_parts(cells("one class"))
