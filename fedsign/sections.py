"""The tables of an experiment's configuration: what each section holds, its defaults, and what no value of it may be.

A `Part` names a factory, whose signature says what further keys its table takes (`fedsign.plugins`); a `Section` has fixed keys.
"""

import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from fedsign import plugins

MAX_INT = 2**31 - 1  # a seed's words have 32 bits, Flower's records carry integers of 64 bits with a sign
MAX_THREADS = 4096
_NOT_BOOL = BeforeValidator(plugins.refuse_bool)


def _file_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", value):
        raise ValueError(
            "a name for a folder: letters, digits, '.', '_' and '-', a letter or digit first, 100 characters at most"
        )
    return value


Positive = Annotated[int, Field(gt=0, le=MAX_INT), _NOT_BOOL]
NonNegative = Annotated[int, Field(ge=0, le=MAX_INT), _NOT_BOOL]
Seed = Annotated[int, Field(ge=0, le=MAX_INT), _NOT_BOOL]
Threads = Annotated[int, Field(ge=1, le=MAX_THREADS), _NOT_BOOL]
PositiveReal = Annotated[float, Field(gt=0, allow_inf_nan=False), _NOT_BOOL]
NonNegativeReal = Annotated[float, Field(ge=0, allow_inf_nan=False), _NOT_BOOL]
Seconds = Annotated[float, Field(gt=0), _NOT_BOOL]  # may be infinite
Fraction = Annotated[float, Field(ge=0, le=1), _NOT_BOOL]
ClientPath = Literal["auto", "sequential", "cohort"]
MaskDraw = Literal["bernoulli", "exact"]
FileName = Annotated[str, AfterValidator(_file_name)]


class Section(BaseModel):
    """A table of the configuration with a fixed set of keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


SectionT = TypeVar("SectionT", bound=Section)


class Part(BaseModel):
    """A table whose further keys are the settings of the part that `name` names."""

    model_config = ConfigDict(frozen=True, extra="allow")
    kind: ClassVar[str]
    name: str

    @property
    def settings(self) -> dict[str, Any]:
        """What the factory takes, without the keys that every such section has."""
        return dict(self.model_extra or {})

    @model_validator(mode="before")
    @classmethod
    def _must_be_a_table(cls, data: Any) -> Any:
        if not isinstance(data, dict | cls):
            raise PydanticCustomError("part_expected", "a table with a name")
        return data

    def completed(self, section: str, *, elsewhere: Callable[[], Iterable[str]]) -> Self:
        """The same part with every default written out, or ConfigError."""
        fixed = {key: getattr(self, key) for key in type(self).model_fields}
        settings = plugins.complete(
            self.kind, self.name, self.settings, section=section, fixed=fixed, elsewhere=elsewhere
        )
        return type(self)(**fixed, **settings)

    def build(self, *given: Any) -> Any:
        """Call the factory with what the program gives it."""
        return plugins.build(self.kind, self.name, self.settings, *given)


class DataPart(Part):
    """Which data set, how it is scaled and varied, and how much of its training samples is kept for validation."""

    kind = "dataset"
    name: str = "digits"
    normalise: Literal["default", "none", "per_channel", "unit", "constants"] = "default"
    mean: tuple[float, ...] = ()  # of the channels, for normalise = "constants"
    std: tuple[Annotated[float, Field(gt=0)], ...] = ()
    augment: Literal["none", "flip", "crop_flip"] = "none"
    validation_fraction: Annotated[float, Field(ge=0, lt=1), _NOT_BOOL] = 0.0


class PartitionPart(Part):
    """How the training samples are dealt out to the clients."""

    kind = "partition"
    name: str = "dirichlet"
    num_clients: Positive = 50


class ModelPart(Part):
    """The network that is trained."""

    kind = "model"
    name: str = "mlp"
    start: str = ""  # a file of initial weights, such as another run's model.safetensors; none: drawn by the seed


class ParameterisationPart(Part):
    """How the model's start and its learning rates depend on width and density (`fedsign.parameterisation`)."""

    kind = "parameterisation"
    name: str = "none"


class SparsityPart(Part):
    """How the masks of a sparse model are drawn, and how they change while one client trains it in one round, unless they are `static`."""

    kind = "sparsity"
    name: str = "static"
    draw: MaskDraw = "bernoulli"  # see `fedsign.parameterisation.masks`


class OptimizerPart(Part):
    """The clients' optimiser; its state is fresh in every round."""

    kind = "optimizer"
    name: str = "sgd"


class SchedulePart(Part):
    """How the clients' learning rate changes, from round to round or from one local step to the next."""

    kind = "schedule"
    name: str = "constant"
    per: Literal["round", "step"] = "round"  # what the schedule counts; steps are counted over all rounds


class ServerOptimizerPart(Part):
    """How the server steps towards the strategy's target; `none` goes there."""

    kind = "server_optimizer"
    name: str = "none"


class StrategyPart(Part):
    """The federated algorithm."""

    kind = "strategy"
    name: str = "fedsign"


