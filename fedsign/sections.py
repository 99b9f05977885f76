"""The core's configuration tables: keys, defaults, and checks of each.

A `Part` names a component, whose factory defines the further keys of its table (`fedsign.plugins`); a `Section` has
fixed keys.  Capabilities add tables of their own, and keys to the core's tables (`composed`).
"""

import re
from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator
from pydantic_core import PydanticCustomError

from fedsign import plugins
from fedsign.errors import ConfigError
from fedsign.rules import Rule

MAX_INT = 2**31 - 1  # a seed is one 32-bit word of entropy; Flower's records hold signed 64-bit integers
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
FileName = Annotated[str, AfterValidator(_file_name)]
OptionalFileName = Annotated[str, AfterValidator(lambda value: value and _file_name(value))]


class Table(BaseModel):
    """A table of the configuration, or keys that a capability adds to a table of the core."""

    rules: ClassVar[tuple[Rule[Any], ...]] = ()  # refused configurations
    no_result: ClassVar[frozenset[str]] = frozenset()  # keys that cannot change a result
    # keys of later versions -> the value at which the hash of an older experiment stays valid
    neutral: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def of(cls, config: "Table") -> Self:
        """The table of this type in a configuration."""
        section: Self = attrgetter(_path(type(config), cls))(config)
        return section

    def check(self) -> None:
        """Raise ConfigError if values contradict each other."""


class Section(Table):
    """A table with a fixed set of keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


SectionT = TypeVar("SectionT", bound=Section)


class Part(Table):
    """A table whose `name` selects a component; its further keys are the component's settings."""

    model_config = ConfigDict(frozen=True, extra="allow")
    kind: ClassVar[str]
    name: str

    @property
    def is_chosen(self) -> bool:
        """Whether `name` differs from the default."""
        return bool(self.name != type(self).model_fields["name"].default)

    @property
    def settings(self) -> dict[str, Any]:
        """The component's settings, without the keys of the section itself."""
        return dict(self.model_extra or {})

    @model_validator(mode="before")
    @classmethod
    def _must_be_a_table(cls, data: Any) -> Any:
        if not isinstance(data, dict | cls):
            raise PydanticCustomError("part_expected", "a table with a name")
        return data

    def completed(self, section: str, *, elsewhere: Callable[[], Iterable[str]]) -> Self:
        """A copy with every default written out; raises ConfigError for invalid settings."""
        fixed = {key: getattr(self, key) for key in type(self).model_fields}
        settings = plugins.complete(
            self.kind, self.name, self.settings, section=section, fixed=fixed, elsewhere=elsewhere
        )
        return type(self)(**fixed, **settings)

    def build(self, *given: Any) -> Any:
        """Call the factory with the program's arguments."""
        return plugins.build(self.kind, self.name, self.settings, *given)


class DataPart(Part):
    """The data set, its normalization and augmentation, and the fraction held out for validation."""

    kind = "dataset"
    name: str = "digits"
    normalize: Literal["default", "none", "per_channel", "unit", "constants"] = "default"
    mean: tuple[float, ...] = ()  # per channel, for normalize = "constants"
    std: tuple[Annotated[float, Field(gt=0)], ...] = ()
    augment: Literal["none", "flip", "crop_flip"] = "none"
    validation_fraction: Annotated[float, Field(ge=0, lt=1), _NOT_BOOL] = 0.0

    def check(self) -> None:
        """`mean` and `std` belong to normalize = "constants"."""
        if (self.normalize == "constants") != bool(self.mean) or len(self.mean) != len(self.std):
            raise ConfigError(
                f"data.normalize={self.normalize} was given with {len(self.mean)} numbers in data.mean and "
                f"{len(self.std)} in data.std; with normalize=constants both need a number for every channel, and "
                "otherwise none."
            )


class PartitionPart(Part):
    """How the training samples are partitioned among clients."""

    kind = "partition"
    name: str = "dirichlet"
    num_clients: Positive = 50


class ModelPart(Part):
    """The network that is trained."""

    kind = "model"
    neutral: ClassVar[Mapping[str, Any]] = {"init_scale": 1.0, "output": ""}
    name: str = "mlp"
    start: str = ""  # file of initial weights, such as model.safetensors of another run; empty: random
    output: str = ""  # part of a tuple or dict that the model gives, such as 1 or logits; empty: it gives a tensor
    init_scale: PositiveReal = 1.0  # factor on the random weights; biases and norms (1-D) keep theirs

    def check(self) -> None:
        """`init_scale` applies to random weights only."""
        if self.start and self.init_scale != 1:
            raise ConfigError(
                f"model.init_scale={self.init_scale} was given with model.start={self.start}, but scales drawn "
                "weights only; drop one of the two."
            )


class OptimizerPart(Part):
    """The clients' optimizer; its state is reset every round."""

    kind = "optimizer"
    name: str = "sgd"

    def check(self) -> None:
        """Nesterov requires momentum, as in `torch.optim.SGD`."""
        if self.settings.get("nesterov") is True and self.settings.get("momentum") == 0:
            raise ConfigError(
                "client.optimizer.nesterov=true was given with client.optimizer.momentum=0, but needs a momentum "
                "above 0; raise the momentum or drop nesterov."
            )


class SchedulePart(Part):
    """The schedule of the clients' learning rate, per round or per local step."""

    kind = "schedule"
    name: str = "constant"
    per: Literal["round", "step"] = "round"  # unit of the schedule; steps accumulate over rounds


class ServerOptimizerPart(Part):
    """The server optimizer: how to step toward the strategy's proposal; `none` adopts the proposal."""

    kind = "server_optimizer"
    name: str = "none"


