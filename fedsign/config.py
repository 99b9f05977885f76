"""The experiment as a frozen tree: read from TOML, completed, validated, written back, sent as one string.

A section with a `name` (data, partition, model, ...) also holds the settings of that component, whose keys follow
from the signature of its factory (`fedsign.plugins`).  An unknown key is an error that suggests the nearest known
one.  `--set a.b=value` reaches every leaf.
"""

import shlex
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import reduce
from operator import attrgetter, getitem
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import tomli_w
from pydantic import ValidationError

from fedsign import former_names, naming, plugins
from fedsign.capabilities import CAPABILITIES, absent
from fedsign.errors import ConfigError, UnknownKeysError
from fedsign.extensions import load as load_target
from fedsign.overrides import assign_all, parse_override
from fedsign.rules import Rule, check
from fedsign.sections import (
    ClientSection,
    DataPart,
    EnginePart,
    ModelPart,
    OptionalFileName,
    Part,
    PartitionPart,
    Positive,
    ResultsSection,
    Section,
    SectionT,
    Seed,
    ServerSection,
    StrategyPart,
    composed,
    tables,
)
from fedsign.storage.texts import read_marked
from fedsign.traits import PartitionTraits, rules_of

_COLUMNS = frozenset(  # keys of a record of rounds.jsonl, besides the metrics
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
        "weight_norm",
        "surplus",
        "left_out",
        *(column for each in CAPABILITIES.values() for column in each.columns),
    }
)
_Value = TypeVar("_Value")


class ExperimentConfig(Section):
    """One experiment.  The defaults train FedAvg on digits, partitioned by Dirichlet(0.1)."""

    name: OptionalFileName = ""
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
    results: ResultsSection = ResultsSection()

    @property
    def run_name(self) -> str:
        """The name of the experiment's runs; see `fedsign.naming`."""
        return naming.run_name(self.model_dump(include={"name", "data", "strategy"}))

    @property
    def data_label(self) -> str:
        """What pages and lists call the data; see `fedsign.naming`."""
        return naming.data_label(self.model_dump(include={"data"}))

    @property
    def project_name(self) -> str:
        """The name of what holds runs of several strategies, such as a comparison."""
        return naming.project_name(self.model_dump(include={"name", "data", "strategy"}))

    def to_toml(self) -> str:
        """The complete configuration as TOML; `from_toml` restores an equal tree."""
        return tomli_w.dumps(self.model_dump(mode="json"))

    def get(self, path: str, default: _Value) -> _Value:
        """A setting by its path; `default` if no such key exists, as when its capability was deleted."""
        try:
            return cast(_Value, attrgetter(former_names.current_path(path, warns=False))(self))
        except AttributeError:
            return default

    def result_settings(self) -> dict[str, Any]:
        """The tree without keys that cannot change a result.

        Deleting an unused capability does not change it, nor does a new key at its neutral value: hashes stay valid.
        """
        data = self.model_dump(mode="json")
        for path, table in tables(type(self)):
            section = reduce(getitem, path.split("."), data)
            unchanged = (key for key, value in table.neutral.items() if section[key] == value)
            for key in (*table.no_result, *unchanged):
                section.pop(key, None)
        unused: dict[str, Any] = reduce(merged, absent("digested").values(), {})
        return merged(unused, data)

    def changed(self) -> dict[str, tuple[Any, Any]]:
        """The settings that differ from the defaults, those of components from the component's: path -> value, default.

        The default is None where there is none.

        >>> from_dict({"client": {"lr": 0.1}, "model": {"name": "linear"}}).changed()
        {'model.name': ('linear', 'mlp'), 'client.lr': (0.1, 0.05)}
        """
        data, default = self.model_dump(mode="json"), type(self)().model_dump(mode="json")
        for path, table in tables(type(self)):
            if issubclass(table, Part):
                name = reduce(getitem, path.split("."), data)["name"]
                reduce(getitem, path.split("."), default).update(plugins.defaults_of(table.kind, name))
        known = dict(_leaves(default))
        return {
            path: (value, known.get(path)) for path, value in _leaves(data) if path not in known or known[path] != value
        }

    def replace(self, **changes: Any) -> "ExperimentConfig":
        """A validated copy with changes: `config.replace(seed=3, **{"client.lr": 0.1})`."""
        data = self.model_dump(mode="json")
        assign_all(ExperimentConfig, data, changes.items())
        return from_dict(data)


if not TYPE_CHECKING:  # mypy sees the core's tables only; capabilities read theirs by `Table.of`
    _ADDED = ((path, load_target(target)) for each in CAPABILITIES.values() for path, target in each.sections.items())
    ExperimentConfig = composed(ExperimentConfig, _ADDED)


