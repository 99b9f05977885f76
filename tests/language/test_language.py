"""The language task: what it scores, what an evaluation keeps, and which experiments it refuses."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from clients.trainer import check_training
from fedsign.compatibility import Experiment
from fedsign.config import from_dict
from fedsign.data.base import Dataset, LazySamples, Samples
from fedsign.data.checks import checked_dataset
from fedsign.data.text.tokenizers import Bytes, Characters
from fedsign.errors import ConfigError, DataError
from fedsign.metrics.perplexity import perplexity
from fedsign.records import ObjectiveSpec
from fedsign.tasks.base import IGNORED, num_terms
from fedsign.tasks.language import Language
from fedsign.workload import Workload
from tests.language.language_samples import Bigram

HERE = __name__
VOCABULARY, LENGTH = 5, 6
TEXT = Characters("abc")  # and two special tokens


def text_samples(num: int, seed: int) -> Samples:
    rng = torch.Generator().manual_seed(seed)
    features = torch.randint(VOCABULARY, (num, LENGTH), generator=rng)
    targets = torch.randint(VOCABULARY, (num, LENGTH), generator=rng)
    targets[torch.rand(num, LENGTH, generator=rng) < 0.3] = IGNORED
    targets[:, 0] = 1
    return Samples(features=features, targets=targets, owners=torch.arange(num) % 7)


def some_text(seed: int) -> Dataset:
    """A data set of a user's own."""
    return Dataset(train=text_samples(40, seed), test=text_samples(30, seed + 1), class_names=(), text=TEXT)


def workload(**changes: Any) -> Workload:
    tree: dict[str, Any] = {
        "task": "language",
        "metrics": ["perplexity", "token_accuracy"],
        "data": {"name": f"{HERE}:some_text"},
        "model": {"name": f"{Bigram.__module__}:Bigram"},
        "partition": {"name": "iid", "num_clients": 4},
        "strategy": {"name": "fedavg"},
        "server": {"cohort_size": 4},
    }
    return Workload(from_dict(tree | changes))


