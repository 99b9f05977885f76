"""Code size of the core and of each capability, and the imports that keep a capability from being deleted.

    make size                           code lines, against the targets
    python -m benchmarks.size --edges   undeclared uses between the core and the capabilities

A code line holds code after `ruff format`. Blank lines, comments and docstrings do not count; all lines of a longer
string do.  `fedsign.capabilities` assigns modules to capabilities; all others are the core.

An edge is an import anywhere in a file, or a module's name in a string: a row of the registry, or a process started by
its module.
"""

import argparse
import ast
import io
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grimp

from fedsign.capabilities import CAPABILITIES, owners
from fedsign.registry import PACKAGES

CORE = "core"
TARGETS = {CORE: 11_000, "total": 32_000}  # code lines
_ROOT = Path(__file__).parent.parent
_NO_CODE = {getattr(tokenize, name) for name in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")}


@dataclass(frozen=True, order=True, kw_only=True, slots=True)
class Edge:
    """A module's use of another one."""

    user: str
    used: str
    is_import: bool  # otherwise a name in a string


def modules() -> dict[str, Path]:
    """Return the modules of the four packages, and their files."""
    files = (file for package in PACKAGES for file in (_ROOT / package).rglob("*.py"))
    return {".".join(file.relative_to(_ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def code_lines(source: str) -> int:
    """Count the lines that hold code.

    >>> code_lines('"Doc."' + chr(10) * 2 + "x = 1  # why" + chr(10) + "# that is all" + chr(10))
    1
    """
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {line for each in tokens if each.type not in _NO_CODE for line in range(each.start[0], each.end[0] + 1)}
    for docstring in _docstrings(ast.parse(source)):
        lines.difference_update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return len(lines)


def owner(module: str) -> str:
    """Return a module's capability, or the core."""
    return next(iter(owners(module)), CORE)


def sizes() -> dict[str, Counter[str]]:
    """Return core or capability -> package -> code lines."""
    found: dict[str, Counter[str]] = {name: Counter() for name in (CORE, *CAPABILITIES)}
    for module, file in modules().items():
        found[owner(module)][module.partition(".")[0]] += code_lines(file.read_text(encoding="utf-8"))
    return found


def edges() -> Iterator[Edge]:
    """Return all uses of a module by another, except the types of the Python API, which go with their capability."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    files = modules()
    for user, file in files.items():
        if user in ("fedsign", "fedsign.analyze"):
            continue
        for used in graph.find_modules_directly_imported_by(user):
            yield Edge(user=user, used=used, is_import=True)
        for used in _named_modules(file.read_text(encoding="utf-8")) & files.keys():
            yield Edge(user=user, used=used, is_import=False)


def is_allowed(edge: Edge) -> bool:
    """Whether a module may use another: of the core, of its own capability, or of a required one."""
    user, used = owner(edge.user), owner(edge.used)
    return used in (CORE, user) or (user != CORE and used in CAPABILITIES[user].requires)


def undeclared() -> list[Edge]:
    """Return the uses that the table of capabilities does not allow."""
    return sorted(edge for edge in edges() if not is_allowed(edge))


def _docstrings(tree: ast.Module) -> Iterator[ast.stmt]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match node.body:
                case [ast.Expr(value=ast.Constant(value=str())) as docstring, *_]:
                    yield docstring


def _named_modules(source: str) -> set[str]:
    """Yield strings that may name a module, such as `module:Name`."""
    constants = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    return {constant.partition(":")[0] for constant in constants if isinstance(constant, str) and "." in constant}


def _print_sizes() -> None:
    found = sizes()
    found["total"] = sum(found.values(), Counter())
    print(_row("code lines", "all", "target", *PACKAGES))
    for name, lines in found.items():
        cells = [lines.total(), TARGETS.get(name, 0), *(lines[package] for package in PACKAGES)]
        print(_row(name, *(f"{cell:,}" if cell else "" for cell in cells)))


def _row(name: str, *cells: str) -> str:
    return (f"{name:14}" + "".join(f"{cell:>12}" for cell in cells)).rstrip()


def _print_edges() -> None:
    forbidden: dict[tuple[str, str], dict[tuple[str, bool], list[str]]] = defaultdict(lambda: defaultdict(list))
    kinds: Counter[bool] = Counter()
    for edge in undeclared():
        forbidden[owner(edge.user), owner(edge.used)][edge.user, edge.is_import].append(edge.used)
        kinds[edge.is_import] += 1
    for (user, used), found in sorted(forbidden.items(), key=lambda item: (item[0][0] != CORE, item[0])):
        print(f"{user} -> {used}")
        for (module, is_import), names in found.items():
            print(f"    {module} {'imports' if is_import else 'names'} {', '.join(names)}")
    print(f"{kinds[True]} imports and {kinds[False]} names are not allowed by fedsign.capabilities.")


def main() -> None:
    """Print the sizes, or the edges."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--edges", action="store_true", help="uses that the table does not allow, instead of sizes")
    if parser.parse_args().edges:
        _print_edges()
    else:
        _print_sizes()


if __name__ == "__main__":
    main()
