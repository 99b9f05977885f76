"""Hooks of mkdocs.yml: the pages that the site adds to docs/.

The navigation follows docs/README.md: its headings, and the links below them.  The home page is the repository's
README; other linked files outside docs/ become pages, too.  The reference of commands is generated from the command
line, those of the Python API and of components from the code.  Formulas become MathML, which browsers render without
scripts.
"""

import posixpath
import re
from collections.abc import Iterable, Iterator
from html import unescape
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from benchmarks import settings

ROOT = Path(__file__).parents[1]
INDEX = ROOT / "docs" / "README.md"
OUTSIDE = {  # file of the repository -> page of the site
    "README.md": "index.md",
    "docs/README.md": "all-pages.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    **{
        f"benchmarks{part}/README.md": f"benchmarks{part.replace('/', '-')}-how.md"
        for part in ("", "/ablations", "/tuned", "/valleys")
    },
}
REFERENCE = {
    "Python API": "api",
    "Extension points": "extension-points",
    "Settings and components": "settings",
    "Commands": "commands",
}
BASES = (  # base classes and interfaces of user-defined components
    "strategies.base.Strategy",
    "fedsign.objectives.base.Objective",
    "fedsign.tasks.base.Task",
    "fedsign.data.partition.base.Split",
    "simulations.callbacks.base.Callback",
)
_LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Take the navigation from the index."""
    config.nav = [{"Home": "index.md"}, *_navigation()]
    return config


def _navigation() -> list[dict[str, Any]]:
    """Return a section per heading, with a subsection per subheading."""
    sections: list[dict[str, Any]] = []
    at: list[Any] = []
    for line in INDEX.read_text(encoding="utf-8").splitlines():
        if heading := re.match(r"(##+) ([^:]+)", line):
            section: list[Any] = []
            (at if len(heading[1]) > 2 else sections).append({heading[2].strip(): section})
            at = section
        elif line.startswith("- "):
            at += [
                {title[0].upper() + title[1:]: _page(posixpath.normpath(f"docs/{link}"))}
                for title, link in _links(line)
            ]
    reference = next(entries for each in sections for name, entries in each.items() if name == "Reference")
    reference[:0] = [{title: f"reference/{name}.md"} for title, name in REFERENCE.items()]
    reference.append({"All pages": OUTSIDE["docs/README.md"]})
    reference.append({"How the figures are made": [page for name, page in OUTSIDE.items() if name.startswith("bench")]})
    return sections


def _links(line: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = re.findall(r"\[([^]]+)\]\(([^)]+)\)", line)
    return found


def _page(file: str) -> str:
    """Return the page of a file of the repository."""
    return OUTSIDE.get(file, file.removeprefix("docs/"))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that docs/ lacks."""
    if (index := files.get_file_from_path("README.md")) is not None:  # published under another name
        files.remove(index)
    for name, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    written = {
        "api": _api(),
        "extension-points": _extension_points(),
        "settings": settings.page(),
        "commands": _commands(),
    }
    for name, text in written.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def _api() -> str:
    from fedsign.extensions import python_api

    names = [*python_api(), *(f"analyze.{name}" for name in python_api("fedsign.analyze"))]
    return "\n".join(
        ["# Python API", "", "`import fedsign` imports neither torch nor Flower.", *_documented("fedsign", names)]
    )


def _documented(module: str, names: Iterable[str]) -> Iterator[str]:
    for name in names:
        yield f"\n::: {module}.{name}\n    options: {{heading_level: 2}}\n"


def _extension_points() -> str:
    bases = [base.rpartition(".") for base in BASES]
    return "\n".join(
        ["# Extension points", *(line for module, _, name in bases for line in _documented(module, [name]))]
    )


def _commands() -> str:
    import typer
    from typer.cli import get_docs_for_click

    from simulations.cli import app

    command = typer.main.get_command(app)
    for each in _with_subcommands(command):
        each.short_help = (each.help or "").partition("\n\n")[0]  # the whole first paragraph, not cut off
    context: Any = command.make_context("fedsign", [], resilient_parsing=True)
    return str(get_docs_for_click(obj=command, ctx=context, name="fedsign", title="Commands"))


def _with_subcommands(command: Any) -> Iterator[Any]:
    yield command
    for each in getattr(command, "commands", {}).values():
        yield from _with_subcommands(each)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Redirect links to files of the repository to their pages."""
    here = next((name for name, own in OUTSIDE.items() if own == page.file.src_uri), f"docs/{page.file.src_uri}")

    def led(link: re.Match[str]) -> str:
        if "://" in link[2]:
            return link[0]
        target = _page(posixpath.normpath(posixpath.join(posixpath.dirname(here), link[2])))
        return f"{link[1]}{posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or '.')}{link[3]}"

    return _LINK.sub(led, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Render formulas."""
    html = re.sub(
        r'<div class="arithmatex">\\\[(.*?)\\\]</div>', lambda tex: _formula(tex[1], "block"), html, flags=re.S
    )
    return re.sub(
        r'<span class="arithmatex">\\\((.*?)\\\)</span>', lambda tex: _formula(tex[1], "inline"), html, flags=re.S
    )


def _formula(tex: str, display: str) -> str:
    return str(convert(unescape(tex), display=display))
