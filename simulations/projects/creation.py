"""Makes a project's folder from the templates of this package."""

import importlib.util
import keyword
import re
import sys
from pathlib import Path

import tomli_w
from jinja2 import Environment, PackageLoader, StrictUndefined

from fedsign.errors import ConfigError
from fedsign.storage.disk import replaced_folder, write_text

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,31}")  # what Flower takes for the name of an app
_SUFFIX = ".jinja"


def create(path: Path) -> Path:
    """Make a project in a new folder, whose name is the project's; return the folder.

    Raises:
        ConfigError: the name is no name of a project, or there is such a folder.
        ResultsError: the folder cannot be written.
    """
    path = path.expanduser()
    name = _checked_name(path)
    package = name.replace("-", "_").lower()
    _check_package(package)
    values = {"name": name, "package": package, "results": _toml_string(str(path.absolute() / "runs"))}
    environment = Environment(
        loader=PackageLoader("simulations.projects", "templates"),
        undefined=StrictUndefined,  # a misspelled variable must not become an empty text
        keep_trailing_newline=True,
        trim_blocks=True,
    )
    with replaced_folder(path) as folder:  # a command that is stopped leaves no part of a project
        for template in environment.list_templates(extensions=["jinja"]):
            file = folder / template.removesuffix(_SUFFIX).replace("PACKAGE", package).replace("DOT", ".")
            write_text(file, environment.get_template(template).render(values))
    return path


def _checked_name(path: Path) -> str:
    name = path.name
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"'{name or path}' was given, but expected the name of a project: letters, digits, and hyphens, a letter "
            "first, 32 characters at most, such as my-project."
        )
    if path.exists() or path.is_symlink():
        raise ConfigError(f"{path} exists already; give another name, or move it away.")
    return name


def _check_package(package: str) -> None:
    """Raise ConfigError if Python would import something else, or nothing, by this name."""
    is_taken = package in sys.stdlib_module_names or importlib.util.find_spec(package) is not None
    if keyword.iskeyword(package) or is_taken:
        raise ConfigError(
            f"the project's package would be '{package}', but Python knows that as "
            f"{'a module' if is_taken else 'a keyword'}; give another name, such as my-{package.replace('_', '-')}."
        )


def _toml_string(text: str) -> str:
    return tomli_w.dumps({"x": text}).removeprefix("x = ").rstrip("\n")
