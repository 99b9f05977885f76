"""The outer loop of a condensation: a hypergradient, an Adam step, images clamped to [0, 1].

All random draws derive from (seed, step), so a condensation resumed from a checkpoint repeats the same draws.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import isqrt
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fedsign.bilevel.chain import Chain, conv_net, mlp
from fedsign.bilevel.condensation import IMAGES, LABELS, Draw, Training, draws
from fedsign.bilevel.estimate import Method
from fedsign.bilevel.settings import CondensationConfig, PhaseSection
from fedsign.bilevel.unroll import Problem, Tree, final_state
from fedsign.bilevel.updates import Adam, parameters_of
from fedsign.data.base import AnySamples, Dataset, Samples
from fedsign.data.checks import checked_dataset
from fedsign.data.contract import with_numbers
from fedsign.errors import DataError
from fedsign.metrics.accuracy import accuracy
from fedsign.numerics import device_of
from fedsign.seeding import Purpose, torch_generator

_EVALUATION_BATCH = 1024


@dataclass(slots=True)
class Progress:
    """The state of a condensation: images with Adam's moments, and the number of steps taken."""

    state: Tree
    step: int = 0

    @property
    def meta(self) -> Tree:
        """The images, and their soft labels if any."""
        return parameters_of(self.state)


@dataclass(frozen=True)
class Condensation:
    """Data, network and methods of a configuration, each built on first use.

    `share` replaces the configured data by a client's own, which may lack some classes.
    """

    config: CondensationConfig
    share: Dataset | None = None

    @cached_property
    def dataset(self) -> Dataset:
        """The real images; flat features are reshaped to square images of one channel.

        Raises:
            DataError: the data are not images with classes, or not in [0, 1].
        """
        part, size = self.config.data, self.config.image_size
        dataset = self.share or with_numbers(checked_dataset(part.build(self.config.seed), name=part.name))
        if not dataset.target.class_names:
            raise DataError(
                f"data '{part.name}' has no classes, but condensation makes images of each class; take another data "
                "set."
            )
        train, test = (_images(each, part.name, size) for each in (dataset.train, dataset.test))
        low, high = train.features.aminmax()
        if low < 0 or high > 1:
            raise DataError(
                f"data '{part.name}' has features from {low:.3g} to {high:.3g}; expected pixels from 0 to 1, as "
                "fractions."
            )
        return Dataset(train=train, test=test, class_names=dataset.class_names)

    @cached_property
    def network(self) -> Chain:
        """The network that trains on the synthetic images."""
        dataset, config = self.dataset, self.config.network
        shape = dataset.input_shape
        if config.kind == "mlp":
            return mlp(shape, dataset.num_outputs, hidden=config.hidden)
        if min(shape[1:]) < 2 ** (config.num_blocks + 1):  # InstanceNorm makes the mean of a channel, so 1x1, constant
            raise DataError(
                f"images of {shape[1]}x{shape[2]} were given for network.num_blocks={config.num_blocks}, each of which "
                "halves them, but the last one has to leave 2x2 at least; lower network.num_blocks, or embed them "
                f"with image_size={2 ** (config.num_blocks + 1)}."
            )
        return conv_net(shape, dataset.num_outputs, width=config.width, num_blocks=config.num_blocks)

    @cached_property
    def device(self) -> torch.device:
        """The device of all computations."""
        return device_of(self.config.device)

    @cached_property
    def labels(self) -> Tensor:
        """The classes of the synthetic images, [k]."""
        return self.classes.repeat_interleave(self.config.images_per_class)

    @cached_property
    def classes(self) -> Tensor:
        """All classes; with `share`, only those that it has."""
        return torch.arange(self.dataset.num_outputs) if self.share is None else self.dataset.train.targets.unique()

    def begin(self) -> Progress:
        """The initial images."""
        config, train = self.config, self.dataset.train
        generator = torch_generator(config.seed, Purpose.CONDENSATION)
        images = []
        for label in self.classes.tolist():
            of_class = (train.targets == label).nonzero().flatten()
            if config.start != "noise" and not len(of_class):
                raise DataError(f"class {label} has no training image to start from; expected one, or start=noise.")
            images += [self._first_image(of_class, generator) for _ in range(config.images_per_class)]
        meta = {IMAGES: torch.stack(images).to(self.device)}
        if config.soft_labels:
            num_classes = self.dataset.num_outputs
            shares = functional.one_hot(self.labels, num_classes).float()
            # logits whose softmax is label_confidence for the image's own class, uniform over the others
            rest = (1 - config.label_confidence) / (num_classes - 1)
            meta[LABELS] = (rest + shares * (config.label_confidence - rest)).log().to(self.device)
        return Progress(meta)

    def take(self, progress: Progress) -> dict[str, Any]:
        """Advance `progress` by one outer step; returns the step's record."""
        started, first = perf_counter(), self.config.first_phase.steps
        phase, method = self._phases[progress.step >= first]
        step = progress.step - (first if progress.step >= first else 0)
        if step == 0:  # each phase starts with fresh moments
            progress.state = Adam().begin(progress.meta)
        # round 0 is the stream of `begin`
        generator = torch_generator(self.config.seed, Purpose.CONDENSATION, round=progress.step + 1)
        estimate = method(self.problem(progress.meta, generator), progress.meta, generator=generator)
        progress.state = Adam().apply(progress.state, estimate.gradient, phase.lr * (1 - step / phase.steps))
        # in place is safe: Adam.apply has made a new state
        progress.state[IMAGES].clamp_(0, 1)
        progress.step += 1
        return {
            "step": progress.step,
            "method": phase.method.name,
            "loss": estimate.value,
            "gradient_norm": float(
                torch.stack([each.square().sum() for each in estimate.gradient.values()]).sum().sqrt()
            ),
            "num_directions": estimate.num_directions,
            "variance": estimate.variance,
            "relative_variance": estimate.relative_variance,
            "time_s": perf_counter() - started,
        }

    def problem(self, meta: Tree, generator: torch.Generator) -> Problem:
        """A fresh network, its batches, and the real images of the outer loss."""
        config, train = self.config, self.dataset.train
        inner, data = self.training(meta, generator)
        size = min(config.outer.batch_size, len(train))
        chosen = torch.randperm(len(train), generator=generator)[:size]
        images, targets = (each.to(self.device) for each in train.batch(chosen))
        return Problem(
            inner=inner,
            data=data,
            outer=lambda state, _: functional.cross_entropy(self.network.outputs(state["parameters"], images), targets),
        )

    def training(
        self, meta: Tree, generator: torch.Generator, *, labels: Tensor | None = None
    ) -> tuple[Training, list[Draw]]:
        """A fresh network and its training batches; `labels` replaces those of this configuration."""
        labels = self.labels if labels is None else labels
        settings, num_images = self.config.inner, len(meta[IMAGES])
        inner = Training(
            network=self.network,
            start=self.network.begin(generator).to(self.device),
            labels=labels.to(self.device),
            num_classes=self.dataset.num_outputs,
            momentum=settings.momentum,
            decay=settings.weight_decay,
        )
        size = settings.batch_size or num_images
        return inner, draws(num_images, depth=settings.depth, batch_size=size, rate=settings.lr, generator=generator)

    @torch.no_grad()
    def evaluate(self, meta: Tree, *, labels: Tensor | None = None) -> float:
        """Mean test accuracy of fresh networks trained on the synthetic images only."""
        accuracies = []
        for index in range(self.config.outer.evaluations):
            # by index alone: every evaluation trains the same networks, and does not shift the draws of the outer loop
            generator = torch_generator(self.config.seed, Purpose.CONDENSED, round=index)
            inner, data = self.training(meta, generator, labels=labels)
            # final_state does not use the outer loss
            state = final_state(Problem(inner=inner, data=data, outer=lambda state, _: state["parameters"]), meta)
            batches = (features.to(self.device) for features, _ in self.dataset.test.batches(_EVALUATION_BATCH))
            outputs = torch.cat([self.network.outputs(state["parameters"], features).cpu() for features in batches])
            accuracies.append(accuracy(outputs, self.dataset.test.targets))
        return sum(accuracies) / len(accuracies)

    @cached_property
    def _phases(self) -> tuple[tuple[PhaseSection, Method], ...]:
        config = self.config
        last = PhaseSection(steps=config.outer.steps, lr=config.outer.lr, method=config.method)
        return tuple((phase, phase.method.build()) for phase in (config.first_phase, last))

    def _first_image(self, of_class: Tensor, generator: torch.Generator) -> Tensor:
        train = self.dataset.train
        match self.config.start:
            case "real":
                chosen = of_class[torch.randint(len(of_class), (1,), generator=generator)]
                # a copy of its own, since the optimizer changes it
                return train.batch(chosen)[0][0].clone()
            case "mean":
                return train.batch(of_class)[0].mean(0)
            case "noise":
                return torch.rand(self.dataset.input_shape, generator=generator)


def _images(samples: AnySamples, name: str, size: int) -> AnySamples:
    """Images [n, c, h, w], optionally centered in `size` x `size` zeros."""
    shape = samples.shape
    if len(shape) != 3:
        side = isqrt(shape[0]) if len(shape) == 1 else 0
        if not side or side * side != shape[0] or not isinstance(samples, Samples):
            raise DataError(
                f"data '{name}' has features of the shape {list(shape)}; expected images, [channels, height, width]."
            )
        samples = replace(samples, features=samples.features.reshape(-1, 1, side, side))
    if not size:
        return samples
    height, width = samples.shape[1:]
    if size < max(height, width) or not isinstance(samples, Samples):
        raise DataError(
            f"image_size={size} was given for images of {height}x{width} of data '{name}'; expected at least "
            f"{max(height, width)}, and images that are in memory; leave it at 0."
        )
    left, top = (size - width) // 2, (size - height) // 2
    frame = (left, size - width - left, top, size - height - top)
    return replace(samples, features=functional.pad(samples.features, frame))
