"""What a client whose model is sharded may train, and which strategy `auto` is.  Decided once, before a run.

Sharded training gives what one process gives, to rounding; what it could not give is refused here in one sentence:

- statistics and draws of a batch's parts instead of the batch's (BatchNorm, dropout, models that mix samples);
- optimisers that look at more than one element at a time, since a rank has parts of tensors;
- objectives with a contrast or a state, or with a penalty that is no sum over elements, which read whole parameters;
- other ways to train clients by several at once (the cohort path, workers), and Ray, which gives a client one process.

`auto` is the plan's choice (`fedsign.sharding.plan`) for the model's size, the micro-batches of a step, what the optimiser keeps for each
element, and the bandwidths and memory in the configuration: of the strategies within 5 % of the fastest that fits, the one with
the least memory.  Nothing is measured, so that the same experiment trains in the same way everywhere.
"""

from collections.abc import Mapping
from functools import lru_cache
from math import inf
from typing import Any

import torch
from torch import nn

from clients.model_probes import DROPOUTS, mixes_samples, moved_buffer
from clients.sharding.optim import rule_of
from clients.trainer import make_optimizer
from fedsign import plugins
from fedsign.addresses import Address
from fedsign.config import ExperimentConfig, checked
from fedsign.errors import ConfigError
from fedsign.models.batch_norm import has_batch_norm
from fedsign.objectives.base import Objective
from fedsign.optim.base import BlockTrainer, adapts, trains_part
from fedsign.records import ObjectiveSpec
from fedsign.seeding import Purpose, torch_stream
from fedsign.sharding.layout import Grouping
from fedsign.sharding.plan import StateBytes, Task, estimate, rank
from fedsign.sharding.section import ShardingSection
from fedsign.sharding.strategy import STRATEGIES
from fedsign.sharding.traffic import Network, Rings
from fedsign.transport.handshake import read_key
from fedsign.workload import Workload


def sharded(workload: Workload, spec: ObjectiveSpec) -> Workload:
    """The workload with `client.sharding.strategy` decided; as it is where nothing is sharded.

    Raises:
        ConfigError: it cannot be trained so, or its model states fit no rank.
    """
    settings = ShardingSection.of(workload.config)
    if settings.ranks == 1:
        return workload
    model = workload.make_model().train()
    why_not = _refused_settings(workload) or refused_objective(spec) or _refused_model(workload, model)
    if why_not:
        raise ConfigError(f"client.sharding.ranks={settings.ranks} was given, but {why_not}.")
    if workload.config.engine.name == "in_process":  # nodes say it for themselves
        check_machines(workload.config)
    strategy = settings.strategy if settings.strategy != "auto" else _best(workload, model)
    return workload.with_client(sharding=settings.model_copy(update={"strategy": strategy}))


def check_machines(config: ExperimentConfig) -> None:
    """Raise ConfigError if machines are to join and it is not said where, or cannot be used."""
    settings = ShardingSection.of(config)
    if settings.machines > 1:
        where_machines_join(settings)


def where_machines_join(settings: ShardingSection) -> tuple[Address, bytes]:
    """Where the first of several machines listens, and the secret that the others have to know.

    Raises:
        ConfigError: it is not said, or cannot be used.
    """
    if not settings.listen:
        raise ConfigError(
            f"client.sharding.machines={settings.machines} was given, but not where the first machine listens for the others; set "
            "client.sharding.listen=HOST:PORT, or at a node sharding-listen in its --node-config."
        )
    address = Address.of(settings.listen, given_as="client.sharding.listen")
    key = read_key(
        settings.secret_file,
        is_loopback=address.is_loopback,
        given_as="client.sharding.secret_file (a node's sharding-secret-file)",
    )
    return address, key


def machines_said(tree: Mapping[str, Any]) -> str:
    """What a site says of its machines, checked.

    Raises:
        ConfigError: it cannot be used.
    """
    settings = checked(ShardingSection, tree)
    address, _ = where_machines_join(settings)
    return f"{settings.machines}, which join at {address}"


@lru_cache(maxsize=8)
def _refusal_of(name: str, settings: tuple[tuple[str, Any], ...]) -> str:
    objective: Objective = plugins.build("objective", name, dict(settings))
    has_parts = not objective.has_penalty or objective.adds_up
    needs_more = objective.has_state or objective.contrasts or objective.needs_unit_displacement
    if has_parts and not objective.replies_with_more and not needs_more:
        return ""
    return (
        f"objective '{name}' reads whole parameters, of which a rank has a part; use a strategy whose clients minimise the task's "
        "loss, or add a term for each element by itself: strategy.name=fedavg, fedprox or fedsign"
    )


def refused_objective(spec: ObjectiveSpec) -> str:
    """Why clients cannot minimise this, as the middle of a sentence; empty if they can."""
    return _refusal_of(spec.name, tuple(sorted(spec.settings.items())))


