"""A split drawn before anything was trained: a picture (SVG) or a page (HTML), each one file that loads nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedsign.errors import ConfigError
from fedsign.report.population import MAX_COLUMNS, Population, draw_population, population_content
from fedsign.report.svg import number, tag
from fedsign.report.template import render, standalone
from fedsign.storage.disk import write_text

SUFFIXES = (".svg", ".html")
_WIDTH, _NARROW = 960, 340
_WIDE_COLUMNS = 160  # of 5 units at least
_MARGIN, _LINE, _TITLE = 28.0, 19.0, 24.0  # around the picture; heights of a line of text and of the title


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitPicture:
    """What is shown: a title, the clients, and a few facts as (name, value, remark)."""

    title: str
    clients: Population
    facts: Sequence[tuple[str, str, str]]
    environment: Mapping[str, str]

    def population(self, max_columns: int) -> Population:
        """The drawing's view of the clients."""
        return replace(self.clients, max_columns=max_columns)


def check_path(path: Path) -> None:
    """Raise ConfigError unless the name says which kind of picture is wanted."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--out {path} was given; expected is a name that ends in {' or '.join(SUFFIXES)}.")


def write_split(picture: SplitPicture, path: Path) -> None:
    """Draw a split into a file.

    Raises:
        ConfigError: its name ends neither in .svg nor in .html.
        ResultsError: it cannot be written.
    """
    check_path(path)
    write_text(path, svg(picture) if path.suffix.lower() == ".svg" else html(picture))


def svg(picture: SplitPicture) -> str:
    """The picture with its title, its facts and its style sheet in it."""
    population = picture.population(_WIDE_COLUMNS)
    drawing, height = population_content(population, width=_WIDTH)
    lines = [
        population.size_sentence(),
        *(f"{name}: {value} ({remark})" if remark else f"{name}: {value}" for name, value, remark in picture.facts),
        population.caption(),
    ]
    head = _TITLE + _LINE * (len(lines) + 1)
    texts = [tag("text", picture.title, x=0.0, y=16.0, class_="panel", style="font-size: 19px")]
    texts += [tag("text", line, x=0.0, y=_TITLE + _LINE * (index + 1)) for index, line in enumerate(lines)]
    width, full_height = _WIDTH + 2 * _MARGIN, head + height + 2 * _MARGIN
    return standalone(
        tag(
            "svg",
            *texts,
            tag("g", drawing, transform=f"translate(0 {number(head)})"),
            xmlns="http://www.w3.org/2000/svg",
            viewBox=" ".join(map(number, (-_MARGIN, -_MARGIN, width, full_height))),
            class_="picture wide",
            style=f"max-width: {number(width)}px",
            role="img",
            aria_label=f"{picture.title}. {population.size_sentence()}",
        )
    )


def html(picture: SplitPicture) -> str:
    """A page with the picture for wide and for narrow windows."""
    views = [(_WIDTH, picture.population(_WIDE_COLUMNS)), (_NARROW, picture.population(MAX_COLUMNS))]
    return render(
        "split.html.jinja",
        title=picture.title,
        sizes=views[0][1].size_sentence(),
        facts=picture.facts,
        views=[
            {"svg": draw_population(clients, width=width), "caption": clients.caption(), "class": kind}
            for (width, clients), kind in zip(views, ("wide", "narrow"), strict=True)
        ],
        environment=picture.environment,
    )
