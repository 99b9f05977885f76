"""The experiment as a frozen tree: read from TOML, completed, checked, printed back, sent as one string.

A section with a `name` (data, partition, model, ...) holds the settings of that part; which keys it
takes follows from the part's factory (`fedsign.plugins`).  An unknown key is an error that names the
nearest known one.  `--set a.b=value` reaches every leaf.
"""

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedsign import plugins
from fedsign.errors import ConfigError

Positive = Annotated[int, Field(gt=0)]


class Section(BaseModel):
    """A table of the configuration with a fixed set of keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


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
        if not isinstance(data, dict):
            raise ValueError("a table with a name, such as { name = '...' }")
        return data

    def completed(self, section: str) -> Self:
        """The same part with every default written out, or ConfigError."""
        fixed = {key: getattr(self, key) for key in type(self).model_fields}
        settings = plugins.complete(self.kind, self.name, self.settings, section=section, fixed=fixed)
        return type(self)(**fixed, **settings)

    def build(self, *given: Any) -> Any:
        """Call the factory with what the program gives it."""
        return plugins.build(self.kind, self.name, self.settings, *given)


class DataPart(Part):
    """Which data set, and how it is split."""

    kind = "dataset"
    name: str = "digits"


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


class StrategyPart(Part):
    """The federated algorithm."""

    kind = "strategy"
    name: str = "fedsign"


class EnginePart(Part):
    """Where clients run.  `threads` is part of the experiment: the order of a sum depends on it."""

    kind = "engine"
    name: str = "in_process"
    threads: Positive = 1
    device: str = "cpu"


class ClientSection(Section):
    """A client's local training."""

    local_epochs: Positive = 5
    batch_size: Positive = 16
    lr: Annotated[float, Field(gt=0)] = 0.05
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    optimizer: OptimizerPart = OptimizerPart()


class ServerSection(Section):
    """The server's side of a round."""

    cohort_size: Positive = 10
    min_replies: Positive = 1
    round_timeout_s: Annotated[float, Field(gt=0)] = 3600.0


class ResultsSection(Section):
    """Where a run is written, and how often it can be resumed from."""

    root: str = "runs"
    checkpoint_every: Positive = 5
    keep_checkpoints: Positive = 2


class ExperimentConfig(Section):
    """One experiment.  The defaults are the default experiment: FedSign on digits, Dirichlet(0.1)."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "fedsign-digits"
    seed: Annotated[int, Field(ge=0)] = 0
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
    try:
        raw = ExperimentConfig.model_validate(dict(data))
    except ValidationError as error:
        raise ConfigError(plugins.sentence(error, section="", known=_known_keys(error))) from error
    complete = raw.model_copy(
        update={
            "client": raw.client.model_copy(update={"optimizer": raw.client.optimizer.completed("client.optimizer")}),
            **{
                section: getattr(raw, section).completed(section)
                for section, field in ExperimentConfig.model_fields.items()
                if isinstance(field.annotation, type) and issubclass(field.annotation, Part)
            },
        }
    )
    _check_names(complete)
    if complete.server.cohort_size > complete.partition.num_clients:
        raise ConfigError(
            f"server.cohort_size={complete.server.cohort_size} exceeds the {complete.partition.num_clients} clients of "
            "partition.num_clients; lower the one or raise the other."
        )
    if complete.server.min_replies > complete.server.cohort_size:
        raise ConfigError(
            f"server.min_replies={complete.server.min_replies} exceeds server.cohort_size="
            f"{complete.server.cohort_size}: no round could ever end; lower server.min_replies."
        )
    return complete


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
    if not separator or not key:
        raise ConfigError(f"--set takes KEY=VALUE, such as --set client.lr=0.1; '{text}' was given.")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def _assign_all(data: dict[str, Any], changes: Iterable[tuple[str, Any]]) -> None:
    """Names first: naming a part must not drop settings that are given beside it."""
    for path, value in sorted(changes, key=lambda change: change[0].rpartition(".")[2] != "name"):
        _assign(data, path, value)


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


def _known_keys(error: ValidationError) -> list[str]:
    """The keys of the table in which the first problem lies."""
    section: Any = ExperimentConfig
    for key in error.errors()[0]["loc"][:-1]:
        field = section.model_fields.get(str(key))
        if field is None or not isinstance(field.annotation, type):
            return []
        section = field.annotation
    return list(getattr(section, "model_fields", {}))


def _check_names(config: ExperimentConfig) -> None:
    for kind, names in (
        ("task", [config.task]),
        ("metric", config.metrics),
        ("callback", config.callbacks),
    ):
        for name in names:
            plugins.complete(kind, name, {}, section=kind)
