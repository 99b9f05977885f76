"""The planted mutants: the faults of `faults.toml`, and operator mutants of the core.

A fault is found by its text, wherever the code is.  An operator mutant changes one node of a function's body: an
operator, an integer by one, a condition or a returned value, `min` or `max`.  Module-level tables and constants,
defaults, assertions and message texts are left alone, because most of their mutants are equivalent.
"""

import ast
import random
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from fedsign.capabilities import owners

PACKAGES = ("fedsign", "clients", "strategies", "simulations")
FAULTS = Path(__file__).with_name("faults.toml")

# the core's drawing of charts, whose faults are for eyes to see
_DRAWING = ("svg", "curves", "population", "split", "plots", "*_plots", "run_charts")
_SWAPPED = (
    (ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.FloorDiv, ast.Mult), (ast.Mod, ast.Mult), (ast.Pow, ast.Mult),
    (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn),
    (ast.And, ast.Or),
)  # fmt: skip
_SWAPS: Mapping[type[ast.AST], Any] = {two: one for one, two in _SWAPPED} | dict(_SWAPPED)
_OTHER_NAME = {"min": "max", "max": "min"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """A change of one file of the tree."""

    capability: str
    sentence: str
    path: str  # from the root
    start: int  # in the file's text, as is `stop`
    stop: int
    after: str
    lines: frozenset[int]  # of the statements that change
    symbols: frozenset[str]  # names of the functions and classes around it
    is_operator: bool = False

    def planted_in(self, source: str) -> str:
        """The file with the fault."""
        return source[: self.start] + self.after + source[self.stop :]


def faults(root: Path) -> list[Mutant]:
    """The hand-seeded faults.

    Raises:
        ValueError: the text of a fault does not stand exactly once in the packages.
    """
    sources, found = _sources(root), []
    for fault in tomllib.loads(FAULTS.read_text(encoding="utf-8"))["fault"]:
        before = fault["before"]
        places = [path for path, text in sources.items() for _ in range(text.count(before))]
        if len(places) != 1:
            raise ValueError(
                f"{FAULTS.name}: {before!r} stands {len(places)} times in the packages "
                f"({', '.join(places) or 'nowhere'}), but has to stand once; update the entry {fault['sentence']!r}."
            )
        text, start = sources[places[0]], sources[places[0]].index(before)
        first = text.count("\n", 0, start) + 1
        lines, symbols = _around(ast.parse(text), {*range(first, first + before.count("\n") + 1)})
        found.append(
            Mutant(
                capability=fault["capability"], sentence=fault["sentence"], path=places[0], start=start,
                stop=start + len(before), after=fault["after"], lines=lines, symbols=symbols,
            )
        )  # fmt: skip
    return found


def operator_mutants(root: Path, *, number: int, seed: int) -> list[Mutant]:
    """A sample of the core's operator mutants: the same for the same sources and seed."""
    core = {path: text for path, text in _sources(root).items() if not (owners(module_of(path)) or _draws(path))}
    trees = {path: ast.parse(text) for path, text in core.items()}
    every = [(path, old, new) for path, tree in trees.items() for old, new in _changes(tree)]
    drawn = random.Random(seed).sample(every, min(number, len(every)))
    found = [_operator_mutant(path, core[path], trees[path], old, ast.unparse(new)) for path, old, new in drawn]
    return sorted(found, key=lambda mutant: (mutant.path, mutant.start, mutant.after))


def module_of(path: str) -> str:
    """The name of the module in a file."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _draws(path: str) -> bool:
    return any(fnmatch(path, f"fedsign/report/{name}.py") for name in _DRAWING)


def _sources(root: Path) -> dict[str, str]:
    files = sorted(file for package in PACKAGES for file in (root / package).rglob("*.py"))
    return {file.relative_to(root).as_posix(): file.read_text(encoding="utf-8") for file in files}


def _operator_mutant(path: str, text: str, tree: ast.Module, old: ast.expr, new: str) -> Mutant:
    lines = text.splitlines(keepends=True)
    first, last = _span(old)

    def place(line: int, column: int) -> int:  # ast counts a line's bytes
        return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())

    changed, symbols = _around(tree, {*range(first, last + 1)})
    return Mutant(
        capability="core", sentence=f"{ast.unparse(old)} -> {new}", path=path, start=place(first, old.col_offset),
        stop=place(last, old.end_col_offset or 0), after=f"({new})", lines=changed, symbols=symbols, is_operator=True,
    )  # fmt: skip


def _changes(tree: ast.Module) -> Iterator[tuple[ast.expr, ast.expr]]:
    """All (node, what takes its place) in the bodies of a module's functions."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in function.body:
                yield from _changes_within(statement)


def _changes_within(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Assert() | ast.JoinedStr():
            return  # functions inside have their own turn
        case ast.Expr(value=ast.Constant()):
            return
        case ast.AnnAssign(value=value):
            yield from () if value is None else _changes_within(value)
            return
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
                yield test, test.operand
            elif not isinstance(test, ast.Compare):  # whose operator is swapped
                yield test, ast.UnaryOp(ast.Not(), test)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield value, ast.Constant(None)
        case ast.BinOp(left=left, op=op, right=right) if (
            type(op) in _SWAPS and not _is_text(left) and not _is_text(right)
        ):
            yield node, ast.BinOp(left, _SWAPS[type(op)](), right)
        case ast.BoolOp(op=op, values=values):
            yield node, ast.BoolOp(_SWAPS[type(op)](), values)
        case ast.Compare(left=left, ops=[op, *ops], comparators=others):
            yield node, ast.Compare(left, [_SWAPS[type(op)](), *ops], others)
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            yield node, ast.Constant(value + 1)
        case ast.Call(func=ast.Name(id=name) as called) if name in _OTHER_NAME:
            yield called, ast.Name(_OTHER_NAME[name])
    for child in ast.iter_child_nodes(node):
        yield from _changes_within(child)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _around(tree: ast.Module, changed: Collection[int]) -> tuple[frozenset[int], frozenset[str]]:
    """Return the lines of the innermost statements without import-time code, and the enclosing functions and
    classes.
    """
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    around = [node for node in statements if _lines(node) & {*changed}]
    lines = set[int]()
    for node in around:
        own = _lines(node).difference(
            *(_lines(each) for each in ast.walk(node) if isinstance(each, ast.stmt) and each is not node)
        )
        lines |= own if own & {*changed} else set()
    functions = [node for node in around if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    run = set[int]().union(*(range(node.body[0].lineno, _span(node)[1] + 1) for node in functions))
    names = [node.name for node in around if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    return frozenset(lines & run), frozenset(names)


def _span(node: ast.expr | ast.stmt) -> tuple[int, int]:
    return node.lineno, node.end_lineno or node.lineno


def _lines(node: ast.stmt) -> set[int]:
    first, last = _span(node)
    return {*range(first, last + 1)}
