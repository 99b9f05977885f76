"""The commands that the documents tell a reader to type: collected, parsed, and checked without being run."""

import importlib.util
import json
import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from fedsign.config import load
from fedsign.errors import ConfigError
from fedsign.registry import KINDS
from simulations.cli import app

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "benchmarks").rglob("README.md"),
    )
    if path.parent.name != "contributing"  # test_walkthroughs.py executes these
)
_FENCE = re.compile(r"^ *```(.*)\n((?:.*\n)*?) *```$", flags=re.MULTILINE)
_SHELL = ("", "bash", "console")
_PROMPT = re.compile(r"^\w*\$ ")
_COMMAND = re.compile(
    r"(?:^|[\s;])(fedsign|python3? -m|pip|make|torchrun|pytest|mlflow|tensorboard|wandb)(?= \S)|^(pytest)$"
)
DELETED = "which was deleted from this FedSign"  # in a clone without a capability
_AT_ONCE = r"fedsign (explain .*|ablate \S+ --list|partition .*|condense --show-config|deploy key \S+)"
_A_READERS_OWN = ("my_", "mine")  # names that stand for something of the reader's


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command on a page."""

    page: str
    line: int
    text: str  # in one line, without its comment
    comment: str  # beside it, or in the line above

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"

    @property
    def words(self) -> list[str]:
        """Its words from `fedsign` on."""
        return shlex.split(self.text)

    @property
    def overrides(self) -> list[str]:
        """What `--set` changes."""
        return self.given("--set")

    def given(self, option: str) -> list[str]:
        """The values of an option."""
        return [value for before, value in zip(self.words, self.words[1:], strict=False) if before == option]


def commands_of(page: str, programs: Iterable[str] = ()) -> Iterator[Command]:
    """The commands of a page, all or those of some programs."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for fence in _FENCE.finditer(text):
        if fence[1] not in _SHELL:
            continue
        first = text.count("\n", 0, fence.start(2)) + 1
        for number, line, above in _lines(fence[2]):
            command, _, comment = line.partition(" #")
            for part in re.sub(r"\$\(\(.*?\)\)", "$N", command).split(" && "):
                if (found := _COMMAND.search(part)) and (not programs or (found[1] or found[2]) in programs):
                    said = comment or (above.strip(" #") if above.lstrip().startswith("#") else "")
                    yield Command(
                        page=page,
                        line=first + number,
                        text=re.sub(r" > \S+", "", part[found.start(found.lastindex or 0) :]).strip(),
                        comment=said.strip(),
                    )


def _lines(block: str) -> Iterator[tuple[int, str, str]]:
    """Number, line and the line above it; continued lines as one, and in a session those with a prompt."""
    is_session = any(_PROMPT.match(line) for line in block.splitlines())
    number, above = 0, ""
    for whole in re.findall(r"(?:.*\\\n)*.*\n", block):
        line = whole.replace("\\\n", " ").rstrip("\n")
        is_typed = not is_session or _PROMPT.match(line) is not None
        line = _PROMPT.sub("", line)
        if is_typed and not line.lstrip().startswith("#"):
            yield number, line, above
        number, above = number + whole.count("\n"), line


def check(command: Command, folder: Path) -> None:
    """Raise an error unless the command can be parsed and all that it names is there."""
    program = command.text.partition(" ")[0]
    if program == "fedsign":
        _check_fedsign(command, folder)
    elif program == "make":
        target = command.words[1]
        assert re.search(rf"(?m)^{target}:", (ROOT / "Makefile").read_text("utf-8")), f"no target '{target}'"
    elif command.text.startswith("pip install"):
        known = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
        for extra in re.findall(r"\[([\w,]+)\]", command.text):
            assert known.keys() >= {*extra.split(",")} or _was_deleted(extra), f"no extra '{extra}'"
    elif program.startswith("python"):
        module = command.words[2]
        assert module == "venv" or importlib.util.find_spec(module), f"no module '{module}'"


def _was_deleted(extra: str) -> bool:
    from fedsign.capabilities import absent

    return bool(absent("names")) and extra not in ("dev", "docs")


def _check_fedsign(command: Command, folder: Path) -> None:
    click_command: Any = typer.main.get_command(app)
    _, words = click_command.own_options(command.words[1:])
    path = ["fedsign"]
    while words and words[0] in getattr(click_command, "commands", {}):
        click_command = click_command.commands[words[0]]
        path.append(words.pop(0))
    assert len(path) > 1, f"'{words[0]}' is not a command"
    try:
        with click_command.make_context(" ".join(path), [*words]) as context:
            parameters = dict(context.params)
            assert not context.args, context.args
    except Exception as error:
        raise AssertionError(f"{getattr(error, 'message', error)}") from error
    try:
        _check_names(path, parameters)
        _check_settings(path, parameters, command, folder)
    except ConfigError as error:
        if DELETED not in str(error) and ("$" not in command.text or "unknown key" in str(error)):
            raise  # a variable of the shell is no value, but its key is one


