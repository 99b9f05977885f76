"""What is planted: the faults of `faults.toml`, and operator mutants of the core.

A fault is found by its text, wherever the code lies.  An operator mutant changes one node of a function's body: an operator, an
integer by one, a condition or a returned value, `min` or `max`.  Module-level tables and constants, defaults, assertions and the
text of messages are left alone: most of their mutants are equivalent.
"""

import ast
import random
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

PACKAGES = ("fedsign", "clients", "strategies", "simulations")
FAULTS = Path(__file__).with_name("faults.toml")

# fnmatch patterns of what belongs to a capability; every other file of the packages is core
CAPABILITIES: Mapping[str, tuple[str, ...]] = {
    "cohort": ("clients/cohort.py", "clients/stacked_*"),
    "workers": ("clients/worker*", "clients/shared_*"),
    "sharding": (
        "fedsign/sharding/*", "clients/shard_*", "clients/parcels.py", "simulations/estimates/sharding*", "simulations/estimates/probing.py",
        "simulations/estimates/quantities.py", "fedsign/report/sharding_chart.py",
    ),
    "sparsity": ("fedsign/parameterisation/*", "fedsign/optim/packed.py", "simulations/tuning/*", "simulations/analyses/parameterisation*"),
    "partial": (
        "fedsign/parts.py", "fedsign/optim/lisa.py", "fedsign/optim/layer_draws.py", "fedsign/optim/lora.py", "fedsign/optim/galore.py",
        "fedsign/optim/blocks.py", "fedsign/models/part.py", "clients/parts.py", "clients/received.py", "simulations/parts.py",
    ),
    "language": (
        "fedsign/data/text/*", "fedsign/data/pytext.py", "fedsign/data/text_folder.py", "fedsign/data/jsonl.py", "fedsign/llm.py",
        "fedsign/tasks/language.py", "fedsign/metrics/perplexity.py", "fedsign/metrics/token_accuracy.py", "fedsign/models/gpt.py",
        "fedsign/models/causal_lm.py", "fedsign/models/hugging_face.py", "simulations/export.py",
    ),
    "memory": ("fedsign/memory/*", "simulations/estimates/*"),
    "bilevel": ("fedsign/bilevel/*", "simulations/condensing.py", "simulations/tuning/learning.py", "fedsign/report/condensation.py"),
    "landscape": ("fedsign/analysis/*", "simulations/analyses/*", "fedsign/report/valley_*", "fedsign/report/sign_plots.py"),
    "privacy": (
        "fedsign/privacy/*", "clients/privacy.py", "simulations/privacy.py", "strategies/flower/private.py", "fedsign/flower/clipping.py",
        "fedsign/report/privacy.py",
    ),
    "robustness": ("clients/attack.py", "clients/faults.py", "strategies/flower/robust.py"),
    "comparison": (
        "fedsign/comparison*", "fedsign/over_seeds.py", "simulations/comparisons/*", "fedsign/report/comparison*", "fedsign/report/forest.py",
    ),
    "deployment": (
        "simulations/deployment/*", "clients/site.py", "clients/node.py", "clients/watchdog.py", "fedsign/data/site*", "fedsign/report/sites.py",
    ),
    "reproduction": ("simulations/recipes/*",),
}  # fmt: skip
# where the ink of a chart lies: for eyes to judge
_DRAWING = tuple(
    f"fedsign/report/{name}.py"
    for name in ("svg", "bars", "curves", "lines", "stacks", "population", "split", "plots", "*_plots", "run_charts")
)

_SWAPS: Mapping[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot,
    ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


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
                f"{FAULTS.name}: {before!r} stands {len(places)} times in the packages ({', '.join(places) or 'nowhere'}), but has to "
                f"stand once; update the entry {fault['sentence']!r}."
            )
        text, start = sources[places[0]], sources[places[0]].index(before)
        lines, symbols = _around(ast.parse(text), text.count("\n", 0, start) + 1, before.count("\n") + 1)
        found.append(
            Mutant(
                capability=fault["capability"], sentence=fault["sentence"], path=places[0], start=start, stop=start + len(before),
                after=fault["after"], lines=lines, symbols=symbols,
            )
        )  # fmt: skip
    return found


