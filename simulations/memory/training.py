"""What clients train in a round, and what a local step and an evaluation hold, on the meta device."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from clients.batches import Batching
from clients.local_step import LocalStep
from clients.working_model import WorkingModel
from fedsign.evaluation import batch_size, logits_of
from fedsign.memory.estimate import ACTIVATIONS
from fedsign.memory.live import OTHER, LiveBytes, cuda_block
from fedsign.memory.step import GRADIENTS, STATES, WEIGHTS, Device, under_kernels
from fedsign.models.batch_norm import has_batch_norm
from fedsign.numerics import Numerics, is_low, widened
from fedsign.objectives.base import LocalContext, Objective
from fedsign.optim.base import PartTrainer
from fedsign.optim.low_precision import Masters, StochasticRounding, Updates
from fedsign.records import replied
from fedsign.tasks.base import KeepingTask
from fedsign.traits import OptimizerTraits
from fedsign.workload import Workload
from simulations.memory.phases import COPY, RETURNED

SizeOf = Callable[[int], int]
"""What an allocator takes for so many bytes."""

_TRIED = 64  # steps, and clients, whose draws are tried


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Bytes of a client's model, in the types that are sent."""

    sent: int
    replied: int  # without what no client trains
    own: int  # the same tensors in the types of the model
    frozen: int  # not sent
    unlike: int  # of the tensors that a model holds in another type or layout than they are sent in
    has_masters: bool  # clients train float32 copies of their model's tensors
    largest: int  # of the tensors in a reply, in elements

    @classmethod
    def of(cls, model: WorkingModel, numerics: Numerics, size_of: SizeOf) -> Self:
        """The sizes under a run's numerics."""
        module = model.module
        tensors = {name: tensor for name, tensor in module.state_dict().items() if name in model.roles}
        has_masters = model.has_masters
        nums = {name: model.packing.shape(name, tensor.shape).numel() for name, tensor in tensors.items()}
        held = sum(size_of(tensor.nbytes) for tensor in (*module.parameters(), *module.buffers()))
        own = sum(size_of(num * tensors[name].itemsize) for name, num in nums.items())
        unlike = [tensor for tensor in tensors.values() if has_masters and is_low(tensor)]
        if not has_masters and numerics.takes_channels_last(module):
            unlike = [parameter for parameter in module.parameters() if parameter.dim() == 4]
        sent = {name: num * _itemsize(tensors[name], is_wide=has_masters) for name, num in nums.items()}
        return cls(
            sent=sum(sent.values()),
            replied=sum(replied(sent, model.roles).values()),
            own=own,
            frozen=max(0, held - own),
            unlike=sum(tensor.nbytes for tensor in unlike),
            has_masters=has_masters,
            largest=max((tensors[name].numel() for name in replied(sent, model.roles)), default=0),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What the first clients train in a round, in bytes."""

    num: int  # of parameters
    copied: int  # by the client that trains most
    summed: int  # by all of them
    small: float  # the share of `copied` in blocks that the allocator keeps
    is_part: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What a local step holds beside the model."""

    at_peak: Mapping[str, int]
    states: int  # moments
    activations: int  # the most
    references: int  # received parameters that the objective has read


def active_in(workload: Workload, model: WorkingModel, optimizer: Any) -> frozenset[str]:
    """The parameters that train at the beginning of a round."""
    if isinstance(optimizer, PartTrainer):
        optimizer.begin(seed=workload.config.seed, client=0, round=1, first_step=0)
    active = frozenset(name for name, parameter in model.parameters.items() if parameter.requires_grad)
    if isinstance(optimizer, PartTrainer):
        optimizer.end()
    return active


def trained_in(workload: Workload, model: WorkingModel, optimizer: Any, size_of: SizeOf, *, is_wide: bool) -> Trained:
    """Which parameters train in the first round, of one client and of the whole cohort."""
    config, parameters = workload.config, model.parameters
    if isinstance(optimizer, PartTrainer):
        of_clients = _draws(workload, model, optimizer)
    else:
        of_clients = [{name for name, each in parameters.items() if each.requires_grad}]

    def size(names: set[str], *, is_wide: bool, below: float = math.inf) -> int:
        sizes = (size_of(model.sizes[name] * _itemsize(parameters[name], is_wide=is_wide)) for name in names)
        return sum(each for each in sizes if each < below)

    most = max(of_clients, key=partial(size, is_wide=is_wide))
    copied = size(most, is_wide=is_wide)
    return Trained(
        num=sum(model.sizes[name] for name in most),
        copied=copied,
        summed=size(set().union(*of_clients), is_wide=True),  # in at least float32
        small=size(most, is_wide=is_wide, below=RETURNED) / max(1, copied),
        is_part=OptimizerTraits.of(config.client.optimizer.name).trains_part,
    )


def _draws(workload: Workload, model: WorkingModel, optimizer: PartTrainer) -> list[set[str]]:
    """The names of what each of the first clients trains."""
    config = workload.config
    batching = Batching.of(config.client, join_last=has_batch_norm(model.module))
    of_clients: list[set[str]] = []
    for client, share in enumerate(_shares(workload)):
        num_steps, drawn = batching.num_steps(share), set[str]()
        optimizer.before_training = drawn.update
        for first in sorted({index * num_steps // _TRIED for index in range(_TRIED)}):
            optimizer.begin(seed=config.seed, client=client, round=1, first_step=first)
        of_clients.append(drawn & model.parameters.keys())
    optimizer.before_training = None
    return of_clients


def _shares(workload: Workload) -> list[int]:
    """The numbers of samples of the first clients."""
    return [len(workload.partition[client]) for client in range(min(workload.config.server.cohort_size, _TRIED))]


def step_of(
    workload: Workload, model: WorkingModel, objective: Objective, optimizer: Any, *, kind: Device, share: int
) -> Step:
    """Two local steps, the second with the moments of the first, on a batch's largest share of so many."""
    config, module = workload.config, model.module
    num = -(-min(config.client.batch_size, max(_shares(workload))) // share)
    features, targets = (tensor.to("meta") for tensor in workload.dataset.train.batch(torch.arange(num)))
    parameters = {name: parameter.detach() for name, parameter in model.parameters.items()}
    state = objective.initial_state(parameters) if objective.has_state else {}
    received = _Read(parameters)
    context = LocalContext(received=received, state=state, shared=state, unit_displacement=1.0, sizes=model.sizes)
    under_kernels(module, kind, "fused")
    if kind == "cuda":
        for group in optimizer.param_groups:  # as torch chooses there
            if group.get("foreach", True) is None and not group["fused"]:
                group["foreach"] = True
    live = LiveBytes(size_of=cuda_block if kind == "cuda" else int)
    live.name(WEIGHTS, [*module.parameters(), *module.buffers(), *state.values()])
    live.name(OTHER, [features, targets])
    batch = live.current[OTHER]
    if isinstance(optimizer, PartTrainer):
        optimizer.begin(seed=config.seed, client=0, round=1, first_step=0)
    for parameter in (each for each in module.parameters() if each.requires_grad):
        parameter.register_post_accumulate_grad_hook(lambda each: live.name(GRADIENTS, [each.grad]))
    updates = _updates(model)
    with live:
        local_step = LocalStep(workload, model, objective, context, optimizer, updates)
        local_step(features, targets)
        if isinstance(updates, Masters):
            live.name(COPY, [updates.value(each) for each in model.low if each in updates])
        states = live.current[OTHER] - batch  # moments, wherever the optimizer keeps them
        local_step(features, targets)
    if isinstance(optimizer, PartTrainer):
        optimizer.end()
    found = live.peak.by_category
    # GaLore's first step, which decomposes gradients, may need more than the second
    of_peak = min(states, found[OTHER])
    at_peak = {GRADIENTS: found.get(GRADIENTS, 0), STATES: of_peak, ACTIVATIONS: found[OTHER] - of_peak}
    references = sum(parameters[name].nbytes for name in received.names)
    return Step(at_peak=at_peak, states=states, activations=live.most_of(OTHER) - states, references=references)


class _Read(dict[str, Tensor]):
    """Tensors, and the names of those that were read."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self.names = set[str]()

    def __getitem__(self, name: str) -> Tensor:
        self.names.add(name)
        return super().__getitem__(name)

    def items(self) -> Any:
        """All of them, read."""
        self.names |= self.keys()
        return super().items()

    def values(self) -> Any:
        """All of them, read."""
        self.names |= self.keys()
        return super().values()


def _updates(model: WorkingModel) -> Updates | None:
    """As of a client, but for the generator, which the meta device does not have."""
    kind = model.numerics.low_precision if model.low else "plain"
    if kind == "master":
        return Masters(lambda parameter: parameter.detach().float())
    return StochasticRounding(torch.Generator()) if kind == "stochastic" else None


def outputs_bytes(workload: Workload, model: WorkingModel, *, kind: Device, threads: int) -> int:
    """Bytes of the batches of an evaluation that so many threads hold at a time."""
    task, numerics, dataset = workload.task, workload.numerics, workload.dataset
    samples = max((dataset.test, dataset.validation or dataset.test), key=len)
    size = batch_size(samples, logits=logits_of(model.module, dataset.text), device=kind)
    features, targets = (tensor.to("meta") for tensor in next(samples.batches(size)))
    live = LiveBytes()
    live.name(WEIGHTS, [*model.module.parameters(), *model.module.buffers()])
    with torch.no_grad(), live:
        outputs = numerics.outputs(model.module.eval(), features, channels_last=False)
        if isinstance(task, KeepingTask):
            task.kept(outputs, targets)
    return live.most_of(OTHER) * min(threads, max(1, -(-len(samples) // size)))


def _itemsize(tensor: Tensor, *, is_wide: bool) -> int:
    return (widened(tensor.dtype) if is_wide else tensor.dtype).itemsize
