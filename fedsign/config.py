"""The experiment as a frozen tree: read from TOML, completed, checked, printed back, sent as one string.

A section with a `name` (data, partition, model, ...) holds the settings of that part; which keys it
takes follows from the part's factory (`fedsign.plugins`).  An unknown key is an error that names the
nearest known one.  `--set a.b=value` reaches every leaf.
"""

import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import tomli_w
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from fedsign import plugins
from fedsign.errors import ConfigError

MAX_INT = 2**31 - 1  # a seed's words have 32 bits, Flower's records carry integers of 64 bits with a sign
MAX_THREADS = 4096
RESERVED_METRICS = frozenset(  # what a line of rounds.jsonl holds besides the metrics
    {
        "round",
        "loss",
        "train_loss",
        "clients",
        "num_replies",
        "failures",
        "bytes_down",
        "bytes_up",
        "update_norm",
        "client_drift",
        "epsilon",
        "epsilon_round",
        "clip_norm",
        "malicious",
        "signs_models",
        "signs_models_global",
        "signs_updates",
        "signs_updates_global",
        "surplus",
    }
)
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


class OptimizerPart(Part):
    """The clients' optimiser; its state is fresh in every round."""

    kind = "optimizer"
    name: str = "sgd"


class SchedulePart(Part):
    """How the clients' learning rate changes over the rounds."""

    kind = "schedule"
    name: str = "constant"


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


class ClientSection(Section):
    """A client's local training, of so many epochs or, if `local_steps` is above 0, so many steps."""

    local_epochs: NonNegative = 5
    local_steps: NonNegative = 0
    batch_size: Positive = 16
    lr: PositiveReal = 0.05
    weight_decay: NonNegativeReal = 0.0
    clip_norm: NonNegativeReal = 0.0  # of the gradient of all parameters, penalties included; 0: no clipping
    label_smoothing: Annotated[float, Field(ge=0, lt=1), _NOT_BOOL] = 0.0
    path: ClientPath = "sequential"  # one client after another, or many as one stack of tensors; auto: by a rule
    chunk: NonNegative = 0  # how many clients a stack holds at most; 0: by a rule
    state_cache_mib: NonNegativeReal = 256.0  # memory for clients' states, in process; the rest lies on disk
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
    """How often a client fails on purpose in a round, and how long a late one takes (`clients.faults`)."""

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
    """What malicious clients send, and which share of the population they are (`clients.attack`)."""

    kind = "attack"
    name: str = "none"
    fraction: Fraction = 0.2


class ResultsSection(Section):
    """Where a run is written, and how often it can be resumed from; `signs`: how far the clients' signs agree, too."""

    root: str = "runs"
    checkpoint_every: Positive = 5
    keep_checkpoints: Positive = 2
    signs: bool = False


class ExperimentConfig(Section):
    """One experiment.  The defaults are the default experiment: FedSign on digits, Dirichlet(0.1)."""

    name: FileName = "fedsign-digits"
    seed: Seed = 0
    rounds: Positive = 40
    task: str = "classification"
    metrics: tuple[str, ...] = ("accuracy",)
    callbacks: tuple[str, ...] = ("progress", "report")
    data: DataPart = DataPart()
    partition: PartitionPart = PartitionPart()
    model: ModelPart = ModelPart()
    client: ClientSection = ClientSection()
    strategy: StrategyPart = StrategyPart()
    server: ServerSection = ServerSection()
    engine: EnginePart = EnginePart()
    faults: FaultsSection = FaultsSection()
    privacy: PrivacyPart = PrivacyPart()
    attack: AttackPart = AttackPart()
    results: ResultsSection = ResultsSection()

    def to_toml(self) -> str:
        """The complete configuration; `from_toml` of it gives an equal tree."""
        return tomli_w.dumps(self.model_dump(mode="json"))

    def replace(self, **changes: Any) -> "ExperimentConfig":
        """A changed copy, checked like any other: `config.replace(seed=3, **{"client.lr": 0.1})`."""
        data = self.model_dump(mode="json")
        _assign_all(data, changes.items())
        return from_dict(data)


