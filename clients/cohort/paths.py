"""How clients are trained: one after another, or many as one stack of tensors.  Decided once, by a rule.

`client.path = sequential` is the specification, and the only path whose bits are the same on every engine.
`cohort` gives the same results to rounding; what it could not do exactly is refused here in one sentence, before a
run.  `auto` is `cohort` where that is exact and known to be faster, which a rule says (never a clock, so that the same
experiment takes the same path everywhere): a chain of linear layers and elementwise functions with at most
`_MOST_PARAMETERS` parameters, and an objective of ours or one that gives its penalty's gradient.  Convolutions stay sequential: stacked they become grouped
convolutions, which are slower on CPUs.
"""

from math import prod

import torch
from torch import Tensor, nn

from clients.cohort.context import StackedContext
from clients.cohort.loss import StackedLoss, stacked_layers
from clients.cohort.modules import STACKED_DROPOUTS, STACKED_NORMS, StackedModel
from clients.cohort.optim import stacked_optimizer
from clients.cohort.penalty import by_autograd, penalty_gradient
from clients.cohort.section import CohortKeys
from clients.cohort.training import trainable
from clients.model_probes import DROPOUTS, mixes_samples, moved_buffer
from clients.trainer import make_optimizer
from fedsign import plugins
from fedsign.errors import ConfigError, FedSignError
from fedsign.models.batch_norm import BATCH_NORMS
from fedsign.objectives.base import Objective
from fedsign.optim.base import adapts, trains_part
from fedsign.records import ObjectiveSpec, Tensors, failure_of
from fedsign.registry import KINDS
from fedsign.workload import Workload

_MOST_PARAMETERS = 250_000
_STACK_BYTES = 256 * 2**20  # what a stack may take: parameters, gradients, moments, states, activations
_COPIES = 8  # of the parameters: model, gradient, two moments, two of state and served model, temporaries


def on_path(workload: Workload, spec: ObjectiveSpec, *, in_process: bool) -> Workload:
    """The workload with `client.path` decided, and `client.chunk` where a stack is trained.

    Raises:
        ConfigError: `client.path=cohort` was given for what it cannot train exactly, or on another engine.
    """
    client, engine = CohortKeys.of(workload.config), workload.config.engine.name
    if client.path == "cohort" and not in_process:
        raise ConfigError(
            f"client.path=cohort was given with engine.name={engine}, where every client is a process's own work; use "
            "client.path=sequential, or engine.name=in_process."
        )
    if client.path == "sequential" or not in_process:
        return workload.with_client(path="sequential", chunk=0)
    why_not = refusal(workload, spec)
    if client.path == "cohort" and why_not is not None:
        raise ConfigError(f"client.path=cohort was given, but {why_not}; use client.path=sequential or auto.")
    if client.path == "auto" and (why_not is not None or not is_faster(workload, spec)):
        return workload.with_client(path="sequential", chunk=0)
    return workload.with_client(path="cohort", chunk=client.chunk or chunk_of(workload))


def is_faster(workload: Workload, spec: ObjectiveSpec) -> bool:
    """See the module."""
    model = workload.make_model()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    objective: Objective = plugins.build("objective", spec.name, spec.settings)
    is_fast = objective.has_gradient or spec.name in KINDS["objective"].table
    return is_fast and stacked_layers(model) is not None and num_parameters <= _MOST_PARAMETERS


def chunk_of(workload: Workload) -> int:
    """How many clients fit into a stack, by what they take; at most those of a round."""
    model, client = workload.make_model(), workload.config.client
    parameter_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    activation_bytes = (
        2 * 4 * min(client.batch_size, workload.split.largest) * _num_activations(model, _two_samples(workload)[:1])
    )
    fitting = _STACK_BYTES // (_COPIES * parameter_bytes + activation_bytes)
    return max(1, min(fitting, workload.config.server.cohort_size))


