"""A split drawn before anything was trained: a picture, or a page that loads nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from textwrap import fill

from fedsign.report import figures
from fedsign.report.population import Population, draw_clients, panels
from fedsign.report.template import render
from fedsign.storage.disk import write_text

MAX_COLUMNS = 160
_LINE = 120  # characters above the picture


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitPicture:
    """What is shown: a title, the clients, and a few facts as (name, value, remark)."""

    title: str
    clients: Population
    facts: Sequence[tuple[str, str, str]]
    environment: Mapping[str, str]


def write_split(picture: SplitPicture, path: Path) -> None:
    """Draw a split into a file.

    Raises:
        ConfigError: its name says no kind of picture.
        ResultsError: it cannot be written.
    """
    figures.check_name(path, ".html")
    if path.suffix.lower() == ".html":
        write_text(path, html(picture))
        return
    clients = replace(picture.clients, max_columns=MAX_COLUMNS)
    facts = [f"{name}: {value} ({remark})" if remark else f"{name}: {value}" for name, value, remark in picture.facts]
    lines = [picture.title, clients.size_sentence(), *facts, clients.caption()]
    title = "\n".join(fill(line, _LINE) for line in lines)
    figures.write(partial(draw_clients, clients, title=title), path)


def html(picture: SplitPicture) -> str:
    """A page with the picture."""
    clients = replace(picture.clients, max_columns=MAX_COLUMNS)
    return render(
        "split.html.jinja",
        title=picture.title,
        sizes=clients.size_sentence(),
        facts=picture.facts,
        clients=clients,
        panels=panels(clients),
        caption=clients.caption(),
        environment=picture.environment,
    )