def from_dict(data: Mapping[str, Any]) -> ExperimentConfig:
    """Check and complete a tree.

    >>> from_dict({"strategy": {"name": "fedsign"}}).strategy.settings["gamma"]
    0.003
    """

    def elsewhere() -> list[str]:
        return list(_paths(ExperimentConfig, data))

    try:
        raw = ExperimentConfig.model_validate(dict(data))
    except ValidationError as error:
        said = plugins.sentence(error, ExperimentConfig, given=data, section="", elsewhere=elsewhere)
        raise ConfigError(said) from error
    complete = _completed(raw, "", elsewhere)
    _check_names(complete)
    _check_values(complete)
    return complete


def merged(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A tree with changes, at any depth.

    >>> merged({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}})
    {'a': {'b': 1, 'c': 3}}
    """
    result = dict(tree)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result


def _completed(section: SectionT, path: str, elsewhere: Callable[[], Iterable[str]]) -> SectionT:
    """The same section with the defaults of all its parts written out, at any depth."""
    updates: dict[str, Any] = {}
    for key in type(section).model_fields:
        match getattr(section, key):
            case Part() as part:
                updates[key] = part.completed(path + key, elsewhere=elsewhere)
            case Section() as inner:
                updates[key] = _completed(inner, f"{path}{key}.", elsewhere)
    return section.model_copy(update=updates)


def from_toml(text: str) -> ExperimentConfig:
    """Read a configuration from TOML text."""
    return from_dict(parse_toml(text, source="the configuration"))


def load(path: Path | None = None, overrides: Iterable[str] = ()) -> ExperimentConfig:
    """The default experiment, changed by a file and then by `key=value` overrides."""
    data: dict[str, Any] = {}
    if path is not None:
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"the configuration {path} cannot be read: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"the configuration {path} is not UTF-8 text ({error}); save it as UTF-8.") from error
        data = parse_toml(text, source=str(path))
    _assign_all(data, map(parse_override, overrides))
    return from_dict(data)


def parse_toml(text: str, *, source: str) -> dict[str, Any]:
    """TOML text as a dictionary, or one sentence."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not valid TOML: {error}.") from error


def parse_override(text: str) -> tuple[str, Any]:
    """`key=value`, the value in TOML; what is no TOML value is taken as a string.

    >>> parse_override("client.lr=0.1"), parse_override("engine.name=ray")
    (('client.lr', 0.1), ('engine.name', 'ray'))
    """
    key, separator, value = text.partition("=")
    key = key.strip()
    if not separator or not all(key.split(".")):
        raise ConfigError(f"--set takes KEY=VALUE, such as --set client.lr=0.1; '{text}' was given.")
    try:
        read = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return key, value.strip()
    return key, read["value"] if read.keys() == {"value"} else value


def _assign_all(data: dict[str, Any], changes: Iterable[tuple[str, Any]]) -> None:
    """Names first: naming a part must not drop settings that are given beside it."""
    ordered = sorted(changes, key=lambda change: change[0].rpartition(".")[2] != "name")
    for path, value in ordered:
        _assign(data, path, value)
    given = [path for path, _ in ordered]
    if "client.local_steps" in given and "client.local_epochs" not in given and data["client"]["local_steps"]:
        data["client"].pop("local_epochs", None)  # they would contradict each other


def _assign(data: dict[str, Any], path: str, value: Any) -> None:
    """Set one leaf.  Naming another part drops the settings of the former one, which it would not know."""
    *parents, leaf = path.split(".")
    table = data
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ConfigError(f"'{path}' cannot be set: '{parent}' is a value, not a table.")
    part = _part_type(parents)
    if leaf == "name" and part is not None and table.get("name", part.model_fields["name"].default) != value:
        for key in [key for key in table if key not in part.model_fields]:
            del table[key]
    table[leaf] = value


def _part_type(path: list[str]) -> type[Part] | None:
    section: Any = ExperimentConfig
    for key in path:
        field = section.model_fields.get(key) if isinstance(section, type) and issubclass(section, BaseModel) else None
        if field is None:
            return None
        section = field.annotation
    return section if isinstance(section, type) and issubclass(section, Part) else None