class StrategyPart(Part):
    """The federated algorithm."""

    kind = "strategy"
    name: str = "fedavg"


class EnginePart(Part):
    """Where clients run, and the numerics there (`fedsign.numerics`).

    `threads` is part of the experiment, like the precision: it changes the order of summation.
    """

    kind = "engine"
    no_result = frozenset({"workers"})
    name: str = "in_process"
    threads: Threads = 1
    device: str = "cpu"
    precision: Literal["float32", "bf16"] = "float32"
    channels_last: Literal["auto", "on", "off"] = "auto"  # memory format of images; auto: for 2-D convolutions
    tf32: bool = False  # TF32 for float32 matrix products on CUDA
    compile: bool = False  # torch.compile for the model in training


class ClientSection(Section):
    """A client's local training: `local_epochs` epochs or, if `local_steps` is above 0, that many steps."""

    neutral: ClassVar[Mapping[str, Any]] = {"temperature": 1.0, "loss": "task", "low_precision": "master"}
    local_epochs: NonNegative = 5
    local_steps: NonNegative = 0
    batch_size: Positive = 16
    lr: PositiveReal = 0.05
    weight_decay: NonNegativeReal = 0.0
    clip_norm: NonNegativeReal = 0.0  # of the whole gradient, penalties included; 0: no clipping
    loss: Literal["task", "model"] = "task"  # that clients minimize; model: the one its output holds, given `labels`
    label_smoothing: Annotated[float, Field(ge=0, lt=1), _NOT_BOOL] = 0.0
    temperature: PositiveReal = 1.0  # divides the logits in the training loss
    micro_batch: NonNegative = 0  # samples per pass, gradients accumulate over a batch; 0: the whole batch
    low_precision: Literal["master", "stochastic", "plain"] = "master"
    path: Literal["auto", "sequential"] = "sequential"  # one client after another; auto: the fastest that applies
    state_cache_mib: NonNegativeReal = 256.0  # memory for client states, in process; the rest goes to disk
    optimizer: OptimizerPart = OptimizerPart()
    schedule: SchedulePart = SchedulePart()

    @model_validator(mode="before")
    @classmethod
    def _steps_instead_of_epochs(cls, data: Any) -> Any:
        """`local_steps` alone suffices: it replaces the default number of epochs."""
        if isinstance(data, dict) and data.get("local_steps") and "local_epochs" not in data:
            return {**data, "local_epochs": 0}
        return data

    def check(self) -> None:
        """Exactly one of epochs and steps is set."""
        if bool(self.local_epochs) == bool(self.local_steps):
            raise ConfigError(
                f"client.local_epochs={self.local_epochs} and client.local_steps={self.local_steps} were given; "
                "expected one of the two above 0: set the other to 0."
            )


class ServerSection(Section):
    """The server's side of a round."""

    no_result = frozenset({"max_examples"})
    neutral: ClassVar[Mapping[str, Any]] = {"counters": "copied"}
    cohort_size: Positive = 10
    # 0.3: sample 30 % more clients and end the round with the first cohort_size replies
    over_sampling: NonNegativeReal = 0.0
    min_replies: Positive = 1
    round_timeout_s: Seconds = 3600.0
    max_examples: Positive = 1_000_000  # limit on a reply's num_examples, where the server cannot count them
    counters: Literal["copied", "largest", "summed"] = "copied"
    evaluation: Literal["auto", "server", "clients"] = "auto"  # where test samples lie; auto: the server, if it has any
    evaluate_clients: NonNegative = 0  # clients that evaluate per round, if clients evaluate; 0: all
    optimizer: ServerOptimizerPart = ServerOptimizerPart()

    def check(self) -> None:
        """A cohort can reach `min_replies`."""
        if self.min_replies > self.cohort_size:
            raise ConfigError(
                f"server.min_replies={self.min_replies} exceeds server.cohort_size={self.cohort_size}: no round "
                "could ever end; lower server.min_replies."
            )


class ResultsSection(Section):
    """Where runs are written, and how often they are checkpointed."""

    root: str = "runs"
    checkpoint_every: Positive = 5
    keep_checkpoints: Positive = 2


def composed(table: type[SectionT], added: Iterable[tuple[str, type[Table]]]) -> type[SectionT]:
    """A table extended by capabilities: each pair adds a new table at a path, or keys to the table already there."""
    fields: dict[str, Any] = {}
    bases: list[type[Table]] = [table]
    inner: dict[str, list[tuple[str, type[Table]]]] = defaultdict(list)
    for path, each in added:
        key, _, rest = path.partition(".")
        if not path:
            bases.insert(0, each)  # first, so that a capability's keys override the core's, such as client.path
        elif key in table.model_fields:
            inner[key].append((rest, each))
        else:
            fields[key] = each, each()
    for key, below in inner.items():
        whole: Any = composed(cast(Any, table.model_fields[key].annotation), below)
        fields[key] = whole, whole()
    created = create_model(
        table.__name__, __base__=tuple(bases), __module__=table.__module__, __doc__=table.__doc__, **fields
    )
    created.no_result = frozenset().union(*(each.no_result for each in bases))
    created.neutral = dict(ChainMap(*(dict(each.neutral) for each in bases)))
    return cast(type[SectionT], created)


def tables(table: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[Table]]]:
    """All nested tables with their paths."""
    for key, field in table.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Table):
            yield path + key, field.annotation
            yield from tables(field.annotation, f"{path}{key}.")


@cache
def _path(root: type[Table], wanted: type[Table]) -> str:
    return next(path for path, table in tables(root) if issubclass(table, wanted))
