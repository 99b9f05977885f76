"""Refuse what a sharded client could not train as a single process does, by rules and by a trial:

- layers that depend on the whole batch (BatchNorm, dropout, models that mix samples);
- optimizers that are not elementwise, since a rank has parts of tensors;
- objectives that read whole parameters: with a contrast, a state, or a penalty that is not a sum over elements;
- other kinds of parallel training (the cohort path, workers), and engines with one process per client.
"""

from dataclasses import replace

import torch

from clients.model_probes import dropouts, mixes_samples, moved_buffer
from clients.sharding.optim import rule_of
from clients.sharding.rules import SHARDING
from fedsign.compatibility import Chosen, Experiment, only
from fedsign.models.batch_norm import has_batch_norm
from fedsign.optim.base import BlockTrainer
from fedsign.rules import Rule
from fedsign.seeding import Purpose, torch_stream


def _reads_whole_parameters(experiment: Experiment) -> bool:
    objective = experiment.objective
    has_parts = not objective.has_penalty or objective.adds_up
    needs_more = objective.has_state or objective.contrasts or objective.needs_unit_displacement
    return not has_parts or objective.replies_with_more or needs_more


def _shares_blocks(experiment: Experiment) -> bool:
    """Whether a block shares parameters with other layers."""
    model, optimizer = experiment.model, experiment.optimizer
    blocks = optimizer.blocks.values() if isinstance(optimizer, BlockTrainer) else ()
    owned = [parameter for block in blocks for parameter in block.parameters()]
    inside = {module for block in blocks for module in block.modules()}
    outside = {parameter for module in {*model.modules()} - inside for parameter in module.parameters(recurse=False)}
    return len(owned) != len({*owned}) or not outside.isdisjoint(owned)


def _tried(experiment: Experiment) -> str:
    """A problem that a training pass reveals: mixed samples, a changed buffer, or an unused parameter."""
    model, samples = experiment.model, experiment.workload.dataset.train
    if len(samples) < 2:
        return ""  # a server whose sites keep their data
    pair = samples.batch(torch.tensor([0, len(samples) - 1]))[0].to(experiment.workload.device)
    if moved := moved_buffer(model, pair):
        return f"changes the buffer '{moved}' in a training pass, of which each rank would have another"
    if mixes_samples(model, pair):
        return "lets samples of a batch depend on each other, which lie on different ranks"
    with torch_stream(0, Purpose.TRAINING):
        model(pair).sum().backward()
    named = model.named_parameters()
    unused = next((name for name, parameter in named if parameter.requires_grad and parameter.grad is None), "")
    return f"does not use its parameter '{unused}', which an optimizer would leave alone" if unused else ""


_WHOLE_PARAMETERS = Rule(
    _reads_whole_parameters,
    "objective '{spec.name}' reads whole parameters, of which a rank has a part",
    "use a strategy whose clients minimize the task's loss, or add a term for each element by itself: "
    "strategy.name=fedavg, fedprox or fedsign",
)
RULES: tuple[Rule[Experiment], ...] = (
    Rule(
        lambda experiment: not experiment.engine.keeps_processes and experiment.config.engine.name,
        "engine.name={found} gives a client one process",
        "use in_process or superlink",
    ),
    only("engine.workers", 1, because="would be processes that start processes"),
    only("client.path", "sequential", because="is for several clients in one process"),
    only("engine.precision", "float32", because="keeps a copy of every weight that was gathered"),
    only("engine.compile", False, because="compiles a model whose parameters do not come and go"),
    only("engine.sparse_products", "auto", "dense", because="multiplies rows of whole tensors"),
    Rule(Chosen("sparsity"), "{found} changes masks of whole tensors", "use sparsity.name=static"),
    only("engine.channels_last", "auto", "off", because="lays weights out in another way than they are sharded"),
    Rule(
        lambda experiment: experiment.workload.device.type not in ("cpu", "cuda"),
        "engine.device={config.engine.device} has no way for ranks to talk",
        "use engine.device=cpu or cuda",
    ),
    Rule(
        lambda experiment: experiment.trains.adapt_model,
        "client.optimizer.name={config.client.optimizer.name} holds the model's weights as buffers, "
        "which nobody shards",
        "use another optimizer",
    ),
    only("client.optimizer.moments", "drop", "keep", because="is for one process only"),
    _WHOLE_PARAMETERS,
    Rule(
        lambda experiment: has_batch_norm(experiment.model),
        "model.name={config.model.name} has BatchNorm, whose statistics would be those of parts of a batch",
        "use a model without",
    ),
    Rule(
        lambda experiment: dropouts(experiment.model),
        "model.name={config.model.name} has dropout, whose draws would be others than those of one process",
        "set it to 0",
    ),
    Rule(
        lambda experiment: rule_of(experiment.optimizer) is None,
        "client.optimizer.name={config.client.optimizer.name} is none of those that are known to move each element by "
        "itself",
        "use sgd, adam, adamw, packed_sgd, packed_adamw or lisa",
    ),
    Rule(
        _shares_blocks,
        "model.name={config.model.name} shares parameters between a block and other layers, "
        "which are frozen at other times",
    ),
    Rule(_tried, "model.name={config.model.name} {found}"),
)
OBJECTIVE = replace(SHARDING, rules=(_WHOLE_PARAMETERS,))  # for objectives that change between rounds
