"""Clients with their own data: training, evaluation, and what is recorded about them."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import fsum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from clients.deployment.evaluator import samples_of_sites
from fedsign.config import from_dict
from fedsign.data.base import Dataset, LazySamples, Samples
from fedsign.data.normalize import Normalization
from fedsign.data.npz import npz
from fedsign.errors import ConfigError, DataError, FedSignError
from fedsign.metrics.accuracy import accuracy
from fedsign.records import EvaluateReply
from fedsign.report.page import write_report
from fedsign.storage.results import RunFolder
from fedsign.workload import Workload
from simulations import Run, run
from simulations.deployment.engine.server_app import complete_partition
from simulations.deployment.evaluation import EvaluationAtSites, evaluating, means
from simulations.partition_view import describe

SIZES = (60, 40, 30)
NUM_SITES = len(SIZES)
CLASS_NAMES = ["no", "yes"]


def write_site(folder: Path, size: int, *, seed: int, **arrays: Any) -> Path:
    """Two classes that a line divides, in a file of its own; the last fifth are test samples."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(size, 5)).astype(np.float32)
    y = (x[:, 0] + 0.3 * x[:, 1] > 0).astype(int)
    cut = size * 4 // 5
    parts = {"x_train": x[:cut], "y_train": y[:cut], "x_test": x[cut:], "y_test": y[cut:]}
    np.savez(folder / "data.npz", **{**parts, **arrays})
    return folder


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("sites")
    return [str(write_site(folder / f"clinic {k}", size, seed=k)) for k, size in enumerate(SIZES)]


def tree(root: Path, roots: list[str], **changes: Any) -> dict[str, Any]:
    whole = {
        "rounds": 2,
        "callbacks": [],
        "data": {"name": "npz", "class_names": CLASS_NAMES},
        "partition": {"name": "sites", "num_clients": len(roots), "roots": roots, "input_shape": [5]},
        "server": {"cohort_size": 2},
        "model": {"name": "mlp", "hidden": [8]},
        "client": {"local_steps": 3},
        "results": {"root": str(root), "checkpoint_every": 1},
    }
    for key, value in changes.items():
        known = whole.get(key)
        whole[key] = {**known, **value} if isinstance(known, dict) and isinstance(value, Mapping) else value
    return whole


