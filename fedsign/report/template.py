"""Templates into text: pages that stand alone in one file, and pictures that do."""

from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def render(template: str, /, *, package: str = __package__, **values: Any) -> str:
    """A template of a package, filled, which may take in those of this one: text is escaped, and a name that is not given is an error."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(each, package_path="") for each in (package, __package__)]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template(template).render(**values)
    # a client's message may hold halves of characters, which no file can
    return text.encode("utf-8", "replace").decode("utf-8")


def standalone(picture: Markup) -> str:
    """An <svg> of a page as a file of its own, with its colours for light and dark."""
    start, rest = picture.split(">", 1)
    return f"{start}>{render('standalone.html.jinja')}{rest}"
