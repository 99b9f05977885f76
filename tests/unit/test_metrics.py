"""Metrics against scikit-learn and SciPy, and their values where classes are absent."""

import math
import subprocess
import sys
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu
from sklearn import metrics as reference

from fedsign.metrics import LOWER_IS_BETTER, is_higher_better
from fedsign.metrics.accuracy import accuracy
from fedsign.metrics.auc import auc
from fedsign.metrics.balanced_accuracy import balanced_accuracy
from fedsign.metrics.f1 import f1
from fedsign.metrics.rmse import rmse
from fedsign.registry import KINDS
from fedsign.traits import MetricTraits

Metric = Callable[[torch.Tensor, torch.Tensor], float]


def sklearn_balanced_accuracy(labels: np.ndarray, predicted: np.ndarray) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of predicted classes that no sample has
        return float(reference.balanced_accuracy_score(labels, predicted))


def sklearn_f1(labels: np.ndarray, predicted: np.ndarray) -> float:
    return float(reference.f1_score(labels, predicted, average="macro", zero_division=0))


@settings(deadline=None, max_examples=80)
@given(st.integers(2, 6), st.integers(1, 60), st.integers(1, 6), st.integers(0, 2**31))
def test_of_predictions_as_scikit_learn(num_classes: int, num: int, num_present: int, seed: int) -> None:
    """`num_present` classes at most occur among the labels, so that some are predicted only, some not at all."""
    rng = np.random.default_rng(seed)
    outputs = torch.from_numpy(rng.normal(size=(num, num_classes)).astype(np.float32))
    labels = rng.integers(min(num_present, num_classes), size=num)
    predicted, targets = outputs.argmax(dim=1).numpy(), torch.from_numpy(labels)
    assert accuracy(outputs, targets) == pytest.approx(reference.accuracy_score(labels, predicted), abs=1e-12)
    assert balanced_accuracy(outputs, targets) == pytest.approx(sklearn_balanced_accuracy(labels, predicted), abs=1e-12)
    assert f1(outputs, targets) == pytest.approx(sklearn_f1(labels, predicted), abs=1e-12)


@settings(deadline=None, max_examples=30)
@given(st.integers(3, 5), st.integers(0, 2**31))
def test_auc_of_several_classes_as_scikit_learn(num_classes: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    outputs = torch.from_numpy(rng.normal(size=(40, num_classes)))
    labels = rng.permutation(np.arange(40) % num_classes)
    expected = reference.roc_auc_score(labels, outputs.softmax(dim=1).numpy(), multi_class="ovr", average="macro")
    assert auc(outputs, torch.from_numpy(labels)) == pytest.approx(expected, abs=1e-12)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**31), st.integers(1, 29))
def test_auc_of_two_classes_is_the_probability_of_the_right_order(seed: int, num_positive: int) -> None:
    """U / (n1 n0) of Mann and Whitney, ties (whole logits make some) counted half."""
    rng = np.random.default_rng(seed)
    margin = rng.integers(-3, 4, size=30).astype(float)
    labels = (np.arange(30) < num_positive).astype(np.int64)
    outputs = torch.from_numpy(np.stack([np.zeros(30), margin], axis=1))
    u = mannwhitneyu(margin[labels == 1], margin[labels == 0]).statistic
    assert auc(outputs, torch.from_numpy(labels)) == pytest.approx(u / (num_positive * (30 - num_positive)), abs=1e-12)


def test_auc_tells_apart_logits_whose_probabilities_round_to_1() -> None:
    """softmax of 50 and of 60 are both 1.0, even in float64; their order still counts."""
    outputs = torch.tensor([[0.0, 50.0], [0.0, 60.0]])
    assert auc(outputs, torch.tensor([0, 1])) == 1.0
    assert auc(outputs, torch.tensor([1, 0])) == 0.0


def test_auc_leaves_out_classes_without_an_area() -> None:
    """Class 2 has no sample: the mean of two areas, each with one pair in order of two."""
    outputs = torch.tensor([[2.0, 1.0, 0.0], [1.0, 2.0, 0.0]])
    assert auc(outputs, torch.tensor([0, 1])) == 1.0
    assert math.isnan(auc(outputs, torch.tensor([1, 1])))
    assert math.isnan(auc(outputs / 0, torch.tensor([0, 1])))


def test_a_class_without_samples_does_not_count_in_balanced_accuracy() -> None:
    """Class 0: 2 of 3 right; class 2: 0 of 1; class 1 has no sample, although it is predicted."""
    outputs = torch.eye(3)[[0, 0, 1, 1]]
    assert balanced_accuracy(outputs, torch.tensor([0, 0, 0, 2])) == pytest.approx((2 / 3 + 0) / 2)


def test_f1_of_a_class_that_is_only_predicted_is_0() -> None:
    """Class 0: TP 2, FN 1, F1 = 4/5; class 1: FP only, 0; class 2: FN only, 0; class 3 occurs nowhere."""
    outputs = torch.eye(4)[[0, 0, 1, 1]]
    assert f1(outputs, torch.tensor([0, 0, 0, 2])) == pytest.approx((4 / 5 + 0 + 0) / 3)


def test_rmse_as_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    outputs, targets = rng.normal(size=(50, 1)).astype(np.float32), rng.normal(size=50).astype(np.float32)
    expected = reference.root_mean_squared_error(targets, outputs[:, 0])
    assert rmse(torch.from_numpy(outputs), torch.from_numpy(targets)) == pytest.approx(expected, rel=1e-6)


def test_which_way_is_better_is_known_of_every_metric() -> None:
    assert not MetricTraits.having(targets="")
    assert {name for name in KINDS["metric"].table if not is_higher_better(name)} - {"perplexity"} == {"rmse"}
    assert all(not is_higher_better(name) for name in LOWER_IS_BETTER)
    assert [is_higher_better(name) for name in ("validation_loss", "validation_auc", "mine:quantile_loss")] == [
        False,
        True,
        False,
    ]


def test_which_way_is_better_is_known_without_torch() -> None:
    program = "import sys, fedsign.metrics; print(fedsign.metrics.is_higher_better('f1'), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["True", "False"], done.stderr