def site_lines(done: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (done.path / "sites.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def reference(roots: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tree(tmp_path_factory.mktemp("run"), roots))


def test_a_client_trains_on_what_its_site_holds_and_on_nothing_else(roots: list[str], tmp_path: Path) -> None:
    work = Workload(from_dict(tree(tmp_path, roots)))
    for site, root in enumerate(roots):
        with np.load(Path(root) / "data.npz") as own:
            assert np.array_equal(work.samples_of(site).features.numpy(), own["x_train"])
            test, _ = samples_of_sites(work.dataset)[site]
            assert np.array_equal(test.features.numpy(), own["x_test"])


def test_without_roots_there_is_a_model_and_no_data(tmp_path: Path) -> None:
    """What a server sees: enough to make the model that the sites train."""
    config = from_dict(tree(tmp_path, ["", "", ""], engine={"name": "superlink"}))
    work = Workload(config)
    assert len(work.dataset.train) == len(work.dataset.test) == 0
    assert [tuple(p.shape) for p in work.make_model().parameters()] == [(8, 5), (8,), (2, 8), (2,)]
    with pytest.raises(DataError, match="client 1 has no samples in this process"):
        work.share_of(1)


def test_a_server_of_a_deployment_reads_no_sites_data_even_where_it_could(tmp_path: Path, roots: list[str]) -> None:
    work = Workload(from_dict(tree(tmp_path, roots, engine={"name": "superlink"})))
    assert len(work.dataset.train) == 0
    assert len(Workload(work.config, frozenset({1})).dataset.train) == SIZES[1] * 4 // 5


def test_loss_and_accuracy_of_the_sites_are_those_of_the_union_of_their_test_samples(
    reference: Run, roots: list[str]
) -> None:
    """mean over sites by n_k of the mean over their n_k samples = the mean over all samples."""
    work = Workload(reference.config)
    parts = [npz(0, path=f"{root}/data.npz", class_names=tuple(CLASS_NAMES)).test for root in roots]
    features = torch.cat([part.features for part in parts if isinstance(part, Samples)])
    targets = torch.cat([part.targets for part in parts])
    outputs = reference.model()(features)
    last = reference.rounds[-1]
    assert last["loss"] == pytest.approx(work.task.loss(outputs, targets).item(), rel=1e-6)
    assert last["accuracy"] == pytest.approx(accuracy(outputs, targets), rel=1e-12)


def test_a_rounds_figures_are_the_means_of_the_sites_lines_by_samples(reference: Run) -> None:
    lines = site_lines(reference)
    assert [line["round"] for line in lines] == [1, 2]
    for line, told in zip(lines, reference.rounds, strict=True):
        assert [site["client"] for site in line["sites"]] == [0, 1, 2]
        assert [site["name"] for site in line["sites"]] == ["clinic 0", "clinic 1", "clinic 2"]
        assert [site["num_test"] for site in line["sites"]] == [size // 5 for size in SIZES]
        assert [site["num_train"] for site in line["sites"]] == [size * 4 // 5 for size in SIZES]
        for key in ("loss", "accuracy"):
            weighted = [site["num_test"] * site[key] for site in line["sites"]]
            assert told[key] == fsum(weighted) / (sum(SIZES) // 5)


@pytest.mark.needs("workers")
@pytest.mark.slow
def test_workers_give_the_same_bits(reference: Run, roots: list[str], tmp_path: Path) -> None:
    done = run(tree(tmp_path, roots, engine={"workers": 2}))
    for name in ("rounds.jsonl", "sites.jsonl"):
        assert (done.path / name).read_bytes() == (reference.path / name).read_bytes()


def test_a_run_is_resumed_to_the_same_lines(reference: Run, roots: list[str], tmp_path: Path) -> None:
    half = run(tree(tmp_path, roots, rounds=1))
    done = run({"rounds": 2}, resume=half.path)
    for name in ("rounds.jsonl", "sites.jsonl"):
        assert (done.path / name).read_bytes() == (reference.path / name).read_bytes()


def test_the_model_that_sites_evaluate_is_counted_as_traffic(reference: Run) -> None:
    model = sum(4 * parameter.numel() for parameter in reference.model().parameters())
    assert [line["bytes_down"] for line in reference.rounds] == [(2 + NUM_SITES) * model] * 2


def test_a_number_of_sites_may_evaluate_and_every_round_draws_its_own(roots: list[str], tmp_path: Path) -> None:
    done = run(tree(tmp_path, roots, rounds=6, server={"evaluate_clients": 1}))
    asked = [[site["client"] for site in line["sites"]] for line in site_lines(done)]
    assert asked == [evaluating(done.config, round) for round in range(1, 7)]
    assert {len(sites) for sites in asked} == {1} and len({tuple(sites) for sites in asked}) > 1


def test_the_server_evaluates_on_test_samples_of_its_own(roots: list[str], tmp_path: Path) -> None:
    """All samples that lie there are test samples."""
    own = write_site(tmp_path / "server", 50, seed=9)
    done = run(tree(tmp_path, roots, partition={"test_root": str(own)}))
    with np.load(own / "data.npz") as arrays:
        features, targets = (
            torch.from_numpy(np.concatenate([arrays[f"{k}_train"], arrays[f"{k}_test"]])) for k in "xy"
        )
    assert done.rounds[-1]["accuracy"] == pytest.approx(accuracy(done.model()(features), targets), rel=1e-12)
    assert not (done.path / "sites.jsonl").exists()
    asked = run(tree(tmp_path, roots, partition={"test_root": str(own)}, server={"evaluation": "clients"}))
    assert len(site_lines(asked)) == 2


def test_validation_samples_are_held_out_and_evaluated_at_each_site(roots: list[str], tmp_path: Path) -> None:
    """A tenth of each class of 48, 32 and 24 training samples, rounded down."""
    done = run(tree(tmp_path, roots, data={"validation_fraction": 0.1}))
    work = Workload(done.config)
    held = [samples_of_sites(work.dataset)[site][1] for site in range(NUM_SITES)]
    nums = [0 if samples is None else len(samples) for samples in held]
    assert sum(nums) > 0 and [len(work.samples_of(site)) + num for site, num in enumerate(nums)] == [48, 32, 24]
    values = [site["validation_loss"] for site in site_lines(done)[-1]["sites"]]
    weighted = [num * value for num, value in zip(nums, values, strict=True)]
    assert done.rounds[-1]["validation_loss"] == pytest.approx(fsum(weighted) / sum(nums), rel=1e-12)


def reply(num: int, **metrics: float) -> EvaluateReply:
    return EvaluateReply(round=1, partition=0, name="a", num_train=1, num_test=num, num_validation=0, metrics=metrics)


def test_a_metric_that_a_site_cannot_define_is_the_mean_of_the_others() -> None:
    sites = [reply(1, loss=1.0, auc=0.5), reply(3, loss=2.0, auc=float("nan")), reply(4, loss=5.0, auc=1.0)]
    assert means(sites, ["loss", "auc"]) == {"loss": (1 + 6 + 20) / 8, "auc": (0.5 + 4) / 5}
    assert np.isnan(means([reply(1, loss=1.0, auc=float("nan"))], ["loss", "auc"])["auc"])
    assert all(np.isnan(value) for value in means([], ["loss", "auc"]).values())


def test_a_reply_without_the_figures_asked_for_or_with_a_loss_of_nan_is_a_failure_and_others_are_left_out(
    roots: list[str], tmp_path: Path
) -> None:
    work = Workload(from_dict(tree(tmp_path, roots)))
    answers = [
        reply(1, loss=1.0),
        reply(1, loss=2.0, accuracy=0.5, client=7.0),
        replace(reply(1, loss=0.0, accuracy=0.0), num_validation=3),
        reply(1, loss=float("nan"), accuracy=0.5),
    ]
    evaluator = EvaluationAtSites(work.config, lambda requests: answers)
    found = evaluator.evaluate(1, dict(work.make_model().state_dict()))
    assert found.metrics == {"loss": 2.0, "accuracy": 0.5}
    assert [failure.reason.partition(";")[0] for failure in found.failures] == [
        "in evaluation: the reply lacks the figures ['accuracy']",
        "in evaluation: the reply lacks the figures ['validation_loss', 'validation_accuracy']",
        "in evaluation: its loss is nan",
    ]
    (line,) = found.records["sites.jsonl"]["sites"]
    assert line == {"client": 0, "name": "a", "num_train": 1, "num_test": 1, "loss": 2.0, "accuracy": 0.5}


def test_a_sites_name_is_text_on_the_page_whatever_it_is(reference: Run, tmp_path: Path) -> None:
    hostile = "</table><script>alert(1)</script>\u0000"
    shutil.copytree(reference.path, tmp_path / "run")
    lines = site_lines(reference)
    for line in lines:
        line["sites"][0]["name"] = hostile
    shutil.rmtree(tmp_path / "run" / "checkpoints")  # which count on the lines as they were
    (tmp_path / "run" / "sites.jsonl").unlink()
    for line in lines:
        RunFolder(tmp_path / "run").append("sites.jsonl", line)
    RunFolder(tmp_path / "run").conclude(reference.outcome)  # as a site of this name would have left it
    page = write_report(RunFolder(tmp_path / "run")).read_text(encoding="utf-8")
    assert "<script>alert" not in page and "&lt;/table&gt;&lt;script&gt;" in page


def test_counts_that_all_sites_shared_complete_the_record(reference: Run, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    private = {"class_names": CLASS_NAMES, "counts": [], "counts_are_private": True, "num_clients": 2}
    folder.write_json("partition.json", private)
    complete_partition(folder, {0: [1, 2]}, num_clients=2)
    assert folder.partition == private
    complete_partition(folder, {1: [3, 4], 0: [1, 2]}, num_clients=2)
    assert folder.partition == {"class_names": CLASS_NAMES, "counts": [[1, 2], [3, 4]], "num_clients": 2}


def refusing(outputs: Tensor, targets: Tensor) -> float:
    """A metric that the smallest site's samples make fail."""
    if len(targets) == SIZES[2] // 5:
        raise ValueError("too few samples")
    return 1.0


def test_a_site_that_fails_to_evaluate_is_a_failure_and_the_round_goes_on(roots: list[str], tmp_path: Path) -> None:
    done = run(tree(tmp_path, roots, metrics=["accuracy", f"{__name__}:refusing"]))
    for line, sites in zip(done.rounds, site_lines(done), strict=True):
        assert line["failures"] == [{"client": 2, "reason": "in evaluation: ValueError: too few samples"}]
        assert [site["client"] for site in sites["sites"]] == [0, 1]
        assert line["refusing"] == 1.0 and line["num_replies"] == 2
    first = json.loads((done.path / "failures.jsonl").read_text().splitlines()[0])
    assert "Traceback" in first["details"]  # in process nothing is a secret


def test_the_page_shows_each_site(reference: Run) -> None:
    page = write_report(reference.folder).read_text(encoding="utf-8")
    assert "<h2>Sites</h2>" in page and "Test accuracy at the sites" in page
    for k in range(NUM_SITES):
        assert f'<th scope="row">clinic {k}</th>' in page
        assert len(re.findall(rf'class="key"[^>]*>.*?clinic {k} <b>', page)) == 2  # its curves: accuracy and loss


def test_the_page_says_that_counts_are_private(reference: Run, tmp_path: Path) -> None:
    folder = reference.folder
    before = folder.partition
    folder.write_json("partition.json", {"class_names": [], "counts": [], "counts_are_private": True, "num_clients": 3})
    try:
        assert "3 clients, whose label counts stay with them" in write_report(folder).read_text(encoding="utf-8")
    finally:
        folder.write_json("partition.json", before)


def test_the_split_of_sites_is_shown_where_they_lie_here(roots: list[str], tmp_path: Path) -> None:
    facts = describe(Workload(from_dict(tree(tmp_path, roots))))
    assert [sum(row) for row in facts["counts"]] == [48, 32, 24]
    with pytest.raises(ConfigError, match=r"what a site holds stays with it"):
        describe(Workload(from_dict(tree(tmp_path, roots, engine={"name": "superlink"}))))


def one_class(path: Path) -> Path:
    return write_site(path, 20, seed=0, y_train=np.ones(16, dtype=int), y_test=np.ones(4, dtype=int))


def test_a_class_that_a_site_lacks_is_fine(roots: list[str], tmp_path: Path) -> None:
    done = run(tree(tmp_path, [*roots, str(one_class(tmp_path / "one"))]))
    assert done.folder.partition["counts"][3] == [0, 16] and not any(line["failures"] for line in done.rounds)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data": {"class_names": []}}, r"the sites' class names are not known; name them with --set"),
        (
            {"data": {"class_names": ["one"]}},
            r"site 'clinic 0': .*data\.npz holds training targets that are not integers from 0 to 0, .* such as 1",
        ),
        ({"partition": {"input_shape": []}}, r"the server cannot see the shape of the sites' samples; say it"),
        ({"partition": {"input_shape": [7]}}, r"site 'clinic 0': the data in .* of the shape \[5\]; expected \[7\]"),
        ({"partition": {"num_clients": 4}}, r"site 3 of partition\.num_clients=4 has no data here"),
        ({"partition": {"num_clients": 2}}, r"partition\.roots holds 3 entries for partition\.num_clients=2 sites"),
        ({"partition": {"names": ["a"]}}, r"partition\.names holds 1 entries"),
        ({"data": {"normalize": "unit"}}, r"data\.normalize=unit measures the data"),
        ({"data": {"normalize": "per_channel"}}, r"would give every site another scale"),
        ({"server": {"evaluation": "server"}}, r"the server has no test samples; name them with"),
        ({"server": {"evaluate_clients": 4}}, r"server\.evaluate_clients=4 exceeds the 3 clients"),
        ({"metrics": ["rmse"]}, r"'rmse' says nothing"),
        ({"data": {"name": "mnist"}}, r"unknown key 'data\.class_names'"),
    ],
)
def test_what_cannot_be_is_one_sentence_before_the_first_round(
    changes: dict[str, Any], said: str, roots: list[str], tmp_path: Path
) -> None:
    with pytest.raises(FedSignError, match=said) as caught:
        run(tree(tmp_path, roots, **changes))
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2
    assert not list(tmp_path.rglob("rounds.jsonl"))


class Own:
    """Scores the mean of all outputs."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.mean() - targets.float().mean()).square()


@pytest.mark.parametrize(
    ("make", "names", "said"),
    [
        (lambda x: x[:, :2], [], "have vectors of 2 real targets; expected one target for each sample"),
        (lambda x: (x[:, :2] > 0).astype(int), ["a", "b"], r"have several labels per sample \(2\); expected one"),
        (lambda x: (x[:, :1] > 0).astype(int), ["a", "b"], ""),
        (lambda x: np.eye(2, dtype=int)[(x[:, 0] > 0).astype(int)], ["a", "b"], ""),
        (lambda x: (x[:, :4] > 0).astype(int).reshape(-1, 2, 2), ["a", "b"], ""),
    ],
    ids=["vectors", "several labels", "columns", "one-hot", "masks"],
)
def test_targets_of_sites_have_the_models_outputs_or_are_one_sentence(
    make: Callable[[Any], Any], names: list[str], said: str, tmp_path: Path
) -> None:
    roots = []
    for number in range(2):
        x = np.random.default_rng(number).normal(size=(20, 5)).astype(np.float32)
        arrays = {"x_train": x, "y_train": make(x), "x_test": x, "y_test": make(x)}
        roots.append(str(write_site(tmp_path / f"site {number}", 20, seed=0, **arrays)))
    config = tree(tmp_path, roots, data={"class_names": names}, task=f"{__name__}:Own", metrics=[])
    if not said:
        assert [each["failures"] for each in run(config).rounds] == [[], []]
        return
    with pytest.raises(DataError, match=rf"^site 'site 0': the data in .* {said}"):
        run(config)


def test_usual_partitions_have_no_test_samples_at_the_clients(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"server\.evaluation=clients was given with partition\.name=dirichlet"):
        run({"server": {"evaluation": "clients"}, "results": {"root": str(tmp_path)}})
    with pytest.raises(ConfigError, match=r"server\.evaluate_clients=3 was given, but the server evaluates"):
        run({"server": {"evaluate_clients": 3}, "results": {"root": str(tmp_path)}})
    assert not list(tmp_path.iterdir())


# Readers of the user's own


class Rows:
    """A torch Dataset that is read item by item."""

    def __init__(self, path: Path, part: str) -> None:
        with np.load(path) as arrays:
            self.x, self.targets = arrays[f"x_{part}"], arrays[f"y_{part}"].tolist()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.from_numpy(self.x[index]), self.targets[index]


def rows(seed: int, *, root: str = ".", class_names: tuple[str, ...] = (), lazy_above: int = 0) -> Dataset:
    """Fetched batch by batch, but for the small sites."""
    whole = npz(seed, path=f"{root}/data.npz", class_names=class_names)
    if len(whole.train) <= lazy_above:
        return whole
    parts = [
        LazySamples(source=Rows(Path(root) / "data.npz", part), targets=samples.targets)
        for part, samples in (("train", whole.train), ("test", whole.test))
    ]
    return Dataset(train=parts[0], test=parts[1], class_names=class_names)


@pytest.mark.parametrize("lazy_above", [0, 30])
def test_samples_may_be_fetched_batch_by_batch_at_some_sites_or_all(
    lazy_above: int, reference: Run, roots: list[str], tmp_path: Path
) -> None:
    own = {"name": f"{__name__}:rows", "class_names": CLASS_NAMES, "lazy_above": lazy_above}
    done = run(tree(tmp_path, roots, data=own))
    assert isinstance(Workload(done.config).dataset.train, LazySamples)
    for name in ("rounds.jsonl", "sites.jsonl"):
        assert (done.path / name).read_bytes() == (reference.path / name).read_bytes()


def unnamed(seed: int, *, root: str = ".", class_names: tuple[str, ...] = ()) -> Dataset:
    """Names its classes by itself."""
    return npz(seed, path=f"{root}/data.npz")


def test_a_reader_that_goes_its_own_way_with_classes_is_refused(roots: list[str], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"site 'clinic 0': the data in .* have the classes \['0', '1'\]; expected"):
        run(tree(tmp_path, roots, data={"name": f"{__name__}:unnamed", "class_names": CLASS_NAMES}))


# Tables, scales


def write_table(folder: Path, rows: list[dict[str, Any]], name: str = "data.csv") -> Path:
    folder.mkdir(exist_ok=True)
    lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def patients(start: int, sexes: str) -> list[dict[str, Any]]:
    return [
        {"age": start + n, "sex": sexes[n % len(sexes)], "outcome": "ill" if start + n > 50 else "well"}
        for n in range(20)
    ]


def table_tree(root: Path, roots: list[str]) -> dict[str, Any]:
    data = {
        "name": "csv",
        "target": "outcome",
        "features": ["age", "sex"],
        "levels": {"sex": ["f", "m"]},
        "class_names": ["well", "ill"],
        "test_path": "held.csv",
        "normalize": "constants",
        "mean": [50.0, 0.0, 0.0],
        "std": [10.0, 1.0, 1.0],
    }
    whole = tree(root, roots, partition={"input_shape": []})
    return {**whole, "data": data}


def test_tables_lie_at_sites_with_agreed_columns_texts_and_scales(tmp_path: Path) -> None:
    """The second site has men alone and nobody ill; the scale is the configuration's."""
    roots = []
    for name, start, sexes in (("a", 40, "fm"), ("b", 20, "m")):
        folder = write_table(tmp_path / name, patients(start, sexes))
        roots.append(str(write_table(folder, patients(start, sexes)[:5], "held.csv")))
    tree_ = table_tree(tmp_path / "runs", roots)
    work = Workload(from_dict(tree_))
    other = work.samples_of(1)
    assert torch.allclose(other.features, torch.tensor([[(20 + n - 50) / 10, 0, 1] for n in range(20)]))
    assert work.dataset.class_names == ("well", "ill") and other.targets.tolist() == [0] * 20
    assert [len(samples_of_sites(work.dataset)[site][0]) for site in range(2)] == [5, 5]
    assert not any(line["failures"] for line in run(tree_).rounds)
    write_table(tmp_path / "b", [{**row, "sex": "d"} for row in patients(20, "m")])
    with pytest.raises(DataError, match=r"site 'b': column 'sex' of .*b/data\.csv has the text 'd', which is none of"):
        run(tree_)


def test_the_customary_scale_of_tables_is_refused(tmp_path: Path) -> None:
    changed = table_tree(tmp_path, ["a", "b"])
    changed["data"] |= {"normalize": "default", "mean": [], "std": []}
    with pytest.raises(ConfigError, match=r"data\.normalize=default measures the data"):
        run(changed)


def scaled(
    seed: int, *, root: str = ".", class_names: tuple[str, ...] = (), by: str = "constants", offset: float = 0.0
) -> Dataset:
    """Says which scale is customary for its data: constants, or what is measured."""
    whole = npz(seed, path=f"{root}/data.npz", class_names=class_names)
    if by == "measuring":
        return replace(whole, standardized=(True,) * 5)
    shift = offset * len(whole.train)
    return replace(whole, normalization=Normalization(shift=(shift,) * 5, scale=(2.0,) * 5))


def test_a_customary_scale_is_taken_if_it_is_the_same_constants_everywhere(roots: list[str], tmp_path: Path) -> None:
    own = {"name": f"{__name__}:scaled", "class_names": CLASS_NAMES}
    raw = Workload(from_dict(tree(tmp_path, roots))).samples_of(1).features
    work = Workload(from_dict(tree(tmp_path, roots, data=own)))
    assert torch.equal(work.samples_of(1).features, raw / 2)
    for changes, said in (
        ({"by": "measuring"}, "measures the data"),
        ({"offset": 1.0}, "sites different normalizations"),
    ):
        with pytest.raises(FedSignError, match=said):
            run(tree(tmp_path, roots, data={**own, **changes}))


# What is made of runs


def test_data_are_not_taken_over_from_another_experiments_sites(roots: list[str], tmp_path: Path) -> None:
    first = Workload(from_dict(tree(tmp_path, roots)))
    _ = first.dataset, first.split
    same, other = (Workload(from_dict(tree(tmp_path, each))) for each in (roots, [*roots[1:], roots[0]]))
    for work in (same, other):
        work.take_data(first)
    assert same.dataset is first.dataset
    assert len(other.samples_of(0)) == SIZES[1] * 4 // 5


@pytest.mark.needs("landscape")
def test_what_is_analyzed_needs_data_that_are_here(roots: list[str], tmp_path: Path) -> None:
    from simulations.landscape.target import Target

    config = from_dict(tree(tmp_path, roots, engine={"name": "superlink"}))
    target = Target(source=tmp_path, workload=Workload(config), tensors={}, run=None)
    with pytest.raises(ConfigError, match="trained on data that lie at sites, and none of them are here"):
        target.test_samples(None)


@pytest.mark.needs("comparison")
def test_hyper_parameters_are_chosen_by_the_sites_validation_samples(roots: list[str], tmp_path: Path) -> None:
    from simulations.comparison.plan import make_plan
    from simulations.comparison.request import Request

    base = from_dict(tree(tmp_path, roots))
    request = Request(strategies=["fedavg"], seeds=[0], grid={"client.lr": [1e-5, 0.1]})
    plan, configs = make_plan(base, request, name="choice", environment={})
    assert all(configs[cell.id].data.validation_fraction > 0 for cell in plan.cells if cell.choice)
    done = [run(configs[cell.id]) for cell in plan.cells if cell.choice]
    assert all(isinstance(each.final("validation_accuracy"), float) for each in done)


@pytest.mark.needs("privacy")
def test_with_local_privacy_sites_send_no_figures_without_noise(roots: list[str], tmp_path: Path) -> None:
    """The server is not trusted; with one that is, the figures are the operator's."""
    privacy = {"clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 0.01}
    with pytest.raises(ConfigError, match="the clients evaluate, and would send figures without noise"):
        run(tree(tmp_path, roots, privacy={"name": "local", **privacy}))
    done = run(tree(tmp_path, roots, privacy={"name": "central", **privacy}))
    assert done.rounds[-1]["epsilon"] > 0 and site_lines(done)
