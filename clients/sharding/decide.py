"""A client of several processes: which strategy `auto` is.  Decided once, before a run.

`auto` is the plan's choice (`fedsign.sharding.plan`) for the model's size, the micro-batches of a step, what the optimizer keeps for each
element, and the bandwidths and memory in the configuration: of the strategies within 5 % of the fastest that fits, the one with
the least memory.  Nothing is measured, so that the same experiment trains in the same way everywhere.
"""

from math import inf

from torch import nn

from clients.trainer import make_optimizer
from fedsign.errors import ConfigError
from fedsign.sharding.layout import Grouping
from fedsign.sharding.plan import StateBytes, Task, rank
from fedsign.sharding.section import ShardingSection
from fedsign.sharding.traffic import Network, Rings
from fedsign.workload import Workload


def sharded(workload: Workload) -> Workload:
    """The workload with `client.sharding.strategy` decided.

    Raises:
        ConfigError: its model states fit no rank.
    """
    settings = ShardingSection.of(workload.config)
    if settings.strategy != "auto":
        return workload
    grouping = Grouping(groups=settings.groups, per_group=settings.ranks // settings.groups)
    network = Network(intra_bps=1e9 * settings.intra_gbps, inter_bps=1e9 * settings.inter_gbps, rings=Rings.TWO_LEVEL)
    task = _task_of(workload, workload.make_model())
    limit = 1e9 * settings.memory_gb or inf
    (standing, best), *_ = rank(task, grouping=grouping, network=network, memory_bytes=limit)
    if standing == "too_large":
        raise ConfigError(
            f"client.sharding.memory_gb={settings.memory_gb:g} was given, but the least that the model states of a rank take is "
            f"{best.memory_bytes / 1e9:.3g} GB, with {best.strategy.name}; give more ranks or more memory."
        )
    return workload.with_client(sharding=settings.model_copy(update={"strategy": best.strategy.name}))


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
