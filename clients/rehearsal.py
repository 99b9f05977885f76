"""A rehearsal before the first round: what is given is tried on a few samples, and refused in one sentence.

A batch passes through model, loss, and metrics; outputs are compared with the described target.  Then two clients take
one step each: the tensors that leave a client are loaded again, averaged, and must be those of a client that trained
alone.  So a model that lets one client see another is found, whatever it keeps its memory in.

[Note: what a rehearsal does not see] Branches that a few samples do not take, such as one of a later round.  A model of
64 MB or more makes passes and no step, which would take minutes and a second model's memory: what only a backward pass
or an optimizer would keep is not seen there.  Ranks have a trial of their own (`clients.sharding.trial`).  Whether
a model reads a counter is tried with 1 and 1,000 more; one that it compares with 5,000 is not found.
"""

import copy
import hashlib
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from clients.state.store import ClientStore
from clients.trainer import SequentialTrainer
from clients.working_model import LARGE_BYTES, BorrowingModel
from fedsign.data.base import AnySamples
from fedsign.data.partition.lazy import counted_clients
from fedsign.data.target import TargetKind
from fedsign.errors import ConfigError, FedSignError, LateError
from fedsign.federation import counters
from fedsign.federation.aggregation import WeightedMean
from fedsign.models.batch_norm import BATCH_NORMS
from fedsign.models.fitted import described, remedy
from fedsign.models.outside_state import restore_outside_state
from fedsign.numerics import in_full
from fedsign.records import ObjectiveSpec, Tensors, TrainRequest
from fedsign.registry import error_in, place_of
from fedsign.seeding import Purpose, global_stream
from fedsign.storage.results import Record
from fedsign.traits import TaskTraits
from fedsign.workload import Workload

_FEW, _SOME = 4, 64  # samples of a pass, and for metrics; 2 of large models
_ROWS = (TargetKind.CLASS, TargetKind.NUMBER, TargetKind.VECTOR)
_WARNINGS = {
    "Using a target size": "outputs and targets of different shapes are compared, each of the ones with each of the "
    "others; expected one shape for both: reshape the outputs like the targets, such as by squeeze(-1)",
    "Casting complex values to real": "imaginary parts are dropped; expected real numbers: take .real or .abs() where "
    "that is meant",
}
"""What is an error here of what torch warns about, and how it is told."""
Recorded = list[tuple[str, str, str]]
"""The modules that ran: name, digest of inputs, digest of outputs."""


def rehearse(workload: Workload) -> list[Record]:
    """Try an experiment on the samples of this process; returns findings, as records of findings.jsonl.

    Raises:
        ConfigError: outputs, loss, metrics, or tensors are not what training needs, or one client sees another.
    """
    if not len(workload.dataset.train):
        return []  # the data stay at sites, which rehearse themselves
    is_large, is_sharded = workload.model_bytes >= LARGE_BYTES, workload.config.get("client.sharding.ranks", 1) > 1
    if is_large and is_sharded:
        return []  # no process may hold the whole model once more
    model = workload.make_model()
    with global_stream(workload.config.seed, Purpose.TRAINING), workload.numerics.repeatable(), _strict():
        with torch.set_grad_enabled(not is_large):  # activations that wait for a gradient are in no account
            _try_loss(workload, model, num=2 if is_large else _FEW)
        _try_metrics(workload, model, num=2 if is_large else _SOME)
        if is_large:
            _try_passes(workload, model)
    del model
    return [] if is_large or is_sharded else _try_clients(workload)


