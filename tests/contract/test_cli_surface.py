"""The command line's surface is frozen in a golden file. Update it intentionally by:

python -m tests.contract.test_cli_surface --write
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer
from typer.testing import CliRunner

GOLDEN = Path(__file__).with_name("cli_surface.txt")


def surface() -> str:
    """Every command with its arguments and options, one a line."""
    from simulations.cli import app

    lines: list[str] = []
    _describe(typer.main.get_command(app), "fedsign", lines)
    return "\n".join(lines) + "\n"


def _describe(command: click.Command, path: str, lines: list[str]) -> None:
    lines.append(path)
    for parameter in command.params:
        names = ", ".join([*parameter.opts, *parameter.secondary_opts])
        repeated = " (repeatable)" if parameter.multiple else ""
        flag = "flag" if getattr(parameter, "is_flag", False) else parameter.type.name
        lines.append(f"    {parameter.param_type_name} {names}: {flag}{repeated}")
    for name in sorted(getattr(command, "commands", {})):
        _describe(command.commands[name], f"{path} {name}", lines)  # type: ignore[attr-defined]


def test_the_surface_is_the_one_in_the_golden_file() -> None:
    assert surface() == GOLDEN.read_text(encoding="utf-8")


def test_every_argument_and_option_says_what_it_is() -> None:
    from simulations.cli import app

    silent = _silent(typer.main.get_command(app), "fedsign")
    assert not silent, silent


def _silent(command: click.Command, path: str) -> list[str]:
    found = [
        f"{path} {each.name}" for each in command.params if not getattr(each, "help", None) and each.name != "help"
    ]
    for name, below in getattr(command, "commands", {}).items():
        found += _silent(below, f"{path} {name}")
    return found


def test_help_prints_every_letter_of_its_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a name in brackets, which Rich would take for markup."""
    from simulations.cli import app

    monkeypatch.setenv("COLUMNS", "400")
    for path, texts in _texts(typer.main.get_command(app), []):
        page = _letters(CliRunner().invoke(app, [*path, "--help"]).stdout)
        missing = [text for text in texts if _letters(text) not in page]
        assert not missing, (path, missing)


def _texts(command: click.Command, path: list[str]) -> Iterator[tuple[list[str], list[str]]]:
    """Each command with the texts of its options, and the first sentences of the commands below."""
    below = {name: each for name, each in getattr(command, "commands", {}).items() if not each.hidden}
    first = [each.get_short_help_str(400) for each in below.values()]
    yield path, [*(getattr(each, "help", None) or "" for each in command.params), *first]
    for name, each in below.items():
        yield from _texts(each, [*path, name])


def _letters(text: str) -> str:
    return "".join(letter for letter in text if not letter.isspace() and letter not in "│╭╮╰╯─`")


def test_help_imports_nothing_heavy() -> None:
    """What a newcomer types first must answer at once, also through the console script's entry point."""
    program = (
        "import sys\n"
        "sys.argv = ['fedsign', '--help']\n"
        "from simulations.cli import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "heavy = {'torch', 'flwr', 'numpy', 'matplotlib', 'scipy', 'sklearn', 'pydantic', 'cryptography'} & "
        "set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "partition" in done.stdout


if __name__ == "__main__" and "--write" in sys.argv:
    GOLDEN.write_text(surface(), encoding="utf-8")
