"""A client of several processes: which strategy `auto` is, and where other machines join.  Decided once, before a run.

`auto` is the plan's choice (`fedsign.sharding.plan`) for the model's size, the micro-batches of a step, what the optimiser keeps for each
element, and the bandwidths and memory in the configuration: of the strategies within 5 % of the fastest that fits, the one with
the least memory.  Nothing is measured, so that the same experiment trains in the same way everywhere.
"""

from math import inf

from torch import nn

from clients.trainer import make_optimizer
from fedsign.config import ExperimentConfig
from fedsign.errors import ConfigError
from fedsign.sharding.layout import Grouping
from fedsign.sharding.plan import StateBytes, Task, rank
from fedsign.sharding.section import ShardingSection
from fedsign.sharding.traffic import Network, Rings
from fedsign.traits import EngineTraits
from fedsign.transport.addresses import Address
from fedsign.transport.handshake import read_key
from fedsign.workload import Workload


def sharded(workload: Workload) -> Workload:
    """The workload with `client.sharding.strategy` decided; as it is where nothing is sharded.

    Raises:
        ConfigError: its model states fit no rank, or other machines could not join.
    """
    settings = ShardingSection.of(workload.config)
    if settings.ranks == 1:
        return workload
    if EngineTraits.of(workload.config.engine.name).trains_here:  # nodes say it for themselves
        check_machines(workload.config)
    strategy = settings.strategy if settings.strategy != "auto" else _best(workload)
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


def _best(workload: Workload) -> str:
    """What `auto` is; see the module."""
    settings = ShardingSection.of(workload.config)
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
    return best.strategy.name


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
