"""Templates into text: pages that stand alone in one file, and the cards of notebooks."""

from functools import cache
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from fedsign.report import plots


def render(template: str, /, *, package: str = __package__, beside: str = __package__, **values: Any) -> str:
    """A template of a package, filled: text is escaped, and a name that is not given is an error.

    It may take in the templates of this package and of one `beside` it.
    """
    text = _environment(package, beside).get_template(template).render(**values)
    # a client's message may hold halves of characters, which no file can
    return text.encode("utf-8", "replace").decode("utf-8")


@cache
def _environment(package: str, beside: str) -> Environment:
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(each, package_path="") for each in (package, beside, __package__)]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (plots.data, plots.legend, plots.paths, plots.rows, plots.ticks)
    environment.filters |= {each.__name__: each for each in filters}
    environment.globals |= {"scripts": plots.scripts, "script_hash": plots.script_hash}
    return environment
