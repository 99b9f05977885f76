"""The judge of a run: seeded defects alarm, healthy runs do not, and each finding is reported once."""

import json
import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_wine
from sklearn.preprocessing import StandardScaler

from fedsign.config import from_dict, merged
from fedsign.data.base import Dataset, Samples
from fedsign.diagnosis.finding import FILE
from fedsign.diagnosis.judge import Judge
from fedsign.diagnosis.run_rules import Facts
from fedsign.errors import FedSignError
from fedsign.records import Reply, Tensors
from fedsign.storage.finding import find_runs
from fedsign.storage.results import Record
from fedsign.workload import Workload
from simulations.api import run
from strategies.fedavg import FedAvg

DECAY = Path(__file__).parents[1] / "fixtures" / "decay.json"
FACTS = Facts(num_clients=50, rounds=2000, majority=0.1, num_test=360, can_select=True)


class Blown(FedAvg):
    """Scales the model by a million in round 3."""

    def aggregate(self, round: int, replies: Iterable[Reply]) -> Tensors | None:
        model = super().aggregate(round, replies)
        return model and {name: tensor * (1e6 if round == 3 else 1) for name, tensor in model.items()}


def shuffled(seed: int) -> Dataset:
    """Digits with the training labels shuffled."""
    whole = Workload(from_dict({})).dataset
    order = torch.randperm(len(whole.train), generator=torch.Generator().manual_seed(seed))
    assert isinstance(whole.train, Samples)
    return replace(whole, train=Samples(features=whole.train.features, targets=whole.train.targets[order]))


def broken_client(seed: int) -> Dataset:
    """Digits in which one sample is not finite: with IID clients, that of one client."""
    whole = Workload(from_dict({})).dataset
    assert isinstance(whole.train, Samples)
    features = whole.train.features.clone()
    features[7] = 3e38
    return replace(whole, train=Samples(features=features, targets=whole.train.targets))


def wine(seed: int) -> Dataset:
    """Wine in standard units: 178 samples, which FedDyn fits exactly and then overshoots."""
    data = load_wine()
    features = torch.from_numpy(StandardScaler().fit_transform(data.data)).float()
    train, test = torch.randperm(178, generator=torch.Generator().manual_seed(seed)).split(142)
    targets = torch.from_numpy(data.target)
    parts = [Samples(features=features[each], targets=targets[each]) for each in (train, test)]
    return Dataset(train=parts[0], test=parts[1], class_names=("0", "1", "2"))


BASE: dict[str, Any] = {
    "rounds": 31,
    "callbacks": [],
    "client": {"local_steps": 3},
    "model": {"hidden": [8]},
    "partition": {"name": "iid", "num_clients": 4},
    "server": {"cohort_size": 2},
    "strategy": {"name": "fedavg"},
}
HERE = __name__
DEFECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "learning rate too large": ("majority-class", {"client": {"lr": 5.0}}),
    "learning rate tiny": ("updates", {"client": {"lr": 1e-9}}),
    "labels shuffled": ("majority-class", {"data": {"name": f"{HERE}:shuffled"}}),
    "weights scaled by 1e6": ("weights", {"strategy": {"name": f"{HERE}:Blown"}}),
    "weight decay too large": ("weights", {"client": {"weight_decay": 8.0}}),
    "updates vanish": (
        "updates",
        {"client": {"schedule": {"name": "step", "every": 12, "factor": 1e-9}}},
    ),
    "a loss that rises within the default number of rounds": (
        "loss-rising",
        {
            "rounds": 40,
            "seed": 1,
            "data": {"name": f"{HERE}:wine"},
            "strategy": {"name": "feddyn"},
            "client": {"local_steps": 0, "local_epochs": 8},
            "partition": {"name": "dirichlet", "num_clients": 10},
            "server": {"cohort_size": 3},
            "model": {"hidden": [32]},
        },
    ),
    "bf16 loses small steps": (
        "updates",
        {
            "rounds": 1,
            "model": {"name": "tests.training.low_models:network"},
            "client": {"lr": 1e-5, "low_precision": "plain"},
        },
    ),
    "a client always fails": (
        "failing-clients",
        {"data": {"name": f"{HERE}:broken_client"}, "client": {"local_steps": 0, "local_epochs": 1}},
    ),
}


def findings(root: Path, changes: dict[str, Any]) -> list[Record]:
    with suppress(FedSignError):  # a defect may end the run, too
        run(merged(BASE, {**changes, "results": {"root": str(root)}}))
    (folder,) = find_runs(root)
    return folder.records(FILE)


def test_a_healthy_run_has_no_finding(tmp_path: Path) -> None:
    assert findings(tmp_path, {}) == []


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_seeded_defect_alarms_once(defect: str, tmp_path: Path) -> None:
    rule, changes = DEFECTS[defect]
    found = findings(tmp_path, changes)
    assert rule in [each["rule"] for each in found]
    assert len({each["rule"] for each in found}) == len(found), "each rule once"


def judged(records: Iterable[Record], facts: Facts = FACTS) -> dict[str, int]:
    """Rule -> the round of its finding."""
    judge = Judge(facts)
    return {found.rule: found.round for record in records for found in judge.see(record)}


def stream(num: int, **values: Any) -> list[Record]:
    """Records of an unremarkable run, some of whose values are functions of the round."""
    usual = {"loss": lambda n: 2 / n, "train_loss": lambda n: 2 / n, "accuracy": lambda n: 1 - 0.9 / n}
    norms = {"update_norm": lambda n: 1 / n, "weight_norm": lambda n: 10 + n / 10}
    lists = {"clients": lambda n: [n % 50, (n + 1) % 50], "failures": lambda n: []}
    made = {**usual, **norms, **lists, **values}
    return [{"round": n, **{key: make(n) for key, make in made.items()}} for n in range(1, num + 1)]


