"""Refuse what a stack of clients cannot reproduce exactly, by rules and by a trial with two clients."""

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from clients.cohort.chain import chain_layers
from clients.cohort.context import CohortContext, cohort_context
from clients.cohort.loss import CohortLoss, by_autograd, penalty_gradient
from clients.cohort.modules import STACKED_DROPOUTS, STACKED_NORMS, CohortModel
from clients.cohort.optim import ELEMENTWISE
from clients.cohort.plan import CohortBatch
from clients.model_probes import carried_state, complex_parameter, dropouts, mixes_samples, moved_buffer, shares_tensors
from fedsign.compatibility import STEPS_IN_FULL, Experiment, Unless
from fedsign.data.base import Samples
from fedsign.models.batch_norm import BATCH_NORMS
from fedsign.objectives.base import LocalContext, Objective
from fedsign.records import Tensors, failure_of
from fedsign.rules import Rule
from fedsign.seeding import Purpose, global_stream
from fedsign.tasks.base import SampleTask
from fedsign.workload import Workload


def two_samples(workload: Workload) -> Tensor:
    """Two different inputs [2, ...] with the shape of the data."""
    first, _ = workload.dataset.train.batch(torch.tensor([0]))
    return torch.cat([first, first.flip(-1) + 1]).to(workload.device)  # + 1: a flip alone may change nothing


def _strange(layers: list[nn.Module], known: tuple[type[nn.Module], ...]) -> str:
    """The class of the first layer that stacks do not support; empty if there is none."""
    return next((type(layer).__name__ for layer in layers if type(layer) not in known), "")


def _tried(experiment: Experiment) -> str:
    """A problem that a step of two clients reveals, such as a model that mixes samples."""
    try:
        with global_stream(0, Purpose.TRAINING) as drawn:
            found = _trial_step(experiment.workload, experiment.model, experiment.objective)
            names = [name for name in drawn() if name != "torch"]
        return found or (names and f"a step draws from {' and '.join(names)}, once for all clients of a stack") or ""
    except Exception as error:  # noqa: BLE001 - anything that cannot be mapped over clients
        return f"a step of two stacked clients raises {failure_of(0, error).reason[:200]}"


def _trial_step(workload: Workload, model: nn.Module, objective: Objective) -> str:
    """Compute the gradient of two clients with two samples each, and look for dependencies between samples."""
    pair = two_samples(workload)
    if moved := moved_buffer(model, pair):
        return f"a training pass changes the buffer '{moved}', which is none of BatchNorm's"
    if carried := carried_state(model, pair):
        return f"a training pass changes '{carried}', which is outside the model's state_dict"
    if mixes_samples(model, pair):
        return "the model's output for a sample depends on the other samples of the batch, which may be padding"
    samples, task = cast(Samples, workload.training_samples), cast(SampleTask, workload.training_task)
    received = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    # two different clients: mixed-up gradients of equal ones would look right
    theta = {name: torch.stack([tensor, tensor + 0.5]).requires_grad_() for name, tensor in received.items()}
    state = objective.initial_state(received) if objective.has_state else {}
    sizes = {name: tensor.numel() for name, tensor in received.items()}
    shared = {name: torch.ones_like(tensor) for name, tensor in received.items()}  # which a strategy may send
    alone = LocalContext(received=received, state=state, shared=shared, unit_displacement=1.0, sizes=sizes)
    context = cohort_context([alone, replace(alone, unit_displacement=2.0)])
    targets = samples.targets[:1].expand(4, *samples.targets.shape[1:]).unflatten(0, (2, 2)).contiguous()
    weights = torch.full((2, 2), 0.5, device=pair.device, dtype=next(iter(received.values())).dtype)
    stacked, features = CohortModel(model), torch.stack([pair, pair])
    buffers = {name: torch.stack([buffer, buffer]) for name, buffer in model.named_buffers()}
    loss = CohortLoss(stacked, task, objective, chain_layers(model))
    batch = CohortBatch(features, targets, weights)
    if stacked.draws:
        drawn = loss.draws(theta, batch, context, buffers=buffers)
        batch = batch._replace(masks=tuple(weights.new_ones(2, 2, *draw.shape) for draw in drawn))
    total, _ = loss(theta, batch, context, buffers=buffers)
    if not _pulls_each_by_itself(objective, theta, context):
        return (
            "the objective's penalty_gradient is not the gradient of its penalty for each client by itself, "
            "in new tensors"
        )
    gradients = torch.autograd.grad(total, list(theta.values()), allow_unused=True)
    for name, gradient in zip(theta, gradients, strict=True):
        if gradient is None or not model.get_parameter(name).requires_grad:
            return f"parameter '{name}' is not trained, and an optimizer leaves such a one alone"
    return ""