def _refused_settings(workload: Workload) -> str:
    config = workload.config
    client, engine = config.client, config.engine
    if engine.name not in ("in_process", "superlink"):
        return f"engine.name={engine.name} gives a client one process; use in_process or superlink"
    if engine.settings.get("workers", 1) != 1:
        return f"engine.workers={engine.settings['workers']} would be processes that start processes; leave engine.workers out"
    if client.path != "sequential":
        return f"client.path={client.path} is for several clients in one process; use client.path=sequential"
    if engine.precision != "float32":
        return f"engine.precision={engine.precision} keeps a copy of every weight that was gathered; use engine.precision=float32"
    if engine.compile:
        return "engine.compile=true compiles a model whose parameters do not come and go; use engine.compile=false"
    if config.get("engine.sparse_products", "auto") == "csr":
        return "engine.sparse_products=csr multiplies rows of whole tensors; use auto or dense"
    if (rule := config.get("sparsity.name", "static")) != "static":
        return f"sparsity.name={rule} changes masks of whole tensors; use sparsity.name=static"
    if engine.channels_last == "on":
        return "engine.channels_last=on lays weights out in another way than they are sharded; use auto or off"
    if workload.device.type not in ("cpu", "cuda"):
        return f"engine.device={engine.device} has no way for ranks to talk; use engine.device=cpu or cuda"
    name = client.optimizer.name
    if adapts(name):
        return f"client.optimizer.name={name} holds the model's weights as buffers, which nobody shards; use another optimiser"
    moments = client.optimizer.settings.get("moments", "drop")
    if trains_part(name) and moments not in ("drop", "keep"):
        return f"client.optimizer.moments={moments} is for one process only; use drop or keep"
    return ""


def _refused_model(workload: Workload, model: nn.Module) -> str:
    name, optimizer = workload.config.model.name, workload.config.client.optimizer.name
    if has_batch_norm(model):
        return (
            f"model.name={name} has BatchNorm, whose statistics would be those of parts of a batch; use a model without"
        )
    if any(isinstance(module, DROPOUTS) and module.p > 0 for module in model.modules()):
        return f"model.name={name} has dropout, whose draws would be others than those of one process; set it to 0"
    if rule_of(make_optimizer(workload, model, round=1)) is None:
        return (
            f"client.optimizer.name={optimizer} is none of those that are known to move each element by itself; use sgd, adam, adamw, "
            "packed_sgd, packed_adamw or lisa"
        )
    if _shares_blocks(workload, model):
        return f"model.name={name} shares parameters between a block and other layers, which are frozen at other times"
    return _found_by_trying(workload, model)


def _shares_blocks(workload: Workload, model: nn.Module) -> bool:
    optimizer = make_optimizer(workload, model, round=1)
    blocks = optimizer.blocks.values() if isinstance(optimizer, BlockTrainer) else ()
    owned = [parameter for block in blocks for parameter in block.parameters()]
    inside = {module for block in blocks for module in block.modules()}
    outside = {parameter for module in {*model.modules()} - inside for parameter in module.parameters(recurse=False)}
    return len(owned) != len({*owned}) or not outside.isdisjoint(owned)


def _found_by_trying(workload: Workload, model: nn.Module) -> str:
    """Take the gradient of two samples, where there are some; the model is none that is trained."""
    name, samples = workload.config.model.name, workload.dataset.train
    if len(samples) < 2:
        return ""  # a server whose sites keep their data
    pair = samples.batch(torch.tensor([0, len(samples) - 1]))[0].to(workload.device)
    moved = moved_buffer(model, pair)
    if moved is not None:
        return (
            f"a training pass of model.name={name} changes the buffer '{moved}', of which each rank would have another"
        )
    if mixes_samples(model, pair):
        return f"model.name={name} lets samples of a batch depend on each other, which lie on different ranks"
    with torch_stream(0, Purpose.TRAINING):
        model(pair).sum().backward()
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            return (
                f"model.name={name} does not use its parameter '{parameter_name}', which an optimiser would leave alone"
            )
    return ""


def _best(workload: Workload, model: nn.Module) -> str:
    """What `auto` is; see the module."""
    settings = ShardingSection.of(workload.config)
    grouping = Grouping(groups=settings.groups, per_group=settings.ranks // settings.groups)
    network = Network(intra_bps=1e9 * settings.intra_gbps, inter_bps=1e9 * settings.inter_gbps, rings=Rings.TWO_LEVEL)
    task = _task_of(workload, model)
    limit = 1e9 * settings.memory_gb or inf
    each = [estimate(one, task, grouping=grouping, network=network) for one in STRATEGIES.values()]
    ranking = rank(each, memory_bytes=limit)
    if not ranking.near:
        least = ranking.too_large[0]
        raise ConfigError(
            f"client.sharding.memory_gb={settings.memory_gb:g} was given, but the least that the model states of a rank take is "
            f"{least.memory_bytes / 1e9:.3g} GB, with {least.strategy.name}; give more ranks or more memory."
        )
    return ranking.near[0].strategy.name


def _task_of(workload: Workload, model: nn.Module) -> Task:
    """What the plan has to know: masters are the parameters themselves, which are float32 at least."""
    client = workload.config.client
    parameters = list(model.parameters())
    itemsize = max(parameter.element_size() for parameter in parameters)
    defaults = make_optimizer(workload, model, round=1).defaults
    moments = 2 if "betas" in defaults else int(bool(defaults.get("momentum")))
    share = -(-client.batch_size // ShardingSection.of(workload.config).ranks)
    return Task(
        params=sum(parameter.numel() for parameter in parameters),
        trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        accumulate=-(-share // client.micro_batch) if client.micro_batch else 1,
        sizes=StateBytes(param=itemsize, gradient=itemsize, state=moments * itemsize),
    )