def operator_mutants(root: Path, *, number: int, seed: int) -> list[Mutant]:
    """A sample of the core's operator mutants: the same for the same sources and seed."""
    patterns = [*_DRAWING, *(pattern for each in CAPABILITIES.values() for pattern in each)]
    core = {path: text for path, text in _sources(root).items() if not any(fnmatch(path, each) for each in patterns)}
    every = [(path, node, after) for path, text in core.items() for node, after in _changes(ast.parse(text))]
    drawn = random.Random(seed).sample(every, min(number, len(every)))
    return sorted(
        (_operator_mutant(path, core[path], node, after) for path, node, after in drawn),
        key=lambda mutant: (mutant.path, mutant.start, mutant.after),
    )


def _sources(root: Path) -> dict[str, str]:
    files = sorted(file for package in PACKAGES for file in (root / package).rglob("*.py"))
    return {file.relative_to(root).as_posix(): file.read_text(encoding="utf-8") for file in files}


def _operator_mutant(path: str, text: str, node: ast.expr, after: str) -> Mutant:
    lines = text.splitlines(keepends=True)

    def place(line: int, column: int) -> int:  # ast counts a line's bytes
        return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())

    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    changed, symbols = _around(ast.parse(text), node.lineno, node.end_lineno - node.lineno + 1)
    return Mutant(
        capability="core", sentence=f"{ast.unparse(node)} -> {after.removeprefix('(').removesuffix(')')}", path=path,
        start=place(node.lineno, node.col_offset), stop=place(node.end_lineno, node.end_col_offset), after=after, lines=changed,
        symbols=symbols, is_operator=True,
    )  # fmt: skip


def _changes(tree: ast.Module) -> Iterator[tuple[ast.expr, str]]:
    """All (node, what takes its place) in the bodies of a module's functions."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in function.body:
                yield from _changes_within(statement)


def _changes_within(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Assert() | ast.JoinedStr():
            return  # functions inside have their own turn
        case ast.Expr(value=ast.Constant()):
            return
        case ast.AnnAssign(value=value):
            if value is not None:
                yield from _changes_within(value)
            return
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
                yield test, f"({ast.unparse(test.operand)})"
            elif not isinstance(test, ast.Compare):  # whose operator is swapped
                yield test, f"(not ({ast.unparse(test)}))"
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield value, "None"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _SWAPS and not _is_text(left, right):
            yield node, f"({ast.unparse(ast.BinOp(left, _SWAPS[type(op)](), right))})"  # type: ignore[arg-type]
        case ast.BoolOp(op=op, values=values):
            yield node, f"({ast.unparse(ast.BoolOp(_SWAPS[type(op)](), values))})"  # type: ignore[arg-type]
        case ast.Compare(left=left, ops=[op, *ops], comparators=others):
            yield node, f"({ast.unparse(ast.Compare(left, [_SWAPS[type(op)](), *ops], others))})"  # type: ignore[list-item]
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            yield node, str(value + 1)
        case ast.Call(func=ast.Name(id="min" | "max" as name) as called):
            yield called, {"min": "max", "max": "min"}[name]
    for child in ast.iter_child_nodes(node):
        yield from _changes_within(child)


def _is_text(*nodes: ast.expr) -> bool:
    texts = (ast.JoinedStr, ast.Constant)
    return any(isinstance(node, texts) and isinstance(getattr(node, "value", ""), str) for node in nodes)


def _around(tree: ast.Module, first: int, num: int) -> tuple[frozenset[int], frozenset[str]]:
    """The lines of the innermost statements at `num` lines from `first`, none of what runs at import; the names around them."""
    lines, symbols = set[int](), set[str]()

    def look(body: list[ast.stmt], in_function: bool) -> None:
        for statement in body:
            start, stop = statement.lineno, statement.end_lineno or statement.lineno
            if stop < first or start >= first + num:
                continue
            inner = [each for block in _blocks(statement) for each in block]
            is_function = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                symbols.add(statement.name)
            head = inner[0].lineno - 1 if inner else stop
            if in_function and first <= max(head, start):
                lines.update(range(start, max(head, start) + 1))
            look(inner, in_function or is_function)

    look(tree.body, False)
    return frozenset(lines), frozenset(symbols)


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for _, value in ast.iter_fields(statement):
        for each in value if isinstance(value, list) else ():
            if isinstance(each, ast.stmt):
                yield [each]
            elif isinstance(each, ast.ExceptHandler | ast.match_case):
                yield each.body