class EnginePart(Part):
    """Where clients run, and how numbers are computed there (`fedsign.numerics`).

    `threads` is part of the experiment like the precision: the order of a sum depends on it.
    """

    kind = "engine"
    name: str = "in_process"
    threads: Threads = 1
    device: str = "cpu"
    precision: Literal["float32", "bf16"] = "float32"
    channels_last: Literal["auto", "on", "off"] = "auto"  # how images lie in memory; auto: for 2-D convolutions
    tf32: bool = False  # on CUDA, products of float32 with fewer bits
    compile: bool = False  # the model's passes in training, by torch.compile
    sparse_products: Literal["auto", "dense", "csr"] = "auto"  # of sparse layers, in training; auto: csr where it pays


# in client.sharding; no result depends on them
WHERE_RANKS_ARE = frozenset({"machines", "listen", "secret_file", "join_s"})
HOW_RANKS_WORK = WHERE_RANKS_ARE | {"prefetch"}


class ShardingSection(Section):
    """The processes that train one client together, its model's states sharded over them (`fedsign.sharding`); one: no sharding.

    `auto` takes the strategy that the plan finds the fastest for these bandwidths and this memory.
    """

    ranks: Positive = 1
    groups: Positive = 1  # of ranks that fast links join, all of one size
    strategy: str = "auto"  # or one of the fourteen, such as IIG
    memory_gb: NonNegativeReal = 0.0  # for the model states of a rank; 0: as much as they take
    intra_gbps: PositiveReal = 2000.0  # Gbit/s between ranks of a group, and to other groups: those of the paper
    inter_gbps: PositiveReal = 80.0
    prefetch: bool = True  # gather and reduce while the model computes: the same bits, for the memory of one more unit
    machines: Positive = (
        1  # which hold the ranks, consecutive ones together; those after the first join it (`fedsign worker`)
    )
    listen: str = ""  # HOST:PORT of the first machine, by which the others reach it
    secret_file: str = ""  # what a machine that joins has to know; needed unless HOST is the loopback
    join_s: PositiveReal = 120.0  # seconds for which a client waits for machines that have not joined


class ClientSection(Section):
    """A client's local training, of so many epochs or, if `local_steps` is above 0, so many steps."""

    local_epochs: NonNegative = 5
    local_steps: NonNegative = 0
    batch_size: Positive = 16
    lr: PositiveReal = 0.05
    weight_decay: NonNegativeReal = 0.0
    clip_norm: NonNegativeReal = 0.0  # of the gradient of all parameters, penalties included; 0: no clipping
    label_smoothing: Annotated[float, Field(ge=0, lt=1), _NOT_BOOL] = 0.0
    micro_batch: NonNegative = 0  # so many samples of a batch are computed at once, their gradients added up; 0: all
    path: ClientPath = "sequential"  # one client after another, or many as one stack of tensors; auto: by a rule
    chunk: NonNegative = 0  # how many clients a stack holds at most; 0: by a rule
    state_cache_mib: NonNegativeReal = 256.0  # memory for clients' states, in process; the rest lies on disk
    sharding: ShardingSection = ShardingSection()
    optimizer: OptimizerPart = OptimizerPart()
    schedule: SchedulePart = SchedulePart()

    @model_validator(mode="before")
    @classmethod
    def _steps_instead_of_epochs(cls, data: Any) -> Any:
        """`local_steps` alone is enough: the default number of epochs makes way for it."""
        if isinstance(data, dict) and data.get("local_steps") and "local_epochs" not in data:
            return {**data, "local_epochs": 0}
        return data


class ServerSection(Section):
    """The server's side of a round."""

    cohort_size: Positive = 10
    over_sampling: NonNegativeReal = (
        0.0  # 0.3: asks 30 % more clients, and the round ends with the first cohort_size replies
    )
    min_replies: Positive = 1
    round_timeout_s: Seconds = 3600.0
    evaluation: Literal["auto", "server", "clients"] = "auto"  # whose test samples; auto: the server's, if it has some
    evaluate_clients: NonNegative = 0  # how many clients evaluate in a round, where they do; 0: all
    optimizer: ServerOptimizerPart = ServerOptimizerPart()


class FaultsSection(Section):
    """How often a client fails on purpose in a round, and how long a late one takes (`clients.robustness.faults`)."""

    crash_rate: Fraction = 0.0
    delay_rate: Fraction = 0.0
    delay_s: Annotated[float, Field(ge=0, allow_inf_nan=False), _NOT_BOOL] = 5.0
    nan_rate: Fraction = 0.0
    drop_rate: Fraction = 0.0

    @property
    def any(self) -> bool:
        """Whether there are any."""
        return any((self.crash_rate, self.delay_rate, self.nan_rate, self.drop_rate))


class PrivacyPart(Part):
    """Differential privacy of the clients (`fedsign.privacy`)."""

    kind = "privacy"
    name: str = "none"


class AttackPart(Part):
    """What malicious clients send, and which share of the population they are (`clients.robustness.attack`)."""

    kind = "attack"
    name: str = "none"
    fraction: Fraction = 0.2


class ResultsSection(Section):
    """Where a run is written, and how often it can be resumed from; `signs`: how far the clients' signs agree, too."""

    root: str = "runs"
    checkpoint_every: Positive = 5
    keep_checkpoints: Positive = 2
    signs: bool = False