def _paths(table: type[BaseModel], data: Any, prefix: str = "") -> Iterator[str]:
    """The path of every key of the tree, the settings of the parts that `data` names included."""
    given = data if isinstance(data, Mapping) else {}
    for key, field in table.model_fields.items():
        yield prefix + key
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _paths(field.annotation, given.get(key), f"{prefix}{key}.")
    if issubclass(table, Part):
        try:
            settings = plugins.names_of(table.kind, str(given.get("name", table.model_fields["name"].default)))
        except ConfigError:
            return  # that is another mistake, and not the one to report now
        yield from (prefix + key for key in settings)


def _check_names(config: ExperimentConfig) -> None:
    for kind, names in (
        ("task", [config.task]),
        ("metric", config.metrics),
        ("callback", config.callbacks),
    ):
        for name in names:
            plugins.check(kind, name)
    columns = [name.rpartition(":")[2] for name in config.metrics]
    for name, column in zip(config.metrics, columns, strict=True):
        if column in RESERVED_METRICS or column.startswith("validation_"):
            raise ConfigError(
                f"metric '{name}' would be written as '{column}', which a line of a run holds already; "
                "give the function another name."
            )
        if columns.count(column) > 1:
            raise ConfigError(
                f"metrics={list(config.metrics)} holds '{column}' {columns.count(column)} times; name every metric "
                "once, and give functions of different modules different names."
            )


def _check_values(config: ExperimentConfig) -> None:
    """What no single value shows."""
    server, num_clients, optimizer = config.server, config.partition.num_clients, config.client.optimizer.settings
    client = config.client
    if bool(client.local_epochs) == bool(client.local_steps):
        raise ConfigError(
            f"client.local_epochs={client.local_epochs} and client.local_steps={client.local_steps} were given; expected is "
            "one of the two above 0: set the other to 0."
        )
    data = config.data
    if (data.normalise == "constants") != bool(data.mean) or len(data.mean) != len(data.std):
        raise ConfigError(
            f"data.normalise={data.normalise} was given with {len(data.mean)} numbers in data.mean and {len(data.std)} in "
            "data.std; with normalise=constants both need a number for every channel, and otherwise none."
        )
    if client.label_smoothing and config.task != "classification":
        raise ConfigError(
            f"client.label_smoothing={client.label_smoothing} was given with task={config.task}; only classification has "
            "labels to smooth: set it to 0."
        )
    if server.cohort_size > num_clients:
        raise ConfigError(
            f"server.cohort_size={server.cohort_size} exceeds the {num_clients} clients of "
            "partition.num_clients; lower the one or raise the other."
        )
    if server.evaluate_clients > num_clients:
        raise ConfigError(
            f"server.evaluate_clients={server.evaluate_clients} exceeds the {num_clients} clients of partition.num_clients; "
            "lower it, or set it to 0 for all."
        )
    if server.min_replies > server.cohort_size:
        raise ConfigError(
            f"server.min_replies={server.min_replies} exceeds server.cohort_size="
            f"{server.cohort_size}: no round could ever end; lower server.min_replies."
        )
    if config.faults.delay_s != FaultsSection().delay_s and not config.faults.delay_rate:
        raise ConfigError(
            f"faults.delay_s={config.faults.delay_s:g} was given with faults.delay_rate=0, so that nobody would be late; set the "
            "rate, or leave faults.delay_s out."
        )
    if config.attack.fraction != AttackPart().fraction and config.attack.name == "none":
        raise ConfigError(
            f"attack.fraction={config.attack.fraction:g} was given with attack.name=none, so that nobody would attack; name the "
            "attack, or leave attack.fraction out."
        )
    if optimizer.get("nesterov") is True and optimizer.get("momentum") == 0:
        raise ConfigError(
            "client.optimizer.nesterov=true was given with client.optimizer.momentum=0, but needs a momentum above 0; "
            "raise the momentum or drop nesterov."
        )
