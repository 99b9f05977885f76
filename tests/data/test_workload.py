"""User-defined data sets and partitions: what cannot be trained on is refused with one sentence."""

import gc
import threading
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedsign.config import ExperimentConfig, from_dict
from fedsign.data.base import AnySamples, Dataset, LazySamples, Samples
from fedsign.data.checks import checked_dataset
from fedsign.errors import ConfigError, DataError
from fedsign.models.transform import Transform, attach
from fedsign.numerics import device_of
from fedsign.records import roles_of
from fedsign.tasks.classification import Classification
from fedsign.tasks.regression import Regression
from fedsign.workload import Workload, check_partition
from simulations.backends.base import intra_op_threads


def samples(num: int = 4, *, classes: int = 2, features: Any = None) -> Samples:
    given = torch.zeros(num, 3) if features is None else features
    return Samples(features=given, targets=torch.arange(num) % classes)


def dataset(train: AnySamples | None = None, test: AnySamples | None = None) -> Dataset:
    train, test = (samples() if given is None else given for given in (train, test))
    return Dataset(train=train, test=test, class_names=("a", "b"))


def test_a_good_data_set_is_taken_as_it_is() -> None:
    good = dataset()
    assert checked_dataset(good, name="mine") is good


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ((1, 2), "gives a tuple; expected a fedsign.data.base.Dataset"),
        (
            dataset(test=Samples(features=torch.zeros(0, 3), targets=torch.zeros(0))),
            "test data with 0 features and 0 targets",
        ),
        (
            dataset(Samples(features=torch.zeros(3, 2), targets=torch.zeros(2))),
            "training data with 3 features and 2 targets",
        ),
        (dataset(samples(features=torch.zeros(4, 3, dtype=torch.complex64))), "torch.complex64; expected real numbers"),
        (dataset(samples(features=torch.zeros(4, 3).long())), "features of torch.int64 and test features of torch.flo"),
        (dataset(samples(features=torch.zeros(4))), "training features of shape [] per sample"),
        (dataset(samples(features=torch.tensor([[1.0], [2.0], [torch.nan], [3.0]]))), "training features that are NaN"),
        (
            replace(dataset(replace(samples(2), targets=torch.tensor([0.0, torch.nan]))), class_names=()),
            "training targets that are NaN",
        ),
        (dataset(test=samples(features=torch.full((4, 3), torch.inf))), "test features that are NaN or infinite"),
        (
            dataset(test=samples(features=torch.zeros(4, 2))),
            "training features of shape [3] per sample and test features of [2]",
        ),
        (dataset(LazySamples(source=[0.0] * 3, targets=torch.zeros(4))), "training data with 3 features and 4 targets"),
        (dataset(LazySamples(source=[], targets=torch.zeros(0))), "training data with 0 features and 0 targets"),
        (
            dataset(LazySamples(source=[0.0] * 3, targets=torch.tensor([0, 1, 2]))),
            "training targets that are not integers",
        ),
        (replace(dataset(), standardized=(True, False)), "2 values of `standardized` and 3 channels"),
        (dataset(replace(samples(), owners=torch.arange(3))), "3 owners for 4 samples"),
        (dataset(replace(samples(), owners=torch.tensor([0.0, torch.nan, 1, 2]))), "owners of which the one at 1 is"),
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


def line(seed: int) -> Dataset:
    """y = 2 x + 1, without noise."""
    x = torch.linspace(-1, 1, 40)[:, None]
    part = Samples(features=x, targets=2 * x[:, 0] + 1)
    return Dataset(train=part, test=part, class_names=())


class AbsoluteError:
    """mean |output - target|."""

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs[:, 0] - targets).abs().mean()


class NoLoss:
    pass


REAL = {
    "data": {"name": f"{__name__}:line"},
    "partition": {"name": "iid", "num_clients": 10},
    "model": {"name": "linear"},
}


@pytest.mark.parametrize(
    ("task", "expected"), [("regression", 4 / 3 + 1), (f"{__name__}:AbsoluteError", 1.25)], ids=["squared", "absolute"]
)
def test_a_regression_and_a_task_of_ones_own_are_evaluated_by_their_loss(task: str, expected: float) -> None:
    """Output 0: the mean over [-1, 1] of (2x + 1)^2 is 4/3 + 1, of |2x + 1| it is 5/4; 40 points come within 0.1."""
    work = Workload(from_dict({**REAL, "task": task, "metrics": ["rmse"]}))
    model = work.make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    values = work.evaluate(model)
    assert values["loss"] == pytest.approx(expected, abs=0.1)
    x = np.linspace(-1, 1, 40)
    assert values["rmse"] == pytest.approx(np.sqrt(np.mean((2 * x + 1) ** 2)), rel=1e-5)


def test_a_task_without_a_loss_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"gives a NoLoss without a method `loss`"):
        _ = Workload(from_dict({"task": f"{__name__}:NoLoss"})).task


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            REAL,
            r"task=classification was given, but data.name=.*line has real targets; use task=regression \(--set "
            r"""task=regression --set 'metrics=\["rmse"\]'\), or other data""",
        ),
        ({**REAL, "task": "regression"}, r"for which 'accuracy' says nothing; use one of rmse, or none"),
        (
            {"task": "regression"},
            r"task=regression was given, but data.name=digits has class labels; use task=classification, or other",
        ),
        ({"metrics": ["accuracy", "rmse"]}, r"'rmse' says nothing; use one of accuracy, auc"),
    ],
)
def test_data_that_do_not_fit_task_or_metric_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        _ = Workload(from_dict(changes)).dataset


