"""The workload that server and clients derive from the configuration: data, partition, model, task.

Every process builds its own from the same configuration and seed; none of it is sent.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsign import plugins
from fedsign.config import ExperimentConfig, from_toml
from fedsign.data.augment import augmented
from fedsign.data.base import AnySamples, Dataset, IntArray, Samples, normalized
from fedsign.data.checks import RULES as FIT_RULES
from fedsign.data.checks import Fit, checked_dataset
from fedsign.data.client_data import ClientData, client_data_of
from fedsign.data.contract import with_numbers
from fedsign.data.normalize import IDENTITY, Normalization
from fedsign.data.partition.base import Split, split_of
from fedsign.data.partition.lazy import counted_clients
from fedsign.data.splitting import hold_out_validation
from fedsign.errors import ConfigError, DataError, FedSignError
from fedsign.evaluation import Evaluation, OnOutputs
from fedsign.extensions import extensions
from fedsign.federation.codec import digest_of
from fedsign.federation.encoding import UpdateEncoding
from fedsign.models.fitted import fit
from fedsign.models.outside_state import keep_outside_state
from fedsign.models.transform import Transform, sent_tensors, transforms_of
from fedsign.models.weights import load_weights, scale_weights
from fedsign.numerics import Numerics, device_of
from fedsign.records import Role, roles_of
from fedsign.registry import KINDS, error_in, resolve
from fedsign.rules import check
from fedsign.sections import Part
from fedsign.seeding import Purpose, generator, global_stream
from fedsign.tasks.base import IGNORED, ModelLoss, Task


@dataclass(frozen=True)
class Workload:
    """Data, partition, model and task of an experiment, each built on first use."""

    config: ExperimentConfig
    sites_here: frozenset[int] | None = None  # sites whose local data this process reads (see ClientData)

    @cached_property
    def client_data(self) -> ClientData | None:
        """The reader of data that clients hold themselves; None if one data set is partitioned."""
        return client_data_of(self.config)

    @cached_property
    def dataset(self) -> Dataset:
        """The full data set: checked, with validation samples held out and features normalized.

        Raises:
            DataError: the factory returns data that cannot be trained on.
            ConfigError: the data do not fit the task, a metric or the augmentation.
        """
        config, part = self.config, self.config.data
        with self._stream(Purpose.DATA, part):
            if self.client_data is not None:
                dataset = self.client_data.read(self.sites_here)
            else:
                dataset = checked_dataset(part.build(config.seed), name=part.name)
            # here, because normalization may round otherwise on another machine
            vars(self)["data_digest"] = dataset.digest()
            if self.client_data is None:
                dataset = hold_out_validation(dataset, part.validation_fraction, config.seed)
            check(FIT_RULES, Fit(dataset, config))
            if dataset.text is None and not self._keeps_integers(dataset):
                dataset = with_numbers(dataset)
            return normalized(dataset, part.normalize, Normalization(shift=part.mean, scale=part.std))

    def _keeps_integers(self, dataset: Dataset) -> bool:
        """Whether integer features reach the model as such: one of the user's own, which may embed them."""
        part, is_own = self.config.data, self.config.model.name not in KINDS["model"].table
        is_plain = part.normalize == "none" or (dataset.normalization == IDENTITY and not dataset.standardized)
        return is_own and is_plain and part.normalize in ("none", "default") and part.augment == "none"

    @cached_property
    def data_digest(self) -> str:
        """A digest of the data as they were read; see `Dataset.digest`."""
        _ = self.dataset
        return str(vars(self)["data_digest"])

    @cached_property
    def split(self) -> Split:
        """The partition of the training samples, and what had to be moved to get it.

        Raises:
            DataError: the data cannot be partitioned this way, or the factory returns no valid partition.
        """
        part, train = self.config.partition, self.dataset.train
        rng = generator(self.config.seed, Purpose.PARTITION)
        with self._stream(Purpose.SPLITTING, part):
            split = split_of(part.build(train, part.num_clients, rng), name=part.name)
        if self.client_data is not None:
            return split  # clients without local data have none here
        check_partition(
            split.indices,
            num_clients=part.num_clients,
            num_samples=len(train),
            name=part.name,
            is_shared=split.is_shared,
        )
        return split

    @property
    def partition(self) -> Sequence[IntArray]:
        """Indices of training samples, one array per client.  Lazy: do not iterate, there may be a million."""
        return self.split.indices

    @cached_property
    def task(self) -> Task:
        """The task, with its loss.

        Raises:
            ConfigError: the factory returns an object without a loss.
        """
        task: Task = plugins.build("task", self.config.task, {})
        if not callable(getattr(task, "loss", None)):
            raise ConfigError(
                f"task={self.config.task} gives a {type(task).__name__} without a method `loss`; expected "
                "loss(outputs, targets), which gives the mean loss of a batch."
            )
        return task

    @cached_property
    def training_task(self) -> Task:
        """The loss that clients minimize: the model's, or the task's with label smoothing and temperature if set."""
        client = self.config.client
        if client.loss == "model":
            return ModelLoss()
        neutral = {"label_smoothing": 0.0, "temperature": 1.0}
        settings = {name: value for name in neutral if (value := getattr(client, name)) != neutral[name]}
        if not settings:
            return self.task
        task: Task = plugins.build("task", self.config.task, settings)
        return task

    def labels(self, targets: Tensor) -> dict[str, Tensor]:
        """What a training pass is given beside features: the targets if the model computes the loss, else nothing."""
        if self.config.client.loss != "model":
            return {}
        if self.dataset.text is None:
            return {"labels": targets}
        # models of `transformers` would shift labels, but a target is the next token already; one that does not read
        # `shift_labels` has no loss, which the rehearsal finds
        return {"labels": torch.full_like(targets, IGNORED), "shift_labels": targets}

    @cached_property
    def device(self) -> torch.device:
        """The device for training and evaluation."""
        return self.numerics.device

    @cached_property
    def numerics(self) -> Numerics:
        """The numerics of [engine] and client.low_precision."""
        engine = self.config.engine
        return Numerics(
            device=device_of(engine.device),
            precision=engine.precision,
            channels_last=engine.channels_last,
            tf32=engine.tf32,
            compile=engine.compile,
            low_precision=self.config.client.low_precision,
        )

    @cached_property
    def training_samples(self) -> AnySamples:
        """All clients' training samples, on the device."""
        return self.dataset.train.to(self.device)

    def take_data(self, other: "Workload") -> None:
        """Reuse the data set and split of another experiment where they would be identical."""
        ours, theirs = self.config, other.config
        keys = ["seed", "data", "task", "metrics"]
        if self.client_data is not None:
            keys += ["partition", "engine", "server"]  # they determine which sites are read, and where
        if any(getattr(ours, key) != getattr(theirs, key) for key in keys):
            return
        models = KINDS["model"].table
        if (ours.model.name in models) != (theirs.model.name in models):
            return  # which decides whether integer features stay integers
        cached = vars(other)  # cached_property stores its values there
        keys = ["dataset", "data_digest", *(["split"] if ours.partition == theirs.partition else [])]
        for key in keys:
            if key in cached:
                vars(self)[key] = cached[key]

    def with_section(self, section: str, **changes: Any) -> "Workload":
        """A workload with the same data and split, but other settings in a section such as `model`."""
        changed = getattr(self.config, section).model_copy(update=changes)
        other = Workload(self.config.model_copy(update={section: changed}), self.sites_here)
        # share what is built already and does not depend on the change
        kept = [
            "dataset",
            "data_digest",
            "split",
            *(("task", "device", "training_samples", "_shared") if section == "client" else ()),
        ]
        vars(other).update({name: vars(self)[name] for name in kept if name in vars(self)})
        return other

    def samples_of(self, partition: int) -> AnySamples:
        """One client's training samples."""
        return self.dataset.train[self.partition[partition]]

    def max_examples(self, partition: int) -> int:
        """Upper limit of a reply's num_examples: the client's samples, or a setting if only the client knows them."""
        return self.config.server.max_examples if self.client_data is not None else len(self.partition[partition])

    def share_of(self, partition: int) -> IntArray:
        """Indices of one client's training samples.

        Raises:
            DataError: the client's data are not in this process.
        """
        share = self.split.indices[partition]
        if not len(share):
            raise DataError(f"client {partition} has no samples in this process; train it where its data are.")
        return share

    @cached_property
    def is_evaluated_at_clients(self) -> bool:
        """Whether clients evaluate on their own samples, instead of the server."""
        return self.client_data is not None and self.client_data.is_evaluated_at_clients

    def augment(self, features: Tensor) -> Tensor:
        """An augmented training batch (draws from torch's global generator); unchanged for `none`."""
        return augmented(features, self.config.data.augment, self.dataset.normalization)

    def make_update_encoding(self) -> UpdateEncoding | None:
        """The encoding of updates from the extension point `update_encoding`; None sends whole models."""
        return next(filter(None, (make(self) for make in extensions("update_encoding"))), None)

    @property
    def data_warnings(self) -> list[str]:
        """What readers of a run should know of its data: the data set's notes, and that samples were moved."""
        notes = [*self.dataset.notes]
        if len(self.dataset.train) and self.split.num_moved:  # else the data stay with the clients
            notes.append(self.split.moved_sentence(self.config.partition.name))
        return notes

    def check_data(self) -> list[dict[str, Any]]:
        """What the extension point `run_check` finds in the data, as records of findings.jsonl.

        Raises:
            DataError: a check refuses the data.
        """
        with global_stream(self.config.seed, Purpose.DATA):
            return [record for check in extensions("run_check") for record in check(self)]

    def make_model(self) -> nn.Module:
        """A new model with the experiment's initial parameters, identical in every process."""
        if "_first_model" in vars(self):
            return self._like(vars(self)["_first_model"])
        # only now on its device: initial values are drawn on the CPU, the same for every device
        data = self.dataset.input_shape, self.dataset.num_outputs
        model = self._made(*data, has_values=True).to(self.device)
        for each in transforms_of(model):
            each.place(model, self._shared)
        keep_outside_state(model, self._shared.values())
        vars(self).setdefault("model_bytes", _num_bytes(model))
        # building another one would hold what is shared twice for a moment
        if 2 * sum(tensor.nbytes for tensor in self._shared.values()) > self.model_bytes:
            vars(self)["_first_model"] = self._like(model)
        return model

    def make_unrounded(self) -> nn.Module | None:
        """A model as `make_model`'s, but in float32, from which masters start; None without a `dtype` and files."""
        part = self.config.model
        if "dtype" not in part.settings or not (part.start or part.settings.get("path")):
            return None
        return self.with_section("model", dtype="float32").make_model()

    def make_outline(self) -> nn.Module:
        """A new model on the meta device: its tensors have neither values nor memory.

        Parts that are made otherwise, such as from NumPy, have both.  Not all models can be made this way.
        """
        data = self.dataset.input_shape, self.dataset.num_outputs  # read before, since data must have values
        with torch.device("meta"):
            return self._made(*data, has_values=False)

    def _made(self, input_shape: tuple[int, ...], num_outputs: int, *, has_values: bool) -> nn.Module:
        with self._stream(Purpose.MODEL, self.config.model):
            model: nn.Module = self.config.model.build(input_shape, num_outputs)
            part, features = self.config.model, torch.zeros(2, *input_shape, dtype=self._feature_type)
            try:
                fit(model, features, name=part.name, output=part.output, labels=[*self.labels(features)])
            except FedSignError:
                raise
            except Exception as error:  # a pass through a user's model
                raise error_in("model", part.name, error) from error
            for transform in extensions("model_transform"):
                transform(self.config, model)
        if has_values:
            scale_weights(model, self.config.model.init_scale)
        if has_values and self.config.model.start:
            load_weights(model, Path(self.config.model.start), key="model.start")
        strategy = self.config.strategy
        adapt = getattr(resolve("strategy", strategy.name), "adapt_model", None)  # Flower's strategies lack it
        if adapt is not None:
            adapt(model, strategy.settings)
        optimizer = self.config.client.optimizer
        adapt = getattr(resolve("optimizer", optimizer.name), "adapt_model", None)
        if adapt is not None:
            with global_stream(self.config.seed, Purpose.ADAPTERS):
                adapt(model, optimizer.settings)
        # saves building a large model again for these
        vars(self).setdefault("roles", roles_of(model))
        if has_values:  # transforms may hold tensors, such as adapters that are frozen
            vars(self).setdefault("transforms", transforms_of(model))
        return model

    @property
    def _feature_type(self) -> torch.dtype:
        train = self.dataset.train
        return train.features.dtype if isinstance(train, Samples) else torch.float32

    def _stream(self, purpose: Purpose, part: Part) -> AbstractContextManager[object]:
        """A context manager: the global generators for a part's factory."""
        resolve(part.kind, part.name)  # before, since a module may draw when it is imported
        return global_stream(self.config.seed, purpose)

    def release_models(self) -> None:
        """Drop what is kept to make further models; the next one is made anew."""
        for name in ("_shared", "_first_model"):
            vars(self).pop(name, None)

    def _like(self, model: nn.Module) -> nn.Module:
        """A copy of a model, except for the tensors that all models share."""
        return deepcopy(model, {id(tensor): tensor for tensor in self._shared.values()})

    @cached_property
    def roles(self) -> dict[str, Role]:
        """The role of every tensor that is sent, in `state_dict` order."""
        return roles_of(self.make_model())

    @cached_property
    def frozen(self) -> dict[str, tuple[Tensor, str]]:
        """The frozen tensors of this process's own build, in sent form, with their digests."""
        tensors = sent_tensors(self.make_model())
        frozen = {name: tensor.detach().cpu() for name, tensor in tensors.items() if self.roles[name] is Role.FROZEN}
        return {name: (tensor, digest_of(tensor)) for name, tensor in frozen.items()}

    @cached_property
    def model_bytes(self) -> int:
        """The size of a model in memory."""
        return _num_bytes(self.make_model())

    @cached_property
    def transforms(self) -> tuple[Transform, ...]:
        """The transforms of the experiment's models."""
        return transforms_of(self.make_model())

    @cached_property
    def _shared(self) -> dict[str, Tensor]:
        """Tensors that all models of this experiment share within this process, by name."""
        return {}

    def label_counts(self) -> list[list[int]]:
        """Samples per counted client and class, [clients][classes]; sizes unless each sample has one class.

        Which clients are counted: [Note: counted clients] in fedsign.data.partition.lazy.
        """
        return [self.counts_of(client) for client in counted_clients(self.partition)]

    def counts_of(self, partition: int) -> list[int]:
        """A client's training samples per class; their number unless each sample has one."""
        index, class_names = self.partition[partition], self.dataset.target.class_names
        if not class_names:
            return [len(index)]
        counts: list[int] = np.bincount(self.dataset.train.targets.numpy()[index], minlength=len(class_names)).tolist()
        return counts

    def evaluate(
        self,
        model: nn.Module,
        samples: tuple[AnySamples, AnySamples | None] | None = None,
        *,
        num_threads: int = 1,
        on_outputs: OnOutputs | None = None,
        round: int | None = None,
    ) -> dict[str, float]:
        """Loss and metrics on the test samples (or the given ones), and as `validation_...` on held-out samples.

        `num_threads` threads share the batches on a CPU; results do not depend on it.  `on_outputs` observes the
        outputs for the test samples.  With a `round`, metrics that are not due in it are left out.
        """
        test, validation = samples or (self.dataset.test, self.dataset.validation)
        evaluate_on = partial(self.evaluation.evaluate, model.eval(), num_threads=num_threads, round=round)
        values = evaluate_on(test, on_outputs=on_outputs)
        if validation is not None:
            metrics = evaluate_on(validation)
            values |= {f"validation_{name}": value for name, value in metrics.items()}
        return values

    @cached_property
    def evaluation(self) -> Evaluation:
        """How models are evaluated."""
        return Evaluation(
            task=self.task,
            metrics=[(name.rpartition(":")[2], resolve("metric", name)) for name in self.config.metrics],
            numerics=self.numerics,
            text=self.dataset.text,
            config=self.config,
        )


def _num_bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


@lru_cache(maxsize=2)
def workload_of(config_toml: str) -> Workload:
    """The workload of a configuration in TOML; cached, since a process handles many messages."""
    return Workload(from_toml(config_toml))


def check_partition(
    indices: Sequence[IntArray], *, num_clients: int, num_samples: int, name: str, is_shared: bool = False
) -> None:
    """Raise DataError unless every counted client has samples and, unless `is_shared`, none is dealt out twice.

    Which clients are counted: [Note: counted clients] in fedsign.data.partition.lazy.
    """
    shares = [indices[client] for client in counted_clients(indices)]
    if len(indices) != num_clients or any(len(index) == 0 for index in shares):
        raise DataError(
            f"partition.name={name} gives {len(indices)} parts, {sum(len(index) == 0 for index in shares)} of them "
            f"empty; expected {num_clients} with at least one sample each."
        )
    for dealt in shares if is_shared else [np.concatenate(shares)]:
        if dealt.min() < 0 or dealt.max() >= num_samples or np.bincount(dealt).max() > 1:
            raise DataError(
                f"partition.name={name} deals a sample out twice{' to one client' if is_shared else ''} or one that "
                f"does not exist; expected different indices from 0 to {num_samples - 1}."
            )