@torch.no_grad()
def _pulls_each_by_itself(objective: Objective, theta: Tensors, context: CohortContext) -> bool:
    """Whether the stack's penalty gradient is each client's own, even after its first result was overwritten."""
    gradient = penalty_gradient(objective, theta, context)
    if gradient is None:
        return True
    expected = by_autograd(objective, theta, context)
    for _ in range(2):
        gradients = gradient() or {name: torch.zeros_like(tensor) for name, tensor in theta.items()}
        for name, each in expected.items():
            if not torch.allclose(gradients[name], each, rtol=1e-3, atol=1e-4 * float(each.abs().max())):
                return False
            gradients[name].zero_()
    return True


_ONE_AFTER_ANOTHER = {
    "engine.precision": ("float32",),
    "client.schedule.per": ("round",),
    "client.micro_batch": (0,),
    "client.loss": ("task",),
    "engine.compile": (False,),
    "engine.sparse_products": ("auto", "dense"),
}
RULES: tuple[Rule[Experiment], ...] = (
    Rule(
        lambda experiment: not experiment.engine.trains_here and experiment.config.engine.name,
        "engine.name={found} gives each client a process of its own",
    ),
    *(
        Rule(Unless(path, allowed), "{found} is for one client after another only")
        for path, allowed in _ONE_AFTER_ANOTHER.items()
    ),
    STEPS_IN_FULL,
    Rule(
        lambda experiment: experiment.trains.adapt_model,
        "client.optimizer.name={config.client.optimizer.name} freezes weights, "
        "of which a stack would hold one copy for each client",
    ),
    Rule(
        lambda experiment: _strange(dropouts(experiment.model), STACKED_DROPOUTS),
        "model.name={config.model.name} has a layer {found}, whose draws cannot be repeated",
    ),
    Rule(
        lambda experiment: experiment.workload.device.type == "cuda" and dropouts(experiment.model),
        "model.name={config.model.name} has dropout, whose draws on a GPU belong to one client after another",
    ),
    Rule(
        lambda experiment: _strange(
            [each for each in experiment.model.modules() if isinstance(each, BATCH_NORMS)], STACKED_NORMS
        ),
        "model.name={config.model.name} has a layer {found}, a BatchNorm of a kind of its own",
    ),
    Rule(
        lambda experiment: shares_tensors(experiment.model),
        "model.name={config.model.name} has extra state, or tensors that two layers share",
    ),
    Rule(
        lambda experiment: experiment.trains.trains_part,
        "client.optimizer.name={config.client.optimizer.name} trains other layers of each client",
    ),
    Rule(
        lambda experiment: type(experiment.optimizer) not in ELEMENTWISE,
        "client.optimizer.name={config.client.optimizer.name} is none of torch's SGD, Adam and AdamW",
    ),
    Rule(
        lambda experiment: experiment.objective.contrasts and not experiment.objective.contrast_is_mean,
        "objective '{spec.name}' does not say that its contrast is a mean over samples (contrast_is_mean)",
    ),
    Rule(
        lambda experiment: not isinstance(experiment.workload.training_samples, Samples),
        "data.name={config.data.name} cannot be stacked: its samples are fetched batch by batch",
    ),
    Rule(
        lambda experiment: not isinstance(experiment.workload.training_task, SampleTask),
        "task={config.task} cannot be stacked: it has no method `losses`, which gives the loss of every sample",
    ),
    Rule(
        lambda experiment: complex_parameter(experiment.model),
        "model.name={config.model.name} has a complex parameter '{found}', and stacks are of real numbers",
    ),
    Rule(_tried, "{found}"),
)