def from_dict(data: Mapping[str, Any]) -> ExperimentConfig:
    """Validate a tree and fill in the defaults.

    >>> from_dict({"strategy": {"name": "fedsign"}}).strategy.settings["gamma"]
    0.0003
    """
    tree = without_deleted(former_names.current_tree(data))
    _check_reader(tree)
    complete = checked(ExperimentConfig, tree)
    _check_names(complete)
    named = [("task", complete.task)]
    for path, _ in tables(ExperimentConfig):
        table = attrgetter(path)(complete)
        table.check()
        check(table.rules, complete)
        if isinstance(table, Part):
            named.append((table.kind, table.name))
    check(RULES, complete)
    for kind, name in named:
        check(rules_of(kind, name), complete)
    return complete


def _check_reader(tree: Mapping[str, Any]) -> None:
    """Raise ConfigError if a data file is given without the data set that reads it."""
    data = tree.get("data")
    part = data if isinstance(data, Mapping) else {"name": data}
    name, path = part.get("name"), part.get("path")
    if name is None and isinstance(path, str):
        key, file = "data.path", path
    elif isinstance(name, str) and naming.reader_of(name):
        key, file = "data.name" if part is data else "data", name
    else:
        return
    raise ConfigError(f"{key}={file} was given, which names no data set; to read a file, use {_reading(file, part)}.")


def _reading(file: str, given: Mapping[str, Any] | None = None) -> str:
    """The settings that read a data file."""
    name = naming.reader_of(file)
    settings = f"--set data.name={name or 'NAME'} --set {shlex.quote(f'data.path={file}')}"
    if not name:
        return f"{settings}, where NAME is one of {', '.join(naming.FILE_READERS)}"
    if "target" in plugins.names_of("dataset", name) and "target" not in (given or {}):
        settings += " --set data.target=COLUMN"
    return settings


