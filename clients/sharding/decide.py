"""Decide the sharding strategy of `auto`, once before a run.

`auto` takes the first strategy of the plan (`fedsign.sharding.plan`), given the size of the model, the micro-batches
per step, masters and optimizer state per element, and the bandwidths and memory in the configuration: among the
strategies within 5 % of the fastest that fits, the one with the least memory.  Nothing is measured, so the same
experiment trains the same way everywhere.
"""

from collections.abc import Callable, Sequence
from math import inf

from torch import Tensor, nn

from clients.trainer import make_optimizer
from fedsign.errors import ConfigError
from fedsign.models.transform import frozen_weights
from fedsign.numerics import is_low, widened
from fedsign.sharding.layout import Grouping
from fedsign.sharding.plan import StateBytes, Task, rank
from fedsign.sharding.section import ShardingSection
from fedsign.sharding.traffic import Network, Rings
from fedsign.workload import Workload


def sharded(workload: Workload) -> Workload:
    """The workload with `client.sharding.strategy` decided.

    Raises:
        ConfigError: no strategy fits into a rank's memory.
    """
    settings = ShardingSection.of(workload.config)
    if settings.strategy != "auto":
        return workload
    grouping = Grouping(groups=settings.groups, per_group=settings.ranks // settings.groups)
    network = Network(intra_bps=1e9 * settings.intra_gbps, inter_bps=1e9 * settings.inter_gbps, rings=Rings.TWO_LEVEL)
    task = task_of(workload, workload.make_model())
    limit = 1e9 * settings.memory_gb or inf
    (standing, best), *_ = rank(task, grouping=grouping, network=network, memory_bytes=limit)
    if standing == "too_large":
        raise ConfigError(
            f"client.sharding.memory_gb={settings.memory_gb:g} was given, "
            "but the least that the model states of a rank "
            f"take is {best.memory_bytes / 1e9:.3g} GB, with {best.strategy.name}; give more ranks or more memory."
        )
    return workload.with_section("client", sharding=settings.model_copy(update={"strategy": best.strategy.name}))


def task_of(workload: Workload, model: nn.Module) -> Task:
    """The plan's input for a client's model."""
    client = workload.config.client
    parameters = [*model.parameters(), *map(model.get_buffer, frozen_weights(model))]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    defaults = make_optimizer(workload, model, round=1).defaults
    moments = 2 if "betas" in defaults else int(bool(defaults.get("momentum")))  # Adam's two, or SGD's momentum
    has_masters, is_plain = client.low_precision == "master", client.low_precision == "plain"

    def steps(parameter: Tensor) -> int:
        return parameter.itemsize if is_plain else widened(parameter.dtype).itemsize

    share = -(-client.batch_size // ShardingSection.of(workload.config).ranks)
    return Task(
        params=sum(parameter.numel() for parameter in parameters),
        trainable=sum(parameter.numel() for parameter in trained),
        accumulate=-(-share // client.micro_batch) if client.micro_batch else 1,
        sizes=StateBytes(
            param=_mean_bytes(parameters, lambda parameter: parameter.itemsize),
            gradient=_mean_bytes(trained, steps),
            state=_mean_bytes(trained, lambda each: moments * steps(each) + (4 if has_masters and is_low(each) else 0)),
        ),
    )


def _mean_bytes(parameters: Sequence[Tensor], size: Callable[[Tensor], int]) -> float:
    """Bytes per element."""
    return sum(parameter.numel() * size(parameter) for parameter in parameters) / sum(map(Tensor.numel, parameters))
