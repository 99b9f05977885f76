"""Decide how clients are trained: one after another, or as a cohort in one stack of tensors.

`client.path = sequential` is the specification, and the only path that is bitwise equal on every engine.  `cohort`
gives the same results up to rounding; what it cannot reproduce is refused before a run (`clients.cohort.trial`).
`auto` selects `cohort` if it is exact and known to be faster: for a chain of linear layers and elementwise functions
with at most `_MOST_PARAMETERS` parameters, and an objective without a penalty or with its gradient.  This is a rule,
not a measurement, so the same experiment takes the same path everywhere.  Convolutions stay sequential: stacked, they
become grouped convolutions, which are slower on CPUs.
"""

from math import prod

import torch
from torch import Tensor, nn

from clients.cohort.chain import chain_layers
from clients.cohort.rules import COHORT
from clients.cohort.section import CohortKeys
from clients.cohort.trial import two_samples
from fedsign.compatibility import Experiment
from fedsign.models.batch_norm import freeze_batch_norm
from fedsign.records import ObjectiveSpec
from fedsign.workload import Workload

_MOST_PARAMETERS = 250_000
_STACK_BYTES = 256 * 2**20  # budget of a stack: parameters, gradients, moments, states, activations
_COPIES = 8  # of the parameters: model, gradient, two moments, state, served model, temporaries


def on_path(workload: Workload, spec: ObjectiveSpec) -> Workload:
    """The workload with `client.path` decided, and for the cohort path `client.chunk`."""
    client = CohortKeys.of(workload.config)
    if client.path == "cohort" or (client.path == "auto" and _is_faster(Experiment(workload=workload, spec=spec))):
        return workload.with_section("client", path="cohort", chunk=client.chunk or chunk_of(workload))
    return workload.with_section("client", path="sequential", chunk=0)


def _is_faster(experiment: Experiment) -> bool:
    """The rule of `auto`."""
    model, objective = experiment.model, experiment.objective
    is_fast = objective.has_gradient or not objective.has_penalty
    is_small = sum(parameter.numel() for parameter in model.parameters()) <= _MOST_PARAMETERS
    # `why_not` last, because it tries a step
    return is_fast and is_small and chain_layers(model) is not None and not COHORT.why_not(experiment)


def chunk_of(workload: Workload) -> int:
    """The number of clients that fit into a stack's budget, at most a round's cohort."""
    model, client = workload.make_model(), workload.config.client
    parameter_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    activation_bytes = (
        # activations and their gradients, of 4 bytes each
        2 * 4 * min(client.batch_size, workload.split.largest) * _num_activations(model, two_samples(workload)[:1])
    )
    fitting = _STACK_BYTES // (_COPIES * parameter_bytes + activation_bytes)
    return max(1, min(fitting, workload.config.server.cohort_size))


def _num_activations(model: nn.Module, sample: Tensor) -> int:
    """The number of activations per sample, features included; leaves counting hooks on the model."""
    counts = [prod(sample.shape)]
    for module in model.modules():
        if next(module.children(), None) is None:
            module.register_forward_hook(lambda module, inputs, output: counts.append(output.numel()))
    freeze_batch_norm(model)  # refuses one sample in training
    with torch.no_grad():
        model(sample)
    return sum(counts)