def without_deleted(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tree without keys of deleted capabilities.

    Raises:
        ConfigError: such a key is set to something other than its default.
    """
    for capability, choices in absent("choices").items():
        for path, choice in choices.items():
            table, _, key = path.partition(".")
            if isinstance(given := data.get(table), Mapping) and given.get(key) == choice:
                raise _needs(path, choice, capability, f"choose another {path}")
    for capability, tree in (*absent("digested").items(), *absent("undigested").items()):
        data = without_unused(data, tree, capability)
    return data


def _needs(path: str, value: Any, capability: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"{path}={plugins.shown(value)} was given, but needs the capability '{capability}', which was deleted from "
        f"this FedSign; install one that has it, or {remedy}."
    )


def checked(table: type[SectionT], data: Mapping[str, Any]) -> SectionT:
    """Validate a tree as a table of this type, with the defaults of all components written out.

    Raises:
        UnknownKeysError: unknown keys, all at once.
        ConfigError: an invalid value.
    """
    try:
        return _checked(table, data)
    except UnknownKeysError as error:
        rest = _without(data, error.hints)
        try:
            if rest != data:
                checked(table, rest)  # a component's settings are validated after the tables
        except UnknownKeysError as more:
            raise UnknownKeysError(error.hints | more.hints) from None
        except ConfigError:
            pass  # the unknown keys first
        raise


def _checked(table: type[SectionT], data: Mapping[str, Any]) -> SectionT:

    def elsewhere() -> list[str]:
        return list(_paths(table, data))

    try:
        raw = table.model_validate(dict(data))
    except ValidationError as error:
        raise plugins.config_error(error, table, given=data, section="", elsewhere=elsewhere) from None  # says it all
    return _completed(raw, "", elsewhere)


def _without(tree: Mapping[str, Any], paths: Iterable[str]) -> dict[str, Any]:
    """A tree without the keys at these paths."""
    paths = [*paths]
    left = {}
    for key, value in tree.items():
        if key not in paths:
            below = [path.removeprefix(f"{key}.") for path in paths if path.startswith(f"{key}.")]
            left[key] = _without(value, below) if isinstance(value, Mapping) else value
    return left


def merged(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A tree with changes at any depth.

    >>> merged({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}})
    {'a': {'b': 1, 'c': 3}}
    """
    result = dict(tree)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result


def without_unused(
    given: Mapping[str, Any], unused: Mapping[str, Any], capability: str, path: str = ""
) -> dict[str, Any]:
    """The tree without the keys of a deleted capability, which may only have their unused values."""
    kept = dict(given)
    for key, value in unused.items():
        if key not in given or (isinstance(value, Mapping) and not isinstance(given[key], Mapping)):
            continue
        if isinstance(value, Mapping):
            kept[key] = without_unused(given[key], value, capability, f"{path}{key}.")
        elif given[key] == value:
            del kept[key]
        else:
            raise _needs(f"{path}{key}", given[key], capability, "leave the key out")
    return {key: value for key, value in kept.items() if value != {}}


def _completed(section: SectionT, path: str, elsewhere: Callable[[], Iterable[str]]) -> SectionT:
    """The section with the defaults of all its components written out, at any depth."""
    updates: dict[str, Any] = {}
    for key in type(section).model_fields:
        match getattr(section, key):
            case Part() as part:
                updates[key] = part.completed(path + key, elsewhere=elsewhere)
            case Section() as inner:
                updates[key] = _completed(inner, f"{path}{key}.", elsewhere)
    return section.model_copy(update=updates)


def from_toml(text: str) -> ExperimentConfig:
    """Read a configuration from TOML text, such as a stored run's; see [Note: former keys]."""
    return from_dict(former_names.current_tree(parse_toml(text, source="the configuration"), warns=False))


def load(path: Path | None = None, overrides: Iterable[str] = ()) -> ExperimentConfig:
    """The default experiment, changed by a file and then by `key=value` overrides."""
    return from_dict(read_tree(ExperimentConfig, path, overrides))


def read_tree(table: type[Section], path: Path | None, overrides: Iterable[str]) -> dict[str, Any]:
    """The tree in a file, changed by `key=value` overrides; not validated yet.

    Raises:
        ConfigError: the file cannot be read, or an override is malformed.
    """
    data: dict[str, Any] = {}
    if path is not None:
        if naming.reader_of(str(path)):
            raise ConfigError(
                f"{path} was given, where a configuration (TOML) is expected; if it holds data, use "
                f"{_reading(str(path))} in its place."
            )
        try:
            text = read_marked(path)
        except OSError as error:
            raise ConfigError(f"the configuration {path} cannot be read: {error.strerror}.") from error
        except UnicodeError as error:
            raise ConfigError(f"the configuration {path} is not UTF-8 text ({error}); save it as UTF-8.") from error
        data = dict(former_names.current_tree(parse_toml(text, source=str(path))))
    assign_all(table, data, map(parse_override, overrides))
    return data


def parse_toml(text: str, *, source: str) -> dict[str, Any]:
    """TOML text as a dictionary; a syntax error becomes a ConfigError that names `source`."""
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{source} is not valid TOML: {error}.") from error


def _paths(table: type[Section], data: Mapping[str, Any]) -> Iterator[str]:
    """Paths of all keys, including the settings of the components that `data` names."""
    yield from table.model_fields
    for path, inner in tables(table):
        keys = [*inner.model_fields]
        if issubclass(inner, Part):
            with suppress(ConfigError):  # an unknown component is reported separately
                keys += plugins.names_of(inner.kind, _name_at(data, path) or inner.model_fields["name"].default)
        yield from (f"{path}.{key}" for key in keys)


def _name_at(data: Any, path: str) -> str:
    for key in (*path.split("."), "name"):
        data = data.get(key) if isinstance(data, Mapping) else None
    return str(data or "")


def _leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """All values that are no tables, with their paths."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield above + key, value


def _check_names(config: ExperimentConfig) -> None:
    for kind, names in (("task", [config.task]), ("metric", config.metrics), ("callback", config.callbacks)):
        for name in names:
            plugins.check(kind, name)
    columns = [name.rpartition(":")[2] for name in config.metrics]
    for name, column in zip(config.metrics, columns, strict=True):
        if column in _COLUMNS or column.startswith("validation_"):
            raise ConfigError(
                f"metric '{name}' would be written as '{column}', which a line of a run holds already; "
                "give the function another name."
            )
        if columns.count(column) > 1:
            raise ConfigError(
                f"metrics={list(config.metrics)} holds '{column}' {columns.count(column)} times; name every metric "
                "once, and give functions of different modules different names."
            )


# Rules that read more than one table.
RULES: tuple[Rule[ExperimentConfig], ...] = (
    Rule(
        lambda config: config.client.label_smoothing and "label_smoothing" not in plugins.names_of("task", config.task),
        "client.label_smoothing={client.label_smoothing} was given with task={task}, which has no labels to smooth",
        "set it to 0",
    ),
    Rule(
        lambda config: config.client.temperature != 1 and "temperature" not in plugins.names_of("task", config.task),
        "client.temperature={client.temperature} was given with task={task}, which has no softmax over classes",
        "set it to 1",
    ),
    Rule(
        lambda config: config.server.cohort_size > config.partition.num_clients,
        "server.cohort_size={server.cohort_size} exceeds the {partition.num_clients} clients of partition.num_clients",
        "lower the one or raise the other",
    ),
    Rule(
        lambda config: config.server.evaluate_clients > config.partition.num_clients,
        "server.evaluate_clients={server.evaluate_clients} exceeds the {partition.num_clients} clients of "
        "partition.num_clients",
        "lower it, or set it to 0 for all",
    ),
    Rule(
        lambda config: (
            config.server.evaluation == "clients" and not PartitionTraits.of(config.partition.name).client_data
        ),
        "server.evaluation=clients was given with partition.name={partition.name}, whose clients have no test "
        "samples of their own",
        "use a partition whose clients hold data, or server.evaluation=server",
    ),
)