@settings(deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 5), st.integers(2, 6))
def test_the_loss_is_the_mean_over_the_scored_tokens(seed: int, num: int, length: int, vocabulary: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(num, length, vocabulary, generator=rng, dtype=torch.float64)
    targets = torch.randint(vocabulary, (num, length), generator=rng)
    targets[torch.rand(num, length, generator=rng) < 0.5] = IGNORED
    rows = [
        -logits[i, j].log_softmax(0)[targets[i, j]].item()
        for i in range(num)
        for j in range(length)
        if targets[i, j] != IGNORED
    ]
    expected = math.fsum(rows) / max(1, len(rows))
    task = Language()
    assert task.loss(logits, targets).item() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    kept = torch.cat([task.kept(each, target) for each, target in zip(logits.split(1), targets.split(1), strict=True)])
    assert task.loss_of(kept, targets).item() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_a_batch_in_which_nothing_is_scored_has_loss_and_gradient_zero() -> None:
    logits = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    targets = torch.full((2, 3), IGNORED)
    loss = Language(label_smoothing=0.1).loss(logits, targets)
    loss.backward()
    assert loss.item() == 0 and logits.grad is not None and not logits.grad.any()
    assert perplexity(Language().kept(logits.detach(), targets), targets) == 1


@pytest.mark.parametrize("vocabulary", [2, 105, 5000])
def test_the_perplexity_of_a_model_that_knows_nothing_is_the_vocabularys_size(vocabulary: int) -> None:
    targets = torch.arange(6).remainder(vocabulary).reshape(2, 3)
    kept = Language().kept(torch.zeros(2, 3, vocabulary), targets)
    assert perplexity(kept, targets) == pytest.approx(vocabulary, rel=1e-6)


def test_the_perplexity_of_a_bigram_table_is_that_of_its_probabilities() -> None:
    work = workload()
    model = work.make_model()
    assert isinstance(model, Bigram)
    test = work.dataset.test
    table = model.table.detach().double().softmax(dim=1)
    pairs = [
        (x, y)
        for row, targets in zip(test.features.tolist(), test.targets.tolist(), strict=True)
        for x, y in zip(row, targets, strict=True)
        if y != IGNORED
    ]
    mean = math.fsum(-math.log(table[x, y].item()) for x, y in pairs) / len(pairs)
    right = sum(int(table[x].argmax()) == y for x, y in pairs) / len(pairs)
    figures = work.evaluate(model)
    assert figures["loss"] == pytest.approx(mean, rel=1e-6)
    assert figures["perplexity"] == pytest.approx(math.exp(mean), rel=1e-6)
    assert figures["token_accuracy"] == right


def test_losses_beyond_what_a_float_holds_are_said_as_such() -> None:
    targets = torch.tensor([[0]])
    assert perplexity(torch.tensor([[[1e4, 0.0]]]), targets) == math.inf
    assert math.isnan(perplexity(torch.tensor([[[math.nan, 0.0]]]), targets))


def test_an_evaluation_holds_the_logits_of_one_batch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = workload(), workload()
    expected = whole.evaluate(whole.make_model())
    monkeypatch.setattr("fedsign.evaluation._LOGIT_BYTES", {"cpu": 4 * 3 * LENGTH * VOCABULARY})  # of three blocks
    model = parts.make_model()
    assert isinstance(model, Bigram)
    assert parts.evaluate(model) == pytest.approx(expected, rel=1e-6)
    assert model.largest == 3 * LENGTH * VOCABULARY


def test_no_figure_depends_on_how_many_threads_share_the_batches_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedsign.evaluation._LOGIT_BYTES", {"cpu": 4 * 4 * LENGTH * VOCABULARY})
    work = workload()
    assert work.evaluate(work.make_model(), num_threads=3) == work.evaluate(work.make_model())


def test_validation_text_is_held_out_of_training() -> None:
    work = workload(data={"name": f"{HERE}:some_text", "validation_fraction": 0.25})
    validation = work.dataset.validation
    assert validation is not None and (len(validation), len(work.dataset.train)) == (10, 30)
    assert "validation_perplexity" in work.evaluate(work.make_model())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"task": "classification"}, r"has text; use task=language"),
        ({"task": "regression"}, r"has text; use task=language"),
        ({"metrics": ["accuracy"]}, r"'accuracy' says nothing; use one of exact_match, perplexity, rouge_1, "),
        ({"metrics": ["rmse"]}, r"'rmse' says nothing; use one of exact_match, perplexity, rouge_1, "),
        ({"data": {"name": f"{HERE}:some_text", "augment": "flip"}}, r"data.augment=flip .* use data.augment=none"),
        ({"data": {"name": f"{HERE}:some_text", "normalize": "unit"}}, r"data.normalize=unit .* data.normalize=none"),
        ({"data": {"name": "digits"}}, r"task=language was given, but data.name=digits has class labels"),
        (
            {"data": {"name": "digits"}, "task": "classification"},
            r"'perplexity' says nothing; use one of accuracy, auc, balanced_accuracy, f1",
        ),
    ],
)
def test_what_text_does_not_go_with_is_said(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        _ = workload(**changes).dataset


@pytest.mark.parametrize("name", ["dirichlet", "classes", "virtual", "shards"])
def test_a_partition_by_labels_says_what_text_can_be_split_by(name: str) -> None:
    with pytest.raises(
        DataError, match=rf"partition.name={name} .* use partition\.(name=natural, iid or quantity|name=iid|labels=iid)"
    ):
        _ = workload(partition={"name": name, "num_clients": 4}).split


@pytest.mark.parametrize("name", ["iid", "quantity", "natural"])
def test_blocks_are_dealt_out_whole_and_all(name: str) -> None:
    work = workload(partition={"name": name, "num_clients": 4})
    assert sorted(index for part in work.partition for index in part) == list(range(40))
    assert [count for row in work.label_counts() for count in row] == [len(part) for part in work.partition]


@pytest.mark.needs("cohort")
def test_stacks_of_clients_refuse_a_loss_that_is_no_mean_of_samples() -> None:
    from clients.cohort.rules import COHORT

    experiment = Experiment(workload=workload(), spec=ObjectiveSpec())
    assert "task=language cannot be stacked: it has no method `losses`" in COHORT.why_not(experiment)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"name": "mlp"}, r"model.name=mlp was given tokens of the shape \[1, 6\], for which it raises RuntimeError"),
        (
            {"name": f"{HERE}:LastToken"},
            r"for which it gives outputs of the shape \[1, 5\]; expected logits \[1, 6, 5\]",
        ),
        (
            {"name": f"{HERE}:TooFew"},
            r"for which it gives outputs of the shape \[1, 6, 4\]; expected logits \[1, 6, 5\]",
        ),
    ],
)
def test_a_model_that_is_none_of_language_is_said_before_the_run(model: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_training(workload(model=model), ObjectiveSpec())


@pytest.mark.parametrize("name", ["Bigram", "OfOneLength", "Padded"])
def test_a_language_model_may_be_trained(name: str) -> None:
    check_training(workload(model={"name": f"{HERE}:{name}"}), ObjectiveSpec())


@settings(deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 5))
def test_pieces_of_a_batch_weigh_as_many_tokens_as_they_score(seed: int, size: int) -> None:
    task, samples = Language(), text_samples(7, seed)
    logits = torch.randn(7, LENGTH, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    pieces = zip(logits.split(size), samples.targets.split(size), strict=True)
    total = num_terms(task, samples.targets)
    mean = math.fsum(num_terms(task, targets) / total * task.loss(some, targets).item() for some, targets in pieces)
    assert task.loss(logits, samples.targets).item() == pytest.approx(mean, rel=1e-12)


def test_label_smoothing_mixes_in_the_mean_over_the_vocabulary() -> None:
    logits = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets = torch.tensor([[1, IGNORED, 3], [0, 2, IGNORED]])
    nll = -logits.log_softmax(dim=-1)
    rows = [0.9 * nll[i, j, targets[i, j]] + 0.1 * nll[i, j].mean() for i, j in (targets != IGNORED).nonzero().tolist()]
    expected = torch.stack(rows).mean().item()
    assert Language(label_smoothing=0.1).loss(logits, targets).item() == pytest.approx(expected, rel=1e-12)


class OfOneLength(Bigram):
    """A model that takes whole blocks only."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + torch.zeros(LENGTH, 1)


class Padded(Bigram):
    """A model with places for more tokens than its tokenizer has, as pretrained ones have them."""

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs + 3)


class TooFew(Bigram):
    """A model that could never say the last token."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens)[..., :-1]


class LastToken(Bigram):
    """Logits of the token after the block alone."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens)[:, -1]


GOOD = some_text(0)
ONES = torch.ones(4, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (LazySamples(source=[0.0] * 4, targets=ONES), "training text that is fetched batch by batch"),
        (Samples(features=torch.ones(4, 3), targets=ONES), "training text as torch.float32 of shape [4, 3]"),
        (Samples(features=ONES, targets=ONES[:, 0]), "with targets of torch.int64 and [4]"),
        (Samples(features=ONES, targets=ONES * IGNORED), "training text of which no token is scored"),
        (Samples(features=ONES * VOCABULARY, targets=ONES), "training tokens that are not from 0 to 4"),
        (Samples(features=ONES, targets=ONES * -1), "training tokens that are not from 0 to 4"),
    ],
)
def test_text_that_cannot_be_trained_on_is_refused(bad: Samples | LazySamples, said: str) -> None:
    with pytest.raises(DataError) as caught:
        checked_dataset(replace(GOOD, train=bad), name="mine")
    assert said in str(caught.value)


def test_blocks_of_two_lengths_are_refused() -> None:
    with pytest.raises(DataError, match=r"shape \[6\] per sample and test features of \[3\]"):
        checked_dataset(replace(GOOD, test=Samples(features=ONES, targets=ONES)), name="mine")


@pytest.mark.needs("workers")
def test_a_worker_knows_how_large_the_vocabulary_is() -> None:
    from clients.workers.shared_data import VocabularyOnly, mapped_data, share_data

    work = workload()
    shared = share_data(work)
    assert shared is not None
    there = mapped_data(shared[1])
    assert there.text == VocabularyOnly(VOCABULARY) and there.num_outputs == VOCABULARY
    assert torch.equal(there.train.features, GOOD.train.features)
    assert work.dataset.text is not None and Bytes().vocabulary_size == 257


@pytest.mark.needs("landscape")
@pytest.mark.parametrize("batch", [1, 7])
def test_the_curvature_of_text_is_that_of_its_tokens_whatever_the_batches(batch: int) -> None:
    from fedsign.landscape.curvature import Curvature

    work = workload()
    model, test = work.make_model().double(), work.dataset.test
    assert isinstance(test, Samples)
    direction = torch.randn(VOCABULARY**2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole, parts = Curvature(model, work.task, test), Curvature(model, work.task, test, batch=batch)
    torch.testing.assert_close(parts.gradient(), whole.gradient(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(parts.product(direction), whole.product(direction), rtol=1e-10, atol=1e-12)


@pytest.mark.needs("landscape")
def test_a_loss_landscape_of_text_is_that_of_its_tokens() -> None:
    from fedsign.landscape.landscape import Landscape

    work = workload()
    model, test = work.make_model(), work.dataset.test
    assert isinstance(test, Samples)
    landscape = Landscape(model, work.task, test)
    found = landscape.at(torch.stack([landscape.center, torch.zeros_like(landscape.center)]))
    assert found.error is None
    assert found.loss.tolist() == pytest.approx([work.evaluate(model)["loss"], math.log(VOCABULARY)], rel=1e-6)
