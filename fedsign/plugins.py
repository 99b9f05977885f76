"""Settings of components: a configuration accepts exactly what the signature of a factory accepts.

`complete` checks given settings against the signature (names, types, and bounds written as
`Annotated[float, Field(gt=0)]`) and adds the defaults, so a configuration written back is complete.  `build` calls
the factory with the checked values.  `sentence` words a validation error.
"""

import difflib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Annotated, Any, Literal, Optional, get_args, get_origin, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError, PydanticSerializationError, to_jsonable_python

from fedsign.errors import ConfigError, FedSignError, UnknownKeysError
from fedsign.registry import KINDS, error_in, resolve

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_PREFIX = "setting_"  # pydantic reserves field names such as `copy` and `_x`; parameters may have them
_SHOWN_CHARACTERS = 80

# Names of our keys in other libraries, for "Did you mean".
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "alpha": ("concentration", "dirichlet_alpha"),
    "batch_size": ("batch", "minibatch_size"),
    "cohort_size": ("clients_per_round", "fraction_fit", "fraction_train", "sampled_clients", "min_fit_clients"),
    "data": ("dataset",),
    "engine": ("backend", "runtime"),
    "hidden": ("layers", "hidden_layers", "hidden_sizes", "units", "widths"),
    "local_epochs": ("epochs", "num_epochs"),
    "lr": ("learning_rate", "local_lr", "client_lr", "step_size"),
    "mu": ("proximal_mu",),
    "name": ("type", "kind"),
    "num_clients": ("clients", "num_partitions", "num_supernodes", "population"),
    "partition": ("partitioner", "split"),
    "root": ("folder", "directory", "output_dir"),
    "round_timeout_s": ("timeout",),
    "rounds": ("num_rounds", "num_server_rounds"),
    "seed": ("random_seed", "random_state"),
    "strategy": ("algorithm", "aggregator"),
    "threads": ("num_threads", "num_cpus"),
    "weight_decay": ("decay", "l2"),
    "workers": ("num_workers", "processes", "num_processes", "jobs", "n_jobs"),
}


def refuse_bool(value: Any) -> Any:
    """Refuse `true` as a number: Python's bool is an int, TOML's is not."""
    if isinstance(value, bool) or (isinstance(value, list | tuple) and any(isinstance(item, bool) for item in value)):
        raise PydanticCustomError("bool_is_no_number", "a number, not true or false")
    return value


@lru_cache(maxsize=256)  # an objective and an optimizer are built per client and round
def settings_model(kind: str, name: str, factory: Callable[..., Any]) -> type[BaseModel]:
    """A pydantic model of a factory's settings: all parameters after the given ones, aliased to their own names.

    Raises:
        ConfigError: the signature cannot be read, or a type is not supported.
    """
    try:
        hints = get_type_hints(factory.__init__ if inspect.isclass(factory) else factory, include_extras=True)
        parameters = inspect.signature(factory).parameters.values()
        fields: dict[str, Any] = {
            _PREFIX + each.name: _field(each, hints) for each in _settings(kind, name, [*parameters])
        }
        takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
        config = ConfigDict(
            extra="allow" if takes_any else "forbid",
            frozen=True,
            arbitrary_types_allowed=True,
            validate_default=True,
            allow_inf_nan=False,
        )
        return create_model(f"Settings of {kind} '{name}'", __config__=config, **fields)
    except FedSignError:
        raise
    except Exception as error:
        raise error_in(kind, name, error, factory) from error


def names_of(kind: str, name: str) -> list[str]:
    """The names of a component's settings."""
    return [*_fields(settings_model(kind, name, resolve(kind, name)))]


def defaults_of(kind: str, name: str) -> dict[str, Any]:
    """The defaults of a component's settings, as TOML stores them."""
    fields = _fields(settings_model(kind, name, resolve(kind, name)))
    return {key: _as_toml(field.default) for key, field in fields.items() if not field.is_required()}