def _check_names(path: list[str], parameters: dict[str, Any]) -> None:
    """Names that are not settings: of strategies, and of recipes with the data and the model that they take."""
    for name in _strategies(path, parameters):
        assert name is None or name in KINDS["strategy"].table or ":" in name, f"no strategy '{name}'"
    if path[1] == "reproduce" and parameters["name"]:
        from simulations.recipes.table import get

        data = parameters["data"] or ""
        is_own = data.startswith(_A_READERS_OWN)
        model = parameters["model"] or ""
        get(parameters["name"], data="" if is_own else data, model="" if is_own else model)
        assert not model or model in KINDS["model"].table, f"no model '{model}'"
        assert not data or is_own or data in KINDS["dataset"].table, f"no data set '{data}'"


def _strategies(path: list[str], parameters: dict[str, Any]) -> list[str | None]:
    if path[1] == "compare":
        return [*(parameters["strategies"] or "fedavg,fedprox,feddyn,fedsign").split(",")]
    return [parameters["strategy"]] if path[1] == "ablate" else [None]


def _check_settings(path: list[str], parameters: dict[str, Any], command: Command, folder: Path) -> None:
    """Every setting is one of the configuration, with the parts that the command names."""
    axes = [axis for option in ("--grid", "--by", "--tune-at") for axis in command.given(option)]
    if path[1] == "condense":
        from fedsign.bilevel import settings

        settings.load(None, command.overrides)
        return
    file = _configuration(command, parameters.get("config"), folder)
    tried: dict[str, list[str]] = {}  # of a setting: with which strategies it goes, or why not
    for strategy in _strategies(path, parameters):
        if strategy and strategy.startswith(_A_READERS_OWN):
            continue
        named = [f"strategy.name={strategy}"] if strategy else []
        if "--resume" in command.words and "engine.name=" not in command.text:
            named.append("engine.name=superlink")  # whose settings a run that goes on may change
        of_it = [each for each in command.overrides if not _is_of_another(each, strategy)]
        of_all = [each for each in of_it if not strategy or not each.startswith("strategy.")]
        load(file, [*named, *(each.removeprefix(f"{strategy}:") for each in of_all)])
        points = [each for each in of_it if each not in of_all]
        points += [f"{key}={_said(value)}" for key, value in map(_axis, axes) if not _is_of_another(key, strategy)]
        parts = [point for point in points if ".name=" in point]
        for point in points:
            tried.setdefault(point, [])
            try:
                load(file, [*named, *(each.removeprefix(f"{strategy}:") for each in (*of_all, *parts, point))])
                tried[point].append("")
            except ConfigError as error:
                tried[point].append(str(error))
    for point, found in tried.items():
        assert "" in found or any(DELETED in each for each in found), f"--set {point}: {found[0]}"
    known = [key for option in ("--search",) for key in command.given(option)]
    for key in known:
        load(file, [*command.overrides, f"{key.partition('=')[0]}={_default(file, key.partition('=')[0])}"])


def _is_of_another(setting: str, strategy: str | None) -> bool:
    """Whether it is `feddyn:strategy.alpha`, for another strategy than feddyn."""
    owner, colon, _ = setting.partition("=")[0].partition(":")
    return bool(colon) and owner != strategy


def _axis(text: str) -> tuple[str, Any]:
    from simulations.comparison.request import parse_axis

    key, values = parse_axis(text)
    return key, values[0]


def _said(value: Any) -> str:
    return json.dumps(value)


def _default(file: Path | None, key: str) -> str:
    """The value that a setting has without the command."""
    return _said(load(file).get(key, None))


def _configuration(command: Command, name: Path | None, folder: Path) -> Path | None:
    """The file a command names, from the repository or its page; the default experiment for any other."""
    if name is None or (ROOT / name).exists():
        return name and ROOT / name
    page = (ROOT / command.page).read_text(encoding="utf-8")
    shown = re.search(rf"```toml\n(# {re.escape(str(name))}\n.*?)```", page, flags=re.DOTALL)
    if shown is None:
        return None
    (folder / name).write_text(shown[1], encoding="utf-8")
    return folder / name


def write_modules(page: str, folder: Path) -> None:
    """Save the programs of a page, named by their first line or by the module in a command."""
    text = (ROOT / page).read_text(encoding="utf-8")
    named = dict(re.findall(r"=(\w+):(\w+)", text))
    for source in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        names = re.findall(r"\A# (\w+)\.py\n", source)
        names += [module for module, name in named.items() if re.search(rf"(?m)^(class|def) {name}\b", source)]
        for name in names[:1]:
            (folder / f"{name}.py").write_text(source, encoding="utf-8")


