"""What a capability's deletion removes: its row, its modules, everything that imports them, and its documentation.

The row lists only `files`; its page in docs/capabilities and its tests in tests/<name> are found by name.  A test or
benchmark that imports a deleted module is deleted, too; a test that imports it late, or configures the capability, is
marked `needs`.  In Markdown, a line of a list or table is deleted if it links to a deleted page or section, or begins
with the name of a deleted registry row. So are blocks between `<!-- capability: NAME -->` and `<!-- end -->`, and
commands that are gone or name such a row. Any other link to a deleted page becomes its text.  In `fedsign/__init__.py`
and `analyze.py`, lines marked `# capability: NAME` are deleted.
"""

import ast
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.size import modules
from fedsign.capabilities import CAPABILITIES, owners

CHECKED = ("tests", "benchmarks")
_BLOCK = re.compile(r"<!-- capability: (\w+) -->\n(.*?)<!-- end -->\n", flags=re.DOTALL)
_COMMAND = re.compile(r"^fedsign (?:.*\\\n)*.*\n", flags=re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:)([^)#]*)(#[^)]*)?\)")


def closure(*names: str) -> frozenset[str]:
    """Capabilities, and all that cannot do without them."""
    found = {*names}
    while more := {each for each, row in CAPABILITIES.items() if found & row.requires.keys()} - found:
        found |= more
    return frozenset(found)


def groups() -> Iterator[frozenset[str]]:
    """Return all capabilities, then smaller sets: of any two that can be separated, some set has only the first."""
    yield frozenset(CAPABILITIES)
    left = {(gone, kept) for gone in CAPABILITIES for kept in CAPABILITIES.keys() - closure(gone)}
    while left:
        group: frozenset[str] = frozenset()
        for name in CAPABILITIES:
            more = group | closure(name)
            if len(_told_apart(left, more)) > len(_told_apart(left, group)):
                group = more
        left -= _told_apart(left, group)
        yield group


def _told_apart(pairs: Iterable[tuple[str, str]], group: frozenset[str]) -> set[tuple[str, str]]:
    return {(gone, kept) for gone, kept in pairs if gone in group and kept not in group}


def delete(root: Path, names: Iterable[str]) -> list[str]:
    """Delete capabilities from a copy of the repository; return the deleted tests, benchmarks and documents."""
    names = frozenset(names)
    gone = {module for module in modules() if names.intersection(owners(module))}
    for path in {file for module, file in _files(root) if module in gone}:
        path.unlink()
    for folder in (root.joinpath(*module.split(".")) for module in gone):
        shutil.rmtree(folder, ignore_errors=True)  # a package with its templates
    deleted = [path for path in _importers(root, gone) if not path.unlink()]
    for pattern in (
        pattern
        for name in names
        for pattern in (f"docs/capabilities/{name}.md", f"tests/{name}/*.py", *CAPABILITIES[name].files)
    ):
        matching = list(root.glob(pattern))
        if not matching:
            raise FileNotFoundError(f"'{pattern}' of a capability's files matches nothing; correct its row.")
        for path in matching:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            deleted.append(path)
    _edit_pages([*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("benchmarks/*.md")], names)
    for module in ("__init__", "analyze"):
        _delete_types(root / "fedsign" / f"{module}.py", names)
    _delete_faults(root / "tests/mutants/faults.toml", names)
    _delete_from_project(root / "pyproject.toml", names, gone)
    for folder in sorted(root.rglob("*/"), reverse=True):
        if [each.name for each in folder.iterdir()] == ["__init__.py"] and folder.name not in ("tests",):
            shutil.rmtree(folder)
    return sorted(str(path.relative_to(root)) for path in deleted)


def _files(root: Path) -> Iterator[tuple[str, Path]]:
    for package in ("fedsign", "strategies", "clients", "simulations"):
        for path in (root / package).rglob("*.py"):
            yield ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"), path


def _importers(root: Path, gone: set[str]) -> list[Path]:
    """Tests and benchmarks that import what is gone, or a file that is gone for that."""
    left = {
        ".".join(path.relative_to(root).with_suffix("").parts): path
        for folder in CHECKED
        for path in (root / folder).rglob("*.py")
    }
    found: list[Path] = []
    imports = {
        name: imported(path.read_text("utf-8"), late=path.is_relative_to(root / "benchmarks"))
        for name, path in left.items()
    }
    while new := {name for name in left if gone & imports[name]}:
        found += [left.pop(name) for name in new]
        gone = gone | new
    return found


def imported(source: str, *, late: bool) -> set[str]:
    """The modules that a file imports, also in functions if `late`."""
    found: set[str] = set()
    tree = ast.parse(source)
    for node in ast.walk(tree) if late else tree.body:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def _edit_pages(pages: list[Path], names: frozenset[str]) -> None:
    for page in pages:  # all of them first, since other pages link to the headings in them
        _write(page, _BLOCK.sub(lambda block: "" if block[1] in names else block[0], page.read_text("utf-8")))
    for page in pages:
        _write(page, _edited(page, names))


def _write(page: Path, text: str) -> None:
    if text != page.read_text("utf-8"):
        page.write_text(text, "utf-8")


def _edited(page: Path, names: frozenset[str]) -> str:
    """A page without what links to something deleted, and without its commands and registry rows."""
    rows = "|".join(row for name in names for table in CAPABILITIES[name].rows.values() for row in table) or "^"
    commands = "|".join(command for name in names for command in CAPABILITIES[name].commands) or "^"
    tables = "|".join(path for name in names for path in CAPABILITIES[name].sections) or "^"
    text = re.sub(rf"(?m)^\| `({rows})`.*\n", "", page.read_text("utf-8"))
    lines = text.splitlines(keepends=True)
    text = "".join(
        line
        for line in lines
        if not line.lstrip().startswith(("- ", "| ", "* "))
        or not any(_is_dead(page, link) for link in _LINK.finditer(line))
    )
    text = _LINK.sub(lambda link: link[1] if _is_dead(page, link) else link[0], text)
    is_gone = re.compile(rf"""^fedsign ({commands})\b| ({tables})\.name=|[="]({rows})\b""")
    text = _COMMAND.sub(lambda command: "" if is_gone.search(command[0]) else command[0], text)
    return re.sub(r"```bash\n\s*```\n", "", text)


def _is_dead(page: Path, link: re.Match[str]) -> bool:
    """Whether a page that is linked to, or the section in it, is gone."""
    target = page.parent / link[2] if link[2] else page
    return not target.exists() or (bool(link[3]) and target.suffix == ".md" and link[3][1:] not in anchors(target))


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings: lower case, spaces as hyphens, other punctuation dropped."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def _delete_types(path: Path, names: frozenset[str]) -> None:
    """Of the Python API: lines marked `# capability: NAME`."""
    lines = path.read_text("utf-8").splitlines(keepends=True)
    path.write_text(
        "".join(line for line in lines if line.partition("  # capability: ")[2].strip() not in names), "utf-8"
    )


def _delete_faults(path: Path, names: frozenset[str]) -> None:
    head, *faults = re.split(r"(?m)^(?=\[\[fault\]\])", path.read_text("utf-8"))
    owner = re.compile(r'^capability = "(\w+)"', flags=re.MULTILINE)
    kept = [fault for fault in faults if (said := owner.search(fault)) is None or said[1] not in names]
    path.write_text("".join([head, *kept]), "utf-8")


def _delete_from_project(path: Path, names: frozenset[str], modules: Iterable[str]) -> None:
    """Extras of a capability, and its modules where an import contract allows them something."""
    text = path.read_text("utf-8")
    for extra in (extra for name in names for extra in CAPABILITIES[name].extras):
        text = re.sub(rf"(?m)^{re.escape(extra)} = \[.*\n", "", text)
        text = re.sub(rf"(fedsign\[[^\]]*?)\b{re.escape(extra)}\b,?", r"\1", text)
    for module in modules:
        text = re.sub(rf'"{re.escape(module)}"(, )?', "", text)
    path.write_text(text, "utf-8")