def complete(
    kind: str,
    name: str,
    settings: Mapping[str, Any],
    *,
    section: str,
    fixed: Iterable[str] = (),
    elsewhere: Callable[[], Iterable[str]] = lambda: (),
) -> dict[str, Any]:
    """The settings with defaults filled in, ready for TOML (which drops defaults such as None).

    `fixed` names the other keys of the section; `elsewhere` returns the paths of the whole tree, for "Did you mean".

    Raises:
        ConfigError: a key is unknown or missing, or a value is invalid.
    """
    for clash in {*fixed} & {*names_of(kind, name)}:
        raise ConfigError(
            f"{kind} '{name}' has a parameter '{clash}', but '{clash}' is a key of every table [{section}]; "
            "rename the parameter."
        )
    _, values = _checked(kind, name, settings, section=section, fixed=fixed, elsewhere=elsewhere)
    stored = {key: _as_toml(value) for key, value in values.items()}
    for key, value in settings.items():
        if value is not None and stored[key] is None:
            raise ConfigError(f"{section}.{key}={shown(value)} cannot be written in TOML; give a value that can.")
    return {key: value for key, value in stored.items() if value is not None}


def check(kind: str, name: str) -> None:
    """Check a component that is given by name alone, and so takes no settings.

    Raises:
        ConfigError: the name is unknown, or a parameter has no default.
    """
    model = settings_model(kind, name, resolve(kind, name))
    for key, field in _fields(model).items():
        if field.is_required():
            raise ConfigError(
                f"{kind} '{name}' has a parameter '{key}' without a default, but a {kind} takes no settings; "
                "give the parameter a default."
            )


def build(kind: str, name: str, settings: Mapping[str, Any], *given: Any) -> Any:
    """Call the factory behind `name` with the program's arguments and the validated settings.

    Raises:
        ConfigError: a setting is invalid, or the factory raised.
    """
    return bound(kind, name, settings)(*given)


def bound(kind: str, name: str, settings: Mapping[str, Any]) -> Callable[..., Any]:
    """The factory behind `name` with its settings bound; called with the program's arguments.

    Raises:
        ConfigError: a setting is invalid.  A call raises it for any foreign exception of the factory.
    """
    factory, values = _checked(kind, name, settings, section=kind)

    def call(*given: Any) -> Any:
        try:
            return factory(*given, **values)
        except FedSignError:
            raise
        except Exception as error:
            raise error_in(kind, name, error, factory) from error

    return call