def test_smoothed_labels_weigh_every_class() -> None:
    """-(1 - s + s/3) log p_1 - (s/3)(log p_0 + log p_2), by hand; s = 0 is the plain cross-entropy."""
    logits, s = torch.tensor([[0.5, 1.0, -2.0]]), 0.3
    log_p = (logits.double() - logits.double().exp().sum().log())[0].tolist()
    expected = -(1 - s + s / 3) * log_p[1] - s / 3 * (log_p[0] + log_p[2])
    assert Classification(label_smoothing=s).loss(logits, torch.tensor([1])).item() == pytest.approx(expected, rel=1e-6)
    assert Classification().loss(logits, torch.tensor([1])).item() == pytest.approx(-log_p[1], rel=1e-6)


def test_the_loss_of_a_regression_is_the_mean_of_squares() -> None:
    assert Regression().loss(torch.tensor([[1.0], [2.0]]), torch.tensor([0.0, 4.0])).item() == 2.5


@pytest.mark.parametrize(
    "name",
    [
        *("cuda:99x", "tpu-9000", "mps", "mps:0", "xpu", "meta", "hip", "mtia", "cpu:1", "cuda:-1", "cuda:1000"),
        *("cuda:7", "CPU", "gpu", "0", "cuda:", ""),
    ],
)
def test_a_device_that_is_unknown_or_not_here_is_named(name: str) -> None:
    """cuda:1000 is index -24 to torch, and `meta` a device without values."""
    with pytest.raises(ConfigError, match=rf"engine.device='{name}'"):
        device_of(name)


@pytest.mark.parametrize(("smoothing", "temperature"), [(0.0, 1.0), (0.3, 0.5)])
@pytest.mark.parametrize(("num", "classes"), [(3, 10), (64, 2), (1000, 10), (200, 100)])
def test_the_cross_entropy_is_torchs_for_any_number_of_samples(
    num: int, classes: int, smoothing: float, temperature: float
) -> None:
    drawn = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(num, classes, generator=drawn)
    targets = torch.randint(0, classes, (num,), generator=drawn)
    task = Classification(label_smoothing=smoothing, temperature=temperature)
    expected = torch.nn.functional.cross_entropy(logits.double() / temperature, targets, label_smoothing=smoothing)
    assert task.loss(logits, targets).item() == pytest.approx(expected.item(), rel=1e-6)
    assert task.loss(logits.clone().requires_grad_(), targets).item() == pytest.approx(expected.item(), rel=1e-6)


def test_threads_share_out_the_evaluation_and_change_no_bit() -> None:
    """Images of 64 x 64 are evaluated 32 at a time."""
    work = Workload(
        from_dict({"data": {"name": "tests.data.test_workload:images"}, "model": {"name": "cnn"}, "rounds": 1})
    )
    threads = set()
    model = work.make_model()
    model.register_forward_hook(lambda *_: threads.add((threading.get_ident(), torch.get_num_threads())))
    with intra_op_threads(1):
        alone = work.evaluate(model)
        assert threads == {(threading.get_ident(), 1)}
        threads.clear()
        assert work.evaluate(model, num_threads=3) == alone
    assert threading.get_ident() not in {thread for thread, _ in threads}
    assert {num for _, num in threads} == {1}, "as many as the engine lends"


def images(seed: int) -> Dataset:
    drawn = torch.Generator().manual_seed(seed)
    part = Samples(
        features=torch.randn(600, 3, 64, 64, generator=drawn), targets=torch.randint(0, 4, (600,), generator=drawn)
    )
    return Dataset(train=part, test=part, class_names=("a", "b", "c", "d"))


def test_the_roles_are_those_of_the_model_whether_one_was_made_already_or_not() -> None:
    config = from_dict({"model": {"name": "cnn"}})
    asked, made = Workload(config), Workload(config)
    model = made.make_model()
    assert asked.roles == made.roles == roles_of(model) and len(set(asked.roles.values())) == 2


class Holding(Transform):
    """Holds a weight, and lets all models share another."""

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    def place(self, model: nn.Module, shared: dict[str, torch.Tensor]) -> None:
        model.register_buffer("base", shared.setdefault("base", model.get_buffer("base")))


def holding(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3, num_outputs))
    model.register_buffer("base", torch.ones(100))
    attach(model, Holding(torch.ones(2)))
    return model


def fetched(seed: int) -> Dataset:
    lazy = LazySamples(source=[torch.zeros(3)] * 4, targets=torch.arange(4) % 2)
    return Dataset(train=lazy, test=samples(), class_names=("a", "b"))


def test_what_an_outline_leaves_behind_has_values() -> None:
    work = Workload(from_dict({"model": {"name": f"{__name__}:holding"}, "data": {"name": f"{__name__}:fetched"}}))
    outline = work.make_outline()
    assert all(tensor.is_meta for tensor in outline.state_dict().values())
    assert work.dataset.train.targets.tolist() == [0, 1, 0, 1]
    (transform,) = work.transforms
    assert isinstance(transform, Holding) and transform.held.tolist() == [1.0, 1.0]
    assert [*work.roles] == [*outline.state_dict()]


def test_released_models_leave_no_tensors() -> None:
    work = Workload(from_dict({"model": {"name": f"{__name__}:holding"}, "data": {"name": f"{__name__}:fetched"}}))
    shared = weakref.ref(work.make_model().get_buffer("base"))
    assert shared() is not None and work.make_model().get_buffer("base") is shared()
    work.release_models()
    gc.collect()
    assert shared() is None
