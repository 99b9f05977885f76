"""Shell completion: the table is up to date, and the shells get what it says. Update the table by:

python -m tests.contract.test_completion --write
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click
import pytest
import typer
from pydantic.fields import FieldInfo

from simulations.completion.answer import TABLE, answer, candidates
from simulations.completion.scripts import SCRIPTS
from simulations.entry import COMPLETE

ROOT = Path(__file__).parents[2]


def table() -> dict[str, Any]:
    """The table, from the command line and the settings."""
    from fedsign.config import ExperimentConfig
    from fedsign.registry import KINDS
    from fedsign.sections import Part, tables
    from simulations.cli import app
    from simulations.explain import line_of, own_settings, settings_of, summary_of

    commands: dict[str, Any] = {}
    _describe(typer.main.get_command(app), "", commands)
    sections = dict(tables(ExperimentConfig))
    keys, components, explained = dict[str, Any](), dict[str, Any](), dict[str, str]()
    for path, section in {"": ExperimentConfig, **sections}.items():
        if path:
            explained[path] = summary_of(section)
        kind = section.kind if issubclass(section, Part) else ""
        for key, field in own_settings(section).items():
            names = {name: text for name, (_, text) in KINDS[kind].table.items()} if kind and key == "name" else {}
            setting = _setting(field, line_of(key, section=path), names)
            keys[f"{path}.{key}".strip(".")] = setting
            explained[f"{path}.{key}".strip(".")] = setting["help"]
        if kind:
            components[path] = {
                name: {
                    key: _setting(each, line_of(key, kind=kind, name=name), {})
                    for key, each in settings_of(kind, name).items()
                }
                for name in KINDS[kind].table
            }
            explained |= {f"{path}.{name}": text for name, (_, text) in KINDS[kind].table.items()}
            explained |= {f"{path}.{key}": each["help"] for of in components[path].values() for key, each in of.items()}
    return {
        "commands": commands,
        "keys": keys,
        "components": components,
        "names": _names(),
        "explained": explained,
    }


def _names() -> dict[str, dict[str, str]]:
    from fedsign.registry import KINDS

    found = {kind.plural: {name: text for name, (_, text) in kind.table.items()} for kind in KINDS.values()}
    shown = {"STRATEGY": "strategies", "DATA": "datasets", "MODEL": "models", "METHOD": "hypergradients"}
    names = found | {metavar: found[plural] for metavar, plural in shown.items() if plural in found}
    names |= {"KIND": dict.fromkeys(found, ""), "SHELL": dict.fromkeys(SCRIPTS, "")}
    try:
        from simulations.recipes.table import all_recipes
    except ModuleNotFoundError:  # the capability is deleted
        return names
    return names | {"RECIPE": {name: each.claim.split("; ")[0][:80] for name, each in all_recipes().items()}}


def _setting(field: FieldInfo, line: str | None, names: dict[str, str]) -> dict[str, Any]:
    hint = field.annotation
    words = get_args(hint) if get_origin(hint) is Literal else ("true", "false") if hint is bool else ()
    values = names or {each: "" for each in words if isinstance(each, str)}
    return {"help": line or "", **({"values": values} if values else {})}


def _describe(command: click.Command, path: str, commands: dict[str, Any]) -> None:
    options: dict[str, Any] = {"--help": {"help": "Show this message and exit."}}
    arguments = []
    for each in command.params:
        kind = each.metavar or each.type.name.upper()
        if isinstance(each, click.Argument):
            arguments.append(kind)
        elif each.name != "help":
            takes_value = not getattr(each, "is_flag", False)
            option = {"help": getattr(each, "help", None) or ""} | ({"kind": kind} if takes_value else {})
            options |= dict.fromkeys([*each.opts, *each.secondary_opts], option)
    below = {name: each for name, each in getattr(command, "commands", {}).items() if not each.hidden}
    text = (command.help or "").partition("\n\n")[0].replace("\n", " ")
    commands[path] = {"help": text, "options": options, "arguments": arguments, "commands": [*below]}
    for name, each in below.items():
        _describe(each, f"{path} {name}".strip(), commands)


def test_the_table_is_up_to_date() -> None:
    written = json.loads(Path(TABLE).read_text(encoding="utf-8"))
    assert written == table(), "python -m tests.contract.test_completion --write"


@pytest.mark.parametrize(
    ("words", "some", "none"),
    [
        ([""], {"run", "report", "runs", "completion"}, {"analyse", "--quiet"}),
        (["r"], {"run", "runs", "report"}, {"list"}),
        (["run", "--"], {"--set", "--resume", "--show-config", "--quiet", "--help"}, {"--json"}),
        (["--log-every", "5", "runs", ""], {"verify"}, {"run"}),
        (["run", "--set", ""], {"client.", "rounds=", "strategy."}, {"client.lr="}),
        (["run", "--set", "client."], {"client.lr=", "client.optimizer."}, {"client.optimizer.name=", "rounds="}),
        (["run", "--set", "strategy.name=fed"], {"strategy.name=fedavg"}, {"strategy.name=scaffold"}),
        (["run", "--set", "client.path="], {"client.path=auto"}, set()),
        (["run", "--set", "strategy."], {"strategy.name=", "strategy.weighting=", "strategy.mu="}, set()),
        (["run", "--set", "strategy.name=fedprox", "--set", "strategy."], {"strategy.mu="}, {"strategy.gamma="}),
        (["run", "--set=strategy.name=fedp"], {"--set=strategy.name=fedprox"}, set()),
        (["list", "str"], {"strategies"}, {"models"}),
        (["list", "models", ""], {"mlp"}, {"fedavg"}),
        (["explain", "strategy.fed"], {"strategy.fedsign"}, {"strategy.gamma"}),
        (["completion", ""], {"bash", "zsh", "fish"}, {"run"}),
    ],
)
def test_what_can_follow(words: list[str], some: set[str], none: set[str]) -> None:
    found = {line.partition("\t")[0] for line in answer("zsh", words).splitlines()}
    assert some <= found and not none & found
    assert all(each.startswith(words[-1]) for each in found)


def test_lists_and_settings_of_one_strategy_are_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("simulations.comparison")
    assert "fedavg,fedprox" in candidates(["compare", "--strategies", "fedavg,fed"])
    assert "fedprox:strategy.mu=" in candidates(["compare", "--set", "fedprox:strategy."])
    assert "strategy.name=fedavg,moon" in candidates(["compare", "--by", "strategy.name=fedavg,m"])


def test_runs_in_this_folder_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("runs/digits/one", "runs/digits/two", "comparisons/ours"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert [*candidates(["run", "--resume", ""])] == ["runs/digits/one", "runs/digits/two"]
    assert [*candidates(["report", ""])] == ["runs/digits/one", "runs/digits/two"]
    assert "comparisons/ours" in candidates(["runs", "verify", ""])


def test_an_answer_imports_nothing_slow() -> None:
    slow = {"torch", "flwr", "numpy", "typer", "click", "rich", "pydantic"}
    program = (
        "import sys\n"
        "from simulations.entry import main\n"
        "main()\n"
        f"loaded = {slow} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "fedsign run --set strategy.name=fe"],
        env={**os.environ, COMPLETE: "bash"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "fedavg" in done.stdout.split()  # what follows the =, where bash breaks words


def _shell(tmp_path: Path, *command: str) -> list[str]:
    """What a shell prints in a folder with a run, where `fedsign` is on the path."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    (tmp_path / "runs" / "digits" / "one").mkdir(parents=True)
    program = tmp_path / "bin" / "fedsign"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nexec {sys.executable} -c 'from simulations.entry import main; main()' \"$@\"\n")
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.split()