def refusal(workload: Workload, spec: ObjectiveSpec) -> str | None:
    """Why a stack could not give what the sequential path gives, as the middle of a sentence; None if it can."""
    model, config = workload.make_model().train(), workload.config
    objective: Objective = plugins.build("objective", spec.name, spec.settings)
    if config.engine.precision != "float32":
        return f"engine.precision={config.engine.precision} is for one client after another only"
    if config.client.schedule.per == "step":
        return "client.schedule.per=step is for one client after another only"
    if config.client.micro_batch:
        return "client.micro_batch is for one client after another only"
    if config.engine.compile:
        return "engine.compile=true compiles the model for one client after another only"
    if config.get("engine.sparse_products", "auto") == "csr":
        return "engine.sparse_products=csr is for one client after another only"
    if adapts(config.client.optimizer.name):
        return f"client.optimizer.name={config.client.optimizer.name} freezes weights, of which a stack would hold one copy for each client"
    for module in model.modules():
        if isinstance(module, DROPOUTS) and module.p > 0:
            if type(module) not in STACKED_DROPOUTS:
                return f"model.name={config.model.name} has a layer {type(module).__name__}, whose draws cannot be repeated"
            if workload.device.type == "cuda":
                return f"model.name={config.model.name} has dropout, whose draws on a GPU belong to one client after another"
        if isinstance(module, BATCH_NORMS) and type(module) not in STACKED_NORMS:
            return (
                f"model.name={config.model.name} has a layer {type(module).__name__}, a BatchNorm of a kind of its own"
            )
    own = [*dict(model.named_parameters()), *dict(model.named_buffers())]
    if not set(model.state_dict()) <= set(own):
        return f"model.name={config.model.name} has tensors that two layers share"
    if trains_part(config.client.optimizer.name):
        return f"client.optimizer.name={config.client.optimizer.name} trains other layers of each client"
    if stacked_optimizer(make_optimizer(workload, model, round=1), model.parameters()) is None:
        return f"client.optimizer.name={config.client.optimizer.name} is none of torch's SGD, Adam and AdamW"
    if objective.contrasts and not objective.contrast_is_mean:
        return f"objective '{spec.name}' does not say that its contrast is a mean over samples (contrast_is_mean)"
    try:
        trainable(workload)
        return _found_by_trying(workload, model, objective)
    except FedSignError as error:
        return str(error).partition(" was given, ")[0] + " cannot be stacked"
    except Exception as error:  # noqa: BLE001 - whatever cannot be mapped over clients
        return f"a step of two stacked clients raises {failure_of(0, error).reason[:200]}"


def _found_by_trying(workload: Workload, model: nn.Module, objective: Objective) -> str | None:
    """Take the gradient of two clients with two samples each, and see whether samples know of each other."""
    pair = _two_samples(workload)
    moved = moved_buffer(model, pair)
    if moved is not None:
        return f"a training pass changes the buffer '{moved}', which is none of BatchNorm's"
    if mixes_samples(model, pair):
        return "the model's output for a sample depends on the other samples of the batch, which may be padding"
    samples, task = trainable(workload)
    received = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    theta = {name: torch.stack([tensor, tensor + 0.5]).requires_grad_() for name, tensor in received.items()}
    state = objective.initial_state(received) if objective.has_state else {}
    context = StackedContext(
        received=received,
        received_is_stacked=False,
        state={name: torch.stack([tensor, tensor]) for name, tensor in state.items()},
        shared={},
        shared_is_stacked=False,
        unit_displacement=[1.0, 2.0],
        sizes={name: tensor.numel() for name, tensor in received.items()},
    )
    targets = samples.targets[:1].expand(2, 2).contiguous()
    weights = torch.full((2, 2), 0.5, device=pair.device, dtype=next(iter(received.values())).dtype)
    stacked, features = StackedModel(model), torch.stack([pair, pair])
    buffers = {name: torch.stack([buffer, buffer]) for name, buffer in model.named_buffers()}
    loss = StackedLoss(stacked, task, objective, stacked_layers(model))
    masks: list[Tensor] = []
    if stacked.draws:
        drawn = loss.draws(theta, features, weights, context, buffers=buffers)
        masks = [weights.new_ones(2, 2, *draw.shape) for draw in drawn]
    total, _ = loss(theta, features, targets, weights, context, buffers=buffers, masks=masks)
    if not _pulls_each_by_itself(objective, theta, context):
        return "the objective's penalty_gradient is not the gradient of its penalty for each client by itself, in new tensors"
    gradients = torch.autograd.grad(total, list(theta.values()), allow_unused=True)
    for name, gradient in zip(theta, gradients, strict=True):
        if gradient is None or not model.get_parameter(name).requires_grad:
            return f"parameter '{name}' is not trained, and an optimiser leaves such a one alone"
    return None


@torch.no_grad()
def _pulls_each_by_itself(objective: Objective, theta: Tensors, context: StackedContext) -> bool:
    """Whether the gradient of a stack's penalties is each client's, the second time too, when the first was written to."""
    gradient = penalty_gradient(objective, theta, context)
    if gradient is None:
        return True
    expected = by_autograd(objective, theta, context)
    for _ in range(2):
        found = gradient() or {name: torch.zeros_like(tensor) for name, tensor in theta.items()}
        for name, each in expected.items():
            if not torch.allclose(found[name], each, rtol=1e-3, atol=1e-4 * float(each.abs().max())):
                return False
            found[name].zero_()
    return True


def _two_samples(workload: Workload) -> Tensor:
    """Two different inputs [2, ...] of the data's shape."""
    first, _ = workload.dataset.train.batch(torch.tensor([0]))
    return torch.cat([first, first.flip(-1) + 1]).to(workload.device)


def _num_activations(model: nn.Module, sample: Tensor) -> int:
    """Numbers that the layers put out for one sample, the sample's own included."""
    counts = [prod(sample.shape)]
    leaves = [module for module in model.modules() if next(module.children(), None) is None]
    handles = [
        module.register_forward_hook(lambda module, inputs, output: counts.append(output.numel())) for module in leaves
    ]
    try:
        with torch.no_grad():
            model(sample)
    finally:
        for handle in handles:
            handle.remove()
    return sum(counts)
