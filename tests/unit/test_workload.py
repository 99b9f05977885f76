"""Data sets and partitions of a user's own: what cannot be trained on is refused with a sentence."""

from typing import Any

import numpy as np
import pytest
import torch

from fedsign.config import ExperimentConfig, from_dict
from fedsign.data.base import Dataset, Samples
from fedsign.errors import ConfigError, DataError
from fedsign.workload import Workload, check_partition, checked_dataset, device_of


def samples(num: int = 4, *, classes: int = 2, features: Any = None) -> Samples:
    given = torch.zeros(num, 3) if features is None else features
    return Samples(features=given, targets=torch.arange(num) % classes)


def dataset(train: Samples | None = None, test: Samples | None = None) -> Dataset:
    train, test = (samples() if given is None else given for given in (train, test))
    return Dataset(train=train, test=test, class_names=("a", "b"))


def test_a_good_data_set_is_taken_as_it_is() -> None:
    good = dataset()
    assert checked_dataset(good, name="mine") is good


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ((1, 2), "gives a tuple; expected is a fedsign.data.base.Dataset"),
        (dataset(test=Samples(features=torch.zeros(0, 3), targets=torch.zeros(0))), "0 test features and 0 targets"),
        (dataset(Samples(features=torch.zeros(3, 2), targets=torch.zeros(2))), "3 training features and 2 targets"),
        (dataset(samples(features=torch.zeros(4, 3, dtype=torch.uint8))), "torch.uint8; expected is float32"),
        (dataset(samples(classes=3)), "training targets that are not integers from 0 to 1"),
        (dataset(test=Samples(features=torch.zeros(2, 3), targets=torch.tensor([0.0, 1.0]))), "test targets that are"),
    ],
)
def test_a_data_set_that_cannot_be_trained_on_is_refused(bad: object, said: str) -> None:
    with pytest.raises(DataError, match=r"data.name=mine") as caught:
        checked_dataset(bad, name="mine")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([[0, 1], [2]], "gives 2 parts"),
        ([[0, 1], [2], []], "1 of them empty"),
        ([[0, 1], [1], [2]], "deals a sample out twice"),
        ([[0], [1], [9]], "one that does not exist"),
    ],
)
def test_a_partition_that_is_none_is_refused(parts: list[list[int]], said: str) -> None:
    with pytest.raises(DataError, match=said):
        check_partition([np.array(part, dtype=np.int64) for part in parts], num_clients=3, num_samples=4, name="mine")


def test_the_initial_model_is_the_seeds_and_leaves_the_global_generator_alone() -> None:
    state = torch.random.get_rng_state()
    first, again, other = (Workload(from_dict({"seed": seed})).make_model() for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), state)
    pairs = list(zip(first.parameters(), again.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not any(torch.equal(a, c) for a, _, c in pairs)


def test_evaluation_is_the_mean_over_all_test_samples_whatever_the_batches() -> None:
    """2,500 samples are three batches; with output (0, x) the loss is log(1 + e^x) or log(1 + e^-x)."""
    x = torch.linspace(-3, 3, 2500).unsqueeze(1)
    targets = (x[:, 0] > 1).long()
    work = Workload(ExperimentConfig())
    data = Dataset(
        train=Samples(features=x, targets=targets), test=Samples(features=x, targets=targets), class_names=("n", "y")
    )
    work.__dict__["dataset"] = data  # where cached_property keeps it

    class Logits(torch.nn.Module):
        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return torch.cat([torch.zeros_like(features), features], dim=1)

    values = work.evaluate(Logits())
    margin = np.where(targets.numpy() == 1, x[:, 0].numpy(), -x[:, 0].numpy()).astype(np.float64)
    assert values["loss"] == pytest.approx(np.log1p(np.exp(-margin)).mean(), rel=1e-5)
    assert values["accuracy"] == pytest.approx((margin > 0).mean())


@pytest.mark.parametrize("name", ["cuda:99x", "tpu-9000"])
def test_an_unknown_device_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine.device='{name}'"):
        device_of(name)