# The text up to the cursor, what is at its end for bash, and what the shell may put there.
CASES = [
    ("fedsign --set", "--set", []),
    ("fedsign run --resu", "--resu", ["--resume"]),
    ("fedsign run --resume ", "", ["runs/digits/one"]),
    ("fedsign run --set client.l", "client.l", ["client.lr=", "client.label_smoothing=", "client.local_epochs="]),
    ("fedsign run --set strategy.name=fedp", "fedp", ["fedprox"]),
    ("fedsign list mod", "mod", ["models"]),
]


def test_in_bash(tmp_path: Path) -> None:
    shown = "printf '%s,' \"${COMPREPLY[@]}\"; echo ."
    calls = [
        f"COMP_LINE={line!r} COMP_POINT={len(line)}; _fedsign fedsign {word!r}; {shown}" for line, word, _ in CASES
    ]
    setup = 'eval "$(fedsign completion bash)"; complete -p fedsign >/dev/null || exit 1'
    found = _shell(tmp_path, "bash", "--norc", "-c", "\n".join([setup, *calls]))
    _compare([line.rstrip(".").rstrip(",").split(",") for line in found], "")


def test_in_zsh(tmp_path: Path) -> None:
    # zsh completes in its line editor only: the functions that it offers there are replaced by ones that print
    calls = [
        f"words=({line if line[-1] != ' ' else line + repr('')}); CURRENT=$#words; _fedsign; echo ."
        for line, *_ in CASES
    ]
    setup = "compdef() { : }; _files() { : }; compadd() { printf '%s,' ${(P)@[-1]} }"
    found = _shell(tmp_path, "zsh", "-f", "-c", "\n".join([setup, 'eval "$(fedsign completion zsh)"', *calls]))
    _compare([line.rstrip(".").rstrip(",").split(",") for line in found], "strategy.name=")


def test_in_fish(tmp_path: Path) -> None:
    calls = [f"printf '%s,' (complete -C {line!r} | string split -f1 \\t); echo ." for line, *_ in CASES]
    found = _shell(tmp_path, "fish", "--no-config", "-c", "\n".join(["fedsign completion fish | source", *calls]))
    _compare([line.rstrip(".").rstrip(",").split(",") for line in found], "strategy.name=")


def _compare(found: Sequence[Sequence[str]], prefix: str) -> None:
    assert len(found) == len(CASES)
    for (line, _, expected), got in zip(CASES, found, strict=True):
        wanted = [prefix + each if "=" in line else each for each in expected]
        assert {*wanted} <= {each.strip() for each in got}, line


if __name__ == "__main__" and "--write" in sys.argv:
    Path(TABLE).write_text(json.dumps(table(), indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