def _try_loss(workload: Workload, model: nn.Module, *, num: int) -> None:
    config, samples, numerics = workload.config, workload.training_samples, workload.numerics
    with _blaming("dataset", config.data.name):
        features, targets = samples.batch(torch.arange(min(num, len(samples))))
    for in_training in (False, True):
        if in_training and len(targets) == 1:
            break  # BatchNorm refuses such a batch
        with _blaming("model", config.model.name), numerics.reduced():
            outputs = model.train(in_training)(features)
        _check_outputs(workload, outputs, targets)
    labels, what = workload.labels(targets), f"task={config.task}"
    if labels:
        what = f"client.loss=model with model.name={config.model.name}"
        with _blaming("model", config.model.name):
            outputs = numerics.outputs(model, features, channels_last=False, **labels)
    with _blaming("task", config.task):
        loss = workload.training_task.loss(in_full(outputs), targets)
    if not isinstance(loss, Tensor) or loss.dim():
        given = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ConfigError(f"{what} gives {given} as the loss of a batch; expected a scalar tensor: its mean.")
    if labels and not loss.isfinite():
        raise ConfigError(
            f"{what} gives {loss.item()} as the loss of a batch; expected a number: "
            "for text, let the model compare `shift_labels`, or use client.loss=task."
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise ConfigError(
            f"task={config.task} with model.name={config.model.name} gives a loss that depends on no parameter; "
            "expected one that is differentiable: leave out detach(), argmax, or no_grad, and let parameters train."
        )


def _check_outputs(workload: Workload, outputs: Any, targets: Tensor) -> None:
    """Compare outputs with what the target needs, by type and shape."""
    config, target, num = workload.config, workload.dataset.target, len(targets)
    if not isinstance(outputs, Tensor):
        raise ConfigError(
            f"model.name={config.model.name} gives {described(outputs)}; expected one tensor of outputs: "
            f"{remedy(outputs)}."
        )
    shapes = []
    # the shapes that our tasks take; a user's own may take others
    if target.kind in _ROWS and TaskTraits.of(config.task).targets == target.trait:
        shapes = [[num, target.num_outputs], *([[num]] if target.kind is TargetKind.NUMBER else [])]
    fits = list(outputs.shape) in shapes if shapes else outputs.dim() > 0 and len(outputs) == num
    if not fits or not (outputs.is_floating_point() or outputs.is_complex()):
        what = f"of shape {shapes[0]}" if shapes else f"whose first dimension is {num}"
        raise ConfigError(
            f"model.name={config.model.name} gives {described(outputs)} for {num} samples with {target}; expected "
            f"floating-point numbers {what}: let the model end with {target.num_outputs} outputs per sample, the "
            "num_outputs that its factory is given."
        )


def _try_metrics(workload: Workload, model: nn.Module, *, num: int) -> None:
    """Evaluate without metrics that ask the model themselves, such as for generated answers."""
    whole, evaluation = workload.dataset.test, workload.evaluation
    if not len(whole):
        return
    asked = [(name, metric) for name, metric in evaluation.metrics if getattr(metric, "inputs", None) is None]
    evaluation = replace(evaluation, metrics=asked)
    some: AnySamples = whole[np.linspace(0, len(whole) - 1, min(num, len(whole))).astype(np.int64)]
    try:
        evaluation.evaluate(model.eval(), some, num_threads=1)
    except FedSignError:
        raise
    except Exception:  # noqa: BLE001 - a metric may need more than a few samples, such as one of each class
        if workload.sites_here is not None:
            return  # what a site cannot evaluate is a failure of its rounds, and others go on
        for name, metric in asked:
            with _blaming("metric", name):
                replace(evaluation, metrics=[(name, metric)]).evaluate(model.eval(), whole, num_threads=1)


def _two_clients(workload: Workload) -> tuple[int, int]:
    """The first two with samples; twice the same if it is alone."""
    partition = workload.partition
    first, *others = islice((client for client in counted_clients(partition) if len(partition[client])), 2)
    return first, (others or [first])[0]


def _try_passes(workload: Workload, model: nn.Module) -> None:
    """Let a large model take a client's batch again after another's."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def recorded(client: int) -> Recorded:
        restore_outside_state(model)
        with torch.no_grad(), global_stream(workload.config.seed, Purpose.TRAINING), workload.numerics.reduced():
            features, _ = workload.training_samples.batch(torch.as_tensor(workload.partition[client][:2]))
            found = _recorded(model, partial(model.train(), features))
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
        return found

    first, other = _two_clients(workload)
    alone, _, again = (recorded(client) for client in (first, other, first))
    if sentence := _difference(workload, model, alone, again):
        raise ConfigError(sentence)


def _try_clients(workload: Workload) -> list[Record]:
    """Let one client train alone and after another, for a step each; returns a finding for each counter to name."""
    first, other = _two_clients(workload)
    trainer = _OneStep(workload)
    alone = trainer.trained(first)
    trainer.trained(other)
    if _digest(trainer.trained(first)) != _digest(alone):
        raise ConfigError(trainer.difference(first, other))
    _try_mean(workload, alone)
    if workload.config.server.counters != "copied":
        return []
    names = _read(workload, [*counters.moved(alone, trainer.start)])
    return [{**counters.finding(name, is_read=True), "round": 1} for name in names]


def _read(workload: Workload, names: list[str]) -> list[str]:
    """Those of some counters on whose value a pass depends: its outputs, or other buffers."""
    model = workload.make_model().cpu() if names else nn.Module()  # an index out of range would end a GPU's process
    owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in names}
    # BatchNorm reads its counter only without a momentum
    names = [name for name, own in owners.items() if type(own) not in BATCH_NORMS or own.momentum is None]
    if not names:
        return []
    samples = workload.training_samples
    features = samples.batch(torch.arange(min(_FEW, len(samples))))[0].cpu()

    def passed(changed: Collection[str], more: int) -> str:
        found: list[Any] = []
        for in_training in (True, False):
            tried = copy.deepcopy(model).train(in_training)
            for name in changed:
                own = tried.get_buffer(name)
                own.copy_(own.logical_not() if own.dtype == torch.bool else own + more)
            # a counter that is an index may point beyond the end
            with torch.no_grad(), global_stream(workload.config.seed, Purpose.TRAINING), suppress(Exception):
                found.append(tried(features))
            found += [tensor for name, tensor in tried.named_buffers() if name not in names]
        return _digest(found)

    def is_read(changed: Collection[str]) -> bool:
        return any(passed(changed, more) != passed((), 0) for more in (1, 1000))

    return [name for name in names if is_read([name])] if is_read(names) else []


def _try_mean(workload: Workload, tensors: Tensors) -> None:
    mean = WeightedMean()
    with _blaming("model", workload.config.model.name):
        mean.add(tensors, 1.0)
        mean.add(tensors, 1.0)
        result = mean.result()
    for name, tensor in tensors.items():
        if tensor.isfinite().all() and not torch.equal(result[name].to(tensor.dtype), tensor):
            raise ConfigError(
                f"model.name={workload.config.model.name} has a tensor '{name}' of {tensor.dtype}, and the mean of two "
                "copies is another; expected floating-point or integer numbers: store it as float32."
            )


class _OneStep:
    """A trainer of one step for each client."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload.with_section("client", local_steps=1)
        if workload.numerics.compile:  # which takes longer than a run's other preparations together
            self._workload = self._workload.with_section("engine", compile=False)
        self._trainer = SequentialTrainer(self._workload)
        first = BorrowingModel(workload.make_model(), workload.numerics)
        self.start = {**first.copies(), **first.frozen()}

    def trained(self, client: int) -> Tensors:
        """A client's tensors after its step."""
        request = TrainRequest(
            round=1,
            partition=client,
            tensors=self.start,
            objective=ObjectiveSpec(),
            state_version=0,
            needed_versions=frozenset(),
        )
        with _blaming("model", self._workload.config.model.name), _strict():
            try:
                return self._trainer.train(request, ClientStore(Path("nowhere"))).tensors
            except LateError:  # which the first round will tell
                return {}

    def difference(self, client: int, other: int) -> str:
        """What makes a client's step another one once another client has trained."""
        passes, root = [], self._trainer._model.module
        for _ in range(2):
            passes.append(_recorded(root, partial(self.trained, client)))
            self.trained(other)
        config = self._workload.config
        return _difference(self._workload, root, *passes) or (
            f"task={config.task} or client.optimizer.name={config.client.optimizer.name} takes another step for the "
            "same client once another has trained; expected the same step: keep nothing between clients."
        )


def _difference(workload: Workload, root: nn.Module, alone: Recorded, again: Recorded) -> str:
    """What makes a client's passes others once another client has trained; empty if they are the same."""
    config = workload.config
    if alone[0] != again[0]:
        return (
            f"data.name={config.data.name} gives a client other samples whenever it trains; expected the same in "
            "each repetition: draw from `random`, `numpy.random`, or torch's global generator, which are seeded."
        )
    for (name, given, made), (_, given_again, made_again) in zip(alone, again, strict=False):
        if given == given_again and made != made_again:
            module = root.get_submodule(name)
            where = f"module '{name}' ({type(module).__name__})" if name else type(module).__name__
            return (
                f"model.name={config.model.name} lets one client see another: {where} gives other outputs for the "
                "same batch once another client has trained; expected what a client that trains alone gets: keep "
                "such state in attributes of the module or in buffers, not in its class, a global, or a closure."
            )
    return ""


def _recorded(root: nn.Module, act: Callable[[], object]) -> Recorded:
    """The batch that a model takes, as if of a module; then each module that ran."""
    found: Recorded = []

    def record(name: str, module: nn.Module, given: Any, outputs: Any) -> None:
        found.append((name, _digest(given), _digest(outputs)))

    with ExitStack() as hooks:
        for name, module in root.named_modules():
            hooks.enter_context(module.register_forward_hook(partial(record, name)))
        act()
    given = next((given for name, given, _ in reversed(found) if not name), "")
    return [("", given, given), *found]


def _digest(values: Any) -> str:
    """A digest of all tensors in values, bit for bit."""
    hasher = hashlib.blake2b(digest_size=16)

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            plain = value.detach().cpu().contiguous()
            hasher.update(f"{plain.dtype} {tuple(plain.shape)}".encode())
            hasher.update(plain.view(-1).view(torch.uint8).numpy().data if plain.numel() else b"")
        elif isinstance(value, dict):
            add(list(value.items()))
        elif isinstance(value, list | tuple):
            for each in value:
                add(each)

    add(values)
    return hasher.hexdigest()


@contextmanager
def _blaming(kind: str, name: str) -> Iterator[None]:
    """A context manager: an error in a user's code is told as theirs, with file and line."""
    try:
        yield
    except FedSignError:
        raise
    except Exception as error:
        sentence = next((told for text, told in _WARNINGS.items() if str(error).startswith(text)), "")
        if sentence:
            raise ConfigError(f"{kind} '{name}': {sentence}; {place_of(error)}") from error
        raise error_in(kind, name, error) from error


@contextmanager
def _strict() -> Iterator[None]:
    """A context manager: warnings that shapes broadcast, or that imaginary parts are dropped, are errors."""
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # else only the first time in a process
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # others are for the run to show, once
            for text in _WARNINGS:
                warnings.filterwarnings("error", message=text)
            yield
    finally:
        torch.set_warn_always(always)
