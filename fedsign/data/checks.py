"""Check that a factory's data can be trained on, and fit the task, the metrics and the augmentation."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from fedsign.config import ExperimentConfig
from fedsign.data.base import AnySamples, Dataset, LazySamples
from fedsign.data.contract import check_alike, check_lengths, met
from fedsign.data.target import Target, TargetKind
from fedsign.data.torch_dataset import from_torch, is_map_style
from fedsign.errors import DataError
from fedsign.rules import Rule
from fedsign.tasks.base import IGNORED
from fedsign.traits import MetricTraits, TaskTraits

_MOST_CLASSES = 1000


def checked_dataset(result: object, *, name: str) -> Dataset:
    """A factory's result as a valid data set.

    Also accepts a pair (train, test) of map-style torch Datasets, or an object with these two attributes.

    Raises:
        DataError: the result is neither, or its features, targets or owners do not match.
    """
    where = f"data.name={name} gives"
    if not isinstance(result, Dataset):
        dataset = _from_pair(result, name)
    elif (text := result.text) is None:
        dataset = met(result, result.class_names, where=where)
    else:
        dataset = result
        for part, samples in (("training", dataset.train), ("test", dataset.test)):
            check_lengths(samples, f"{where} {part}")
            _check_tokens(samples, text.vocabulary_size, f"{where} {part}")
    check_alike(dataset, where=where)
    if dataset.standardized and len(dataset.standardized) != dataset.input_shape[0]:
        raise DataError(
            f"data.name={name} gives {len(dataset.standardized)} values of `standardized` and "
            f"{dataset.input_shape[0]} channels; expected one for each, or none at all."
        )
    return dataset


@dataclass(frozen=True)
class Fit:
    """A data set and its experiment, as rules read them."""

    dataset: Dataset
    config: ExperimentConfig

    @cached_property
    def target(self) -> Target:
        return self.dataset.target

    @property
    def shape(self) -> list[int]:
        return [*self.dataset.input_shape]

    @property
    def fitting_tasks(self) -> str:
        tasks = " or ".join(f"task={name}" for name in TaskTraits.having(targets=self.target.trait))
        if not tasks:
            return "a task of your own (task=module:Class), with your own model and metrics"
        if self.target.trait != TargetKind.NUMBER or "rmse" in self.config.metrics:
            return tasks
        return f"{tasks} (--set task=regression --set 'metrics=[\"rmse\"]')"

    @property
    def other_data(self) -> str:
        """How the targets become those of the given task, if they may be meant so."""
        settings, wanted = self.config.data.settings, TaskTraits.of(self.config.task).targets
        is_table = "target_type" in settings
        if wanted == TargetKind.CLASS and (labels := self._whole_targets):
            how = "use --set data.target_type=class" if is_table else "give integers, y.astype(int)"
            return f"if {', '.join(map(str, labels[:5]))}{', ...' if len(labels) > 5 else ''} are classes, {how}"
        if (wanted, self.target.kind) == (TargetKind.NUMBER, TargetKind.CLASS) and "path" in settings:
            return f"give numbers: {'--set data.target_type=number' if is_table else 'y.astype(float)'}"
        return "other data"

    @property
    def _whole_targets(self) -> list[int]:
        """Different targets, if they are few whole numbers, such as labels that were written as floats."""
        targets = self.dataset.train.targets
        if self.target.kind is not TargetKind.NUMBER:
            return []
        values = targets.unique().tolist()
        is_few = len(values) <= min(_MOST_CLASSES, len(targets) // 2)
        return [int(each) for each in values] if is_few and all(each == int(each) for each in values) else []

    @property
    def metrics(self) -> list[str]:
        return [*self.config.metrics]

    @property
    def lacking(self) -> tuple[str, ...]:
        """What the test samples lack for a metric; empty where they lie elsewhere."""
        return next(filter(None, map(self._lacking_for, self.config.metrics)), ())

    @property
    def fitting_metrics(self) -> str:
        names = MetricTraits.having(targets=self.target.trait)
        fitting = ", ".join(sorted(name for name in names if not self._lacking_for(name)))
        return f"one of {fitting}" if fitting else "a metric of your own (module:function)"

    def _lacking_for(self, metric: str) -> tuple[str, ...]:
        inputs = MetricTraits.of(metric).inputs
        if inputs is None or not len(self.dataset.test):
            return ()
        return tuple(filter(None, inputs.lacks(self.dataset)))


RULES: tuple[Rule[Fit], ...] = (
    Rule(
        lambda fit: TaskTraits.of(fit.config.task).targets not in ("", fit.target.trait),
        "task={config.task} was given, but data.name={config.data.name} has {target}",
        "use {fitting_tasks}, or {other_data}",
    ),
    Rule(
        lambda fit: next(
            (name for name in fit.config.metrics if MetricTraits.of(name).targets not in ("", fit.target.trait)), ""
        ),
        "metrics={metrics} was given, but data.name={config.data.name} has {target}, for which '{found}' says nothing",
        "use {fitting_metrics}, or none: --set metrics='[]'",
    ),
    Rule(
        lambda fit: fit.lacking,
        "metrics={metrics} was given, but data.name={config.data.name} has {found[0]}",
        "use {found[1]}, or other metrics",
    ),
    Rule(
        lambda fit: fit.dataset.text is not None and fit.config.data.augment != "none",
        "data.augment={config.data.augment} was given, but data.name={config.data.name} has text, whose tokens are "
        "no quantities",
        "use data.augment=none",
    ),
    Rule(
        lambda fit: fit.dataset.text is not None and fit.config.data.normalize not in ("default", "none"),
        "data.normalize={config.data.normalize} was given, but data.name={config.data.name} has text, whose tokens "
        "are no quantities",
        "use data.normalize=none",
    ),
    Rule(
        lambda fit: fit.config.data.augment != "none" and len(fit.dataset.input_shape) != 3,
        "data.augment={config.data.augment} was given, but a sample of data.name={config.data.name} has the shape "
        "{shape}; only images [channels, height, width] can be cropped and flipped",
        "let the data have that shape (digits: data.flat=false), or use data.augment=none",
    ),
)


def _pair_of(result: object) -> tuple[Any, ...]:
    if isinstance(result, tuple):
        return result
    if isinstance(result, Mapping):
        return result.get("train"), result.get("test")
    return getattr(result, "train", None), getattr(result, "test", None)


def _from_pair(result: Any, name: str) -> Dataset:
    pair = _pair_of(result)
    if len(pair) != 2 or not all(is_map_style(part) for part in pair):
        raise DataError(
            f"data.name={name} gives a {type(result).__name__}; expected a fedsign.data.base.Dataset, or a pair "
            "(train, test) of torch Datasets that have __len__ and __getitem__."
        )
    return from_torch(*pair, where=f"data.name={name} gives")


def _check_tokens(samples: AnySamples, vocabulary_size: int, prefix: str) -> None:
    """Check blocks of tokens [n, T] or [n, T, 2] and next tokens [n, T], in memory."""
    if isinstance(samples, LazySamples):
        raise DataError(
            f"{prefix} text that is fetched batch by batch; expected blocks of tokens in memory: give Samples."
        )
    features, targets = samples.features, samples.targets
    shapes = [(*targets.shape,), (*targets.shape, 2)]
    if not features.dtype == targets.dtype == torch.int64 or targets.ndim != 2 or features.shape not in shapes:
        raise DataError(
            f"{prefix} text as {features.dtype} of shape {list(features.shape)} with targets of "
            f"{targets.dtype} and {list(targets.shape)}; expected torch.int64 [blocks, block length] for both, or "
            "[blocks, block length, 2] for tokens with positions."
        )
    if features.ndim == 3:
        features, positions = features.unbind(dim=-1)
        steps = positions.diff(dim=1, prepend=positions.new_full((len(positions), 1), -1))
        if not ((positions == 0) | (steps == 1)).all():
            raise DataError(
                f"{prefix} text with positions that do not count the tokens of each document; expected 0, 1, 2 ... "
                "from the start of each block, and 0 again where a document begins."
            )
    scored = targets[targets != IGNORED]
    if not len(scored):
        raise DataError(
            f"{prefix} text of which no token is scored; expected at least one target that is not {IGNORED}."
        )
    if not all(int(each.min()) >= 0 and int(each.max()) < vocabulary_size for each in (features, scored)):
        raise DataError(
            f"{prefix} tokens that are not from 0 to {vocabulary_size - 1}, as its tokenizer's are; use the same "
            "tokenizer for both."
        )