# Which test runs which commands, as they stand or made short; a command that is in no row has its cost beside it.
_RUN = r"fedsign run( --set \S+)+"
COVERED: tuple[tuple[str, str, str], ...] = (  # pages, commands, the file of the test
    (
        r".*",
        r"fedsign (list|runs|run( experiment\.toml| --show-config| --resume (RUN|runs/dig\S+))?)",
        "tests/e2e/test_cli.py",
    ),
    (r".*", r"fedsign runs (tag|remove|verify|--).*", "tests/e2e/test_runs.py"),
    (r".*", r"fedsign new my-project", "tests/projects/test_projects.py"),
    (r".*", r"fedsign completion .*", "tests/contract/test_completion.py"),
    (r".*", r"fedsign data check .*", "tests/diagnosis/test_data.py"),
    (r".*", r"fedsign ui( .*)?", "tests/ui/test_browser.py"),
    (r".*", r"fedsign reproduce --list", "tests/reproduction/test_recipes.py"),
    (r".*", r"fedsign analyze (interpolate|signs|trajectory|curvature) .*", "tests/landscape/test_analyze.py"),
    (r".*", r"fedsign deploy (init|add-site|check|down|renew|revoke|status|up)\b.*", "tests/deployment/test_deploy.py"),
    (r"docs/how-to/your-own-data.md", r"fedsign run .*", "tests/e2e/test_docs_data.py"),
    (r"docs/how-to/language-data.md", r"fedsign run .*", "tests/language/test_docs_language.py"),
    (r"docs/how-to/federated-llm.md", r"fedsign (run|export) .*", "tests/language/test_docs_models.py"),
    (r"docs/how-to/lisa.md", r"fedsign run .*", "tests/partial/test_docs.py"),
    (r"docs/how-to/sparse-clients.md", r"fedsign .*", "tests/sparsity/test_docs_sparse.py"),
    (r"docs/how-to/shard-a-model.md", r"fedsign (run|worker) .*", "tests/sharding/test_docs_sharding.py"),
    (
        r"docs/how-to/shard-a-model.md",
        r"fedsign estimate (?!.*--measure).*|torchrun .* train_sharded\.py",
        "tests/sharding/test_docs_sharding.py",
    ),
    (r"docs/how-to/estimate-memory.md", r"fedsign estimate memory (?!.*--measure).*", "tests/memory/test_estimate.py"),
    (r"docs/how-to/sites.md", r"fedsign run hospitals\.toml", "tests/deployment/test_docs_sites.py"),
    (r"docs/how-to/tune.md", r"fedsign tune search .*", "tests/tuning/test_tune_search.py"),
    (r"docs/how-to/learn-settings.md", r"fedsign tune learn .*", "tests/bilevel/test_tune_learn.py"),
    (r"docs/tutorial.md", r"fedsign run --set data.name=mydata:.*", "tests/e2e/test_docs.py"),
    (r"docs/how-to/track-experiments.md", r"fedsign run .*", "tests/tracking/test_trackers.py"),
    (r"benchmarks/README.md", r"python -m benchmarks\.docs", "tests/benchmarks/test_benchmarks.py"),
    (r".*", _AT_ONCE, "tests/e2e/test_docs.py"),
)
_COST = re.compile(
    r"\b(seconds?|minutes?|hours?)\b|\btrainings?\b|\bneeds\b|\bdownloads\b|says its cost before it starts|"
    r"what is left of it",
    re.I,
)


def is_short_run(command: Command) -> bool:
    """Whether tests/e2e/test_docs.py runs one round of it: the default experiment with other settings, in process."""
    is_run = re.fullmatch(_RUN, re.sub(r"'[^']*'", "X", command.text)) is not None
    elsewhere = any(
        each in command.text for each in ("engine.name=", "callbacks=", "data.name=mydata", "rounds=400", "sharding")
    )
    return is_run and not elsewhere and covered_by(command) is None


def is_at_once(command: Command) -> bool:
    """Whether tests/e2e/test_docs.py runs it as it stands."""
    return re.fullmatch(_AT_ONCE, command.text) is not None


def covered_by(command: Command) -> str | None:
    """The test that runs it, by the table."""
    for page, text, test in COVERED:
        if re.fullmatch(page, command.page) and re.fullmatch(text, command.text):
            return test
    return None


def has_cost(command: Command) -> bool:
    """Whether its cost stands beside it."""
    return _COST.search(command.comment) is not None