def test_the_default_run_is_warned_of_long_before_its_accuracy_falls() -> None:
    """The first 1,000 rounds of the default run with `rounds=2000`, which breaks down in round 1,727."""
    stored = json.loads(DECAY.read_text())
    pairs = zip(stored["loss"], stored["accuracy"], strict=True)
    records = [{"round": n, "loss": loss, "accuracy": accuracy} for n, (loss, accuracy) in enumerate(pairs, 1)]
    found = judged(records)
    assert found.keys() == {"loss-rising"}
    assert 250 < found["loss-rising"] < 500
    assert stored["accuracy"][found["loss-rising"] - 1] > 0.95


def test_rules_on_streams() -> None:
    assert judged(stream(300)) == {}
    assert judged(stream(300, loss=lambda n: math.nan if n > 100 else 1.0)) == {"divergence": 101}
    # fitted at once, as a client with one class: losses of 0 do not rise
    assert "divergence" not in judged(stream(20, train_loss=lambda n: 0.0))
    assert judged(stream(20, loss=lambda n: 2.0 if n < 10 else 2.0 * 4.0 ** (n - 9))) == {"divergence": 11}
    assert judged(stream(300, update_norm=lambda n: 0.01 if n < 100 else 50.0)) == {"updates": 100}
    assert judged(stream(300, loss=lambda n: 1.0, train_loss=lambda n: 1.0)) == {"plateau": 30}
    # a minimum in round 50, and slowly up from there: two thirds lie 50 rounds back at last
    rising = judged(stream(300, loss=lambda n: 2 / n if n <= 50 else 0.04 + 0.001 * (n - 50)))
    assert rising.keys() == {"loss-rising"} and 100 < rising["loss-rising"] < 120


def test_a_loss_that_multiplies_in_a_quarter_of_a_short_run_is_no_peak() -> None:
    """The default 40 rounds: a minimum in round 10, from where the loss grows by a tenth each round."""
    short = replace(FACTS, rounds=40)

    def loss(n: int) -> float:
        return 0.1 * 1.1 ** abs(n - 10)

    assert judged(stream(40, loss=loss), short).keys() == {"loss-rising"}
    assert judged(stream(40, loss=loss)) == {}, "in 2,000 rounds, it may come down again"
    # three unlucky cohorts in ten rounds: the mean has tripled, the losses between have not
    assert judged(stream(40, loss=lambda n: 0.9 if n > 15 and n % 10 in (0, 3, 6) else 0.1), short) == {}
    assert judged(stream(40, loss=lambda n: n / 10 - 9), short) == {}, "a negative loss has no factor"


def test_a_converging_run_is_no_finding() -> None:
    """Losses with a floor, and updates that shrink to nothing: a fixed point."""
    records = stream(
        400,
        loss=lambda n: 0.5 + 2.0 * 0.9**n,
        train_loss=lambda n: 0.5 + 2.0 * 0.9**n,
        update_norm=lambda n: 0.8**n,
        accuracy=lambda n: 0.7,
    )
    assert judged(records) == {}


def test_a_client_that_always_fails_is_told_from_chance() -> None:
    def failures(n: int) -> list[dict[str, Any]]:
        return [{"client": 7, "reason": "no memory"}] if n % 50 in (6, 7) else []

    # client 7 is asked in rounds 6, 7, 56, ...; all others answer
    assert judged(stream(200, failures=failures)) == {"failing-clients": 56}
    # every third reply of any client fails: three in a row are chance among 50 clients
    by_chance = judged(stream(40, failures=lambda n: [{"client": n % 50, "reason": "crash"}] if n % 3 == 0 else []))
    assert by_chance == {}
    most = stream(20, failures=lambda n: [{"client": each, "reason": "crash"} for each in (n % 50, (n + 1) % 50)])
    assert judged(most, replace(FACTS, num_clients=10**9)) == {"failing-clients": 10}


def test_a_value_that_privacy_withholds_is_not_missed() -> None:
    records = [
        {key: value for key, value in record.items() if key not in ("train_loss", "update_norm")}
        for record in stream(60)
    ]
    assert judged(records) == {}


def test_a_resumed_run_reports_a_finding_once_and_goes_on_with_its_window(tmp_path: Path) -> None:
    changes = {"client": {"lr": 1e-9}, "results": {"root": str(tmp_path), "checkpoint_every": 4}}
    done = run(merged(BASE, {**changes, "rounds": 12}))
    assert [each["rule"] for each in done.folder.records(FILE)] == ["updates"]
    resumed = run({"rounds": 31}, resume=done.path)
    whole = run(merged(BASE, {**changes, "results": {"root": str(tmp_path / "whole")}}))
    assert resumed.folder.records(FILE) == whole.folder.records(FILE)
    assert [each["rule"] for each in whole.folder.records(FILE)] == ["updates", "majority-class", "plateau"]


def test_the_judge_reads_no_more_than_is_published(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    private = {
        "privacy": {"name": "central", "noise_multiplier": 1e-3, "clip_norm": 1e-7, "delta": 1e-3},
        "client": {"lr": 1e-9},
    }
    found = findings(tmp_path, {**private, "server": {"cohort_size": 4}})
    assert "updates" not in [each["rule"] for each in found]
