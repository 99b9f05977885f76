"""Refuse what a sharded client could not train as a single process does, by rules and by a trial:

- layers that depend on the whole batch, apart from nn.Dropout and nn.BatchNorm (models that mix samples);
- optimizers that do not declare how they work on parts of tensors (`clients.sharding.optim`);
- objectives that read whole parameters: with a contrast, or methods that do not work element by element;
- other kinds of parallel training (the cohort path, workers), and engines with one process per client.
"""

from dataclasses import replace

import torch

from clients.model_probes import carried_state, complex_parameter, dropouts, mixes_samples, moved_buffer
from clients.sharding.layers import draws_otherwise, other_layers
from clients.sharding.optim import rule_of
from clients.sharding.rules import SHARDING
from fedsign.compatibility import Chosen, Experiment, only
from fedsign.optim.base import BlockTrainer
from fedsign.rules import Rule
from fedsign.seeding import Purpose, global_stream


def _reads_whole_parameters(experiment: Experiment) -> bool:
    objective = experiment.objective
    reads = objective.has_penalty or objective.has_state or objective.replies_with_more
    return objective.contrasts or (reads and not objective.adds_up)


def _shares_blocks(experiment: Experiment) -> bool:
    """Whether a block shares parameters with other layers."""
    model, optimizer = experiment.model, experiment.optimizer
    blocks = optimizer.blocks.values() if isinstance(optimizer, BlockTrainer) else ()
    owned = [parameter for block in blocks for parameter in block.parameters()]
    inside = {module for block in blocks for module in block.modules()}
    outside = {parameter for module in {*model.modules()} - inside for parameter in module.parameters(recurse=False)}
    return len(owned) != len({*owned}) or not outside.isdisjoint(owned)


def _tried(experiment: Experiment) -> str:
    """A problem that a training pass reveals: mixed samples, a changed buffer, or other draws."""
    model, samples = experiment.model, experiment.workload.dataset.train
    if len(samples) < 2:
        return ""  # a server whose sites keep their data
    with global_stream(0, Purpose.TRAINING) as drawn:
        pair = samples.batch(torch.tensor([0, len(samples) - 1]))[0].to(experiment.workload.device)
        if names := drawn():
            return (
                f"was given samples of data.name={experiment.config.data.name}, which draws from {' and '.join(names)} "
                "when one is fetched, and ranks fetch different ones"
            )
    if moved := moved_buffer(model, pair):
        return f"changes the buffer '{moved}' in a training pass, of which each rank would have another"
    if carried := carried_state(model, pair):
        return f"changes '{carried}' in a training pass, outside its state_dict, of which each rank would have another"
    if draws_otherwise(model, pair):
        return "draws random numbers that are not nn.Dropout's, sample by sample, and would be others on ranks"
    if mixes_samples(model, pair):
        return "lets samples of a batch depend on each other, which lie on different ranks"
    return ""


_WHOLE_PARAMETERS = Rule(
    _reads_whole_parameters,
    "objective '{spec.name}' reads whole parameters, of which a rank has a part",
    "use a strategy whose clients minimize the task's loss, or add a term for each element by itself: "
    "strategy.name=fedavg, fedprox, fedsign, scaffold or feddyn",
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
        lambda experiment: experiment.config.client.optimizer.settings.get("ranks"),
        "client.optimizer.ranks cuts adapters to a client's rank, which reads whole ones",
        "leave it out",
    ),
    Rule(
        lambda experiment: experiment.config.client.optimizer.settings.get("quantization", "none") != "none",
        "client.optimizer.quantization packs whole matrices in 4 bits, of which no rank could take its part",
        "use quantization=none",
    ),
    only("client.loss", "task", because="is one number for a whole batch"),
    only("client.optimizer.moments", "drop", "keep", because="is for one process only"),
    _WHOLE_PARAMETERS,
    Rule(
        lambda experiment: other_layers(experiment.model)[:1],
        "model.name={config.model.name} has a layer {found[0]}, which would see parts of a batch",
        "use nn.Dropout and nn.BatchNorm",
    ),
    Rule(
        lambda experiment: experiment.config.client.micro_batch and dropouts(experiment.model),
        "client.micro_batch={config.client.micro_batch} lets a model with dropout draw piece by piece",
        "set it to 0, or dropout to 0",
    ),
    Rule(
        lambda experiment: rule_of(experiment.optimizer) is None,
        "client.optimizer.name={config.client.optimizer.name} does not declare an element_rule, which moves each "
        "element by itself",
        "use sgd, adam, adamw, packed_sgd, packed_adamw, lisa, lora or galore",
    ),
    Rule(
        _shares_blocks,
        "model.name={config.model.name} shares parameters between a block and other layers, "
        "which are frozen at other times",
    ),
    Rule(
        lambda experiment: complex_parameter(experiment.model),
        "model.name={config.model.name} has a complex parameter '{found}', which the ranks would leave untrained",
    ),
    Rule(_tried, "model.name={config.model.name} {found}"),
)
OBJECTIVE = replace(SHARDING, rules=(_WHOLE_PARAMETERS,))  # for objectives that change between rounds
