"""Render templates: self-contained pages, and cards for notebooks."""

from functools import cache
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from fedsign.report import plots


def render(template: str, /, *, package: str = __package__, extra_package: str = __package__, **values: Any) -> str:
    """Render a template of a package, with text escaped; an undefined name is an error.

    The template may include templates of this package and of the package `extra_package`.
    """
    text = _environment(package, extra_package).get_template(template).render(**values)
    # a client's message may contain lone surrogates, which cannot be encoded
    return text.encode("utf-8", "replace").decode("utf-8")


@cache
def _environment(package: str, extra_package: str) -> Environment:
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(each, package_path="") for each in (package, extra_package, __package__)]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (plots.data, plots.legend, plots.paths, plots.rows, plots.ticks)
    environment.filters |= {each.__name__: each for each in filters}
    environment.globals |= {"scripts": plots.scripts, "script_hash": plots.script_hash}
    return environment