def _checked(
    kind: str, name: str, settings: Mapping[str, Any], **where: Any
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A factory and its validated settings by parameter name; `where` goes to `config_error`."""
    factory = resolve(kind, name)
    model = settings_model(kind, name, factory)
    try:
        checked = model.model_validate(dict(settings))
    except ValidationError as error:
        others = partial(_of_others, kind, name, where["section"])
        raise config_error(error, model, given=settings, others=others, **where) from None
    except Exception as error:  # a bound that does not fit its type, or a custom validator
        raise error_in(kind, name, error, factory) from error
    named = zip(_fields(model), model.model_fields, strict=True)
    return factory, {key: getattr(checked, field) for key, field in named} | (checked.model_extra or {})


def _of_others(kind: str, name: str, section: str, key: str) -> str:
    """A hint where other components of the kind have a setting that this one lacks."""
    having: list[str] = []
    for other in KINDS[kind].table if not any(key in words for words in SYNONYMS.values()) else ():
        with suppress(FedSignError):  # what it imports is not installed
            having += [other] if key in names_of(kind, other) else []
    named = " or ".join(filter(None, (", ".join(having[:-1]), *having[-1:])))
    return f" It needs {section}.name={named}; {section}.name is {name}." if having else ""


def config_error(
    error: ValidationError,
    model: type[BaseModel],
    *,
    given: Mapping[str, Any],
    section: str,
    fixed: Iterable[str] = (),
    elsewhere: Callable[[], Iterable[str]] = lambda: (),
    others: Callable[[str], str] = lambda key: "",
) -> ConfigError:
    """All unknown keys; without any, the first problem of a validation, with its remedy."""
    problems = error.errors(include_url=False)
    hints = {}
    for problem in problems:
        if problem["type"] == "extra_forbidden":
            table = _table_at(model, problem["loc"][:-1])
            known = [*fixed, *_fields(table)] if table else []
            path, key = _path(problem, given), str(problem["loc"][-1])
            hint = (others(key) if path == key else "") or suggest(key, known, elsewhere())
            hints[f"{section}.{path}" if section else path] = hint or f" Known here: {', '.join(known) or 'none'}."
    return UnknownKeysError(hints) if hints else ConfigError(_sentence(problems, model, given, section))


def _sentence(problems: Sequence[ErrorDetails], model: type[BaseModel], given: Mapping[str, Any], section: str) -> str:
    """The first problem, with its remedy."""
    first = problems[0]
    others = len({_path(problem, given) for problem in problems}) - 1
    more = f" ({others} more)" if others else ""
    path = f"{section}.{_path(first, given)}" if section else _path(first, given)
    settable = path.partition("[")[0]
    table = _table_at(model, first["loc"][:-1])
    match first["type"]:
        case "missing" if isinstance(first["loc"][-1], str):
            return f"'{path}' has no default and was not given; set it in the file or with --set {path}=VALUE.{more}"
        case "part_expected":
            name = first["input"] if isinstance(first["input"], str) else "NAME"
            return (
                f"{path}={shown(first['input'])} was given, but expected a table with a name; "
                f"say --set {path}.name={name}.{more}"
            )
        case "model_type" | "model_attributes_type":
            keys = [*_fields(_table_at(model, first["loc"]) or table or model)]
            return (
                f"{path}={shown(first['input'])} was given, but expected a table with the keys {', '.join(keys)}; "
                f"set one of them, such as --set {path}.{keys[0]}=VALUE.{more}"
            )
    field = _fields(table).get(str(first["loc"][-1])) if table and first["loc"] else None
    default = None if field is None or field.is_required() else field.default
    same = [problem for problem in problems if _path(problem, given) == _path(first, given)]
    example = _example(first["input"], default, _leaves(field.annotation) if field else set())
    expected = " or ".join(dict.fromkeys(_expected(problem, example) for problem in same))
    if first["loc"] and first["loc"][0] not in given:
        return f"the default {path}={shown(first['input'])} does not fit its own type: expected {expected}.{more}"
    return (
        f"{path}={shown(first['input'])} was given, but expected {expected}; "
        f"correct it in the file or with {_remedy(settable, first, example)}.{more}"
    )


def suggest(given: str, known: Iterable[str], elsewhere: Iterable[str] = ()) -> str:
    """` Did you mean 'x'?`: the closest key or synonym of this table, or a much closer one of another table.

    >>> suggest("learning_rte", ["lr", "local_epochs"]), suggest("lr", ["seed"], ["client.lr"])
    (" Did you mean 'lr'?", " Did you mean 'client.lr'?")
    """
    scored = [(_likeness(given, key), key) for key in known]
    scored += [(_likeness(given, path.rpartition(".")[2]) - 0.2, path) for path in elsewhere]
    score, best = max(scored, key=lambda pair: pair[0], default=(0.0, ""))
    return f" Did you mean '{best}'?" if score >= 0.6 else ""


def _likeness(given: str, key: str) -> float:
    word = given.lower().replace("-", "_")
    return max(difflib.SequenceMatcher(None, word, other).ratio() for other in (key, *SYNONYMS.get(key, ())))


def _settings(kind: str, name: str, parameters: list[inspect.Parameter]) -> list[inspect.Parameter]:
    """The parameters that are settings: all but the leading `num_given`."""
    num_given = KINDS[kind].num_given
    given = [each for each in parameters if each.kind in _BY_POSITION][:num_given]
    if len(given) < num_given and all(each.kind is not inspect.Parameter.VAR_POSITIONAL for each in parameters):
        raise ConfigError(
            f"{kind} '{name}' takes {len(given)} arguments by position, but the program gives a {kind} {num_given}; "
            f"compare it with {next(iter(KINDS[kind].table.values()))[0]}."
        )
    settings = [each for each in parameters if each not in given and each.kind not in _VARIADIC]
    nameless = [each for each in settings if each.kind is inspect.Parameter.POSITIONAL_ONLY]
    for each in nameless:
        if each.default is inspect.Parameter.empty:
            raise ConfigError(f"{kind} '{name}' takes '{each.name}' by position only; let it be given by its name.")
    return [each for each in settings if each not in nameless]


def _field(parameter: inspect.Parameter, hints: Mapping[str, Any]) -> tuple[Any, Any]:
    """A parameter's type and default in the form of `create_model`."""
    hint: Any = hints.get(parameter.name, Any)
    if parameter.default is None:
        hint = Optional[hint]  # noqa: UP045 - `|` fails on hints that are strings
    leaves = _leaves(hint)
    # pydantic would take `true` for 1
    if leaves & {int, float} and not leaves & {bool, Any, object}:
        hint = Annotated[hint, BeforeValidator(refuse_bool)]
    default = ... if parameter.default is inspect.Parameter.empty else parameter.default
    return Annotated[hint, Field(alias=parameter.name)], default


def _leaves(hint: Any) -> set[Any]:
    """All types in a hint, without containers and constraints."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _leaves(inner[0])
    if origin is Literal:
        return {type(value) for value in inner}
    if inner:
        return set[Any]().union(
            *(_leaves(each) for each in inner if each is not Ellipsis and not isinstance(each, list))
        )
    return {hint} if isinstance(hint, type) or hint is Any else set()


def _fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of a table by the keys that a configuration uses."""
    return {field.alias or key: field for key, field in model.model_fields.items()}


def _as_toml(value: Any) -> Any:
    """A value as TOML stores it; None if TOML cannot."""
    try:
        plain = to_jsonable_python(value)
    except PydanticSerializationError:
        return None
    return plain if _is_toml(plain) else None


def _is_toml(value: Any) -> bool:
    match value:
        case bool() | str() | float():
            return True
        case int():
            return -(2**63) <= value < 2**63
        case list():
            return all(_is_toml(item) for item in value)
        case dict():
            return all(isinstance(key, str) and _is_toml(item) for key, item in value.items())
        case _:
            return False


def _path(problem: ErrorDetails, given: Any) -> str:
    """The path to a problem, such as `model.hidden[0]`, without pydantic's names of union members."""
    path = ""
    for step in problem["loc"]:
        if isinstance(given, Mapping) and step in given:
            given = given[str(step)]
        elif isinstance(given, list | tuple) and isinstance(step, int) and step < len(given):
            given = given[step]
        elif path and (problem["type"] != "missing" or isinstance(step, int)):
            break
        elif not path:
            step = str(step).removeprefix(_PREFIX)  # errors in defaults use the field name, not the alias
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path


def _table_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> type[BaseModel] | None:
    """The table at a path; None if the path leads to a value."""
    for step in loc:
        field = _fields(model).get(str(step))
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return None
        model = field.annotation
    return model


def _expected(problem: ErrorDetails, example: str) -> str:
    """Pydantic's description of the expected value, in plain words."""
    message, kind = problem["msg"], problem["type"]
    context = problem.get("ctx", {})
    match kind:
        case "int_parsing" | "int_type" | "int_from_float" | "int_parsing_size":
            return "an integer"
        case "float_parsing" | "float_type":
            return "a number"
        case "bool_parsing" | "bool_type":
            return "true or false"
        case "string_type":
            return "a text in quotes"
        case "missing" | "tuple_type" | "list_type" | "set_type" | "frozen_set_type":
            return f"a list such as {example}"
        case "dict_type" | "mapping_type" | "dataclass_type":
            return "a table, such as { key = 'value' }"
        case "string_pattern_mismatch":
            return f"a text that the pattern {context.get('pattern')} matches"
        case "too_short" | "too_long" | "string_too_short" | "string_too_long":
            return message.partition(" should have ")[2].partition(" after validation")[0]
    for start in ("Input should be ", "Value error, ", "Assertion failed, "):
        message = message.removeprefix(start)
    return message.replace("a valid ", "a ")


def _remedy(settable: str, problem: ErrorDetails, example: str) -> str:
    """The command-line option to type; lists are quoted against the shell."""
    if problem["type"] in ("tuple_type", "list_type"):
        return f"--set '{settable}={example}'"
    return f"--set {settable}=VALUE"


def _example(given: Any, default: Any, types: set[Any]) -> str:
    """How a list is written: with the given words, such as `a,b`, if it is one of texts."""
    words = [word.strip(" '\"") for word in given.strip(" []()").split(",")] if isinstance(given, str) else []
    if any(words) and str in types:
        return json.dumps([*filter(None, words)], ensure_ascii=False)
    plain = _as_toml(default)
    return json.dumps(plain) if isinstance(plain, list) and plain else "[1, 2]"


def shown(value: Any) -> str:
    """A value as error messages show it, truncated."""
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."
