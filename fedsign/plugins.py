"""Settings of named parts: what a factory's signature accepts is what the configuration accepts.

`complete` checks the given settings against the signature (names, types, bounds written as
`Annotated[float, Field(gt=0)]`) and adds the defaults, so that a configuration printed back says
everything.  `build` calls the factory.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from fedsign.errors import ConfigError
from fedsign.registry import KINDS, nearest, resolve

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def settings_model(kind: str, factory: Callable[..., Any]) -> type[BaseModel]:
    """A pydantic model of a factory's settings: every parameter after the given ones."""
    target = factory.__init__ if inspect.isclass(factory) else factory
    hints = get_type_hints(target, include_extras=True)
    parameters = list(inspect.signature(factory).parameters.values())[KINDS[kind].num_given :]
    fields: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.kind in _VARIADIC:
            continue
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        fields[parameter.name] = (hints.get(parameter.name, Any), default)
    return create_model(
        "Settings",
        __config__=ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, validate_default=True),
        **fields,
    )


def complete(
    kind: str, name: str, settings: Mapping[str, Any], *, section: str, fixed: Iterable[str] = ()
) -> dict[str, Any]:
    """The settings with defaults filled in, ready for TOML (None, which TOML lacks, is left out).

    `fixed` are the section's other keys, named where a key is misspelt.

    Raises:
        ConfigError: an unknown key, a missing one, or a value of the wrong kind.
    """
    model = settings_model(kind, resolve(kind, name))
    try:
        checked = model.model_validate(dict(settings))
    except ValidationError as error:
        raise ConfigError(sentence(error, section=section, known=[*fixed, *model.model_fields])) from error
    values = {key: getattr(checked, key) for key in model.model_fields}
    return {key: _plain(value) for key, value in values.items() if _is_plain(value)}


def build(kind: str, name: str, settings: Mapping[str, Any], *given: Any) -> Any:
    """Call the factory behind `name` with what the program gives and the user's settings."""
    return resolve(kind, name)(*given, **settings)


def sentence(error: ValidationError, *, section: str, known: list[str]) -> str:
    """The first problem of a validation as one sentence with the remedy."""
    first = error.errors()[0]
    path = ".".join([*([section] if section else []), *(str(part) for part in first["loc"])])
    others = f" ({error.error_count() - 1} more)" if error.error_count() > 1 else ""
    match first["type"]:
        case "extra_forbidden":
            hint = nearest(str(first["loc"][-1]), known) or f" Known here: {', '.join(known)}."
            return f"unknown key '{path}'.{hint}{others}"
        case "missing":
            return f"'{path}' has no default and was not given; set it in the file or with --set {path}=VALUE.{others}"
        case _:
            expected = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
            return (
                f"{path}={first['input']!r} was given, but expected is {expected}; "
                f"correct it in the file or with --set {path}=VALUE.{others}"
            )


def _is_plain(value: Any) -> bool:
    return value is not None and not callable(value)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


__all__ = ["Field", "build", "complete", "sentence", "settings_model"]
