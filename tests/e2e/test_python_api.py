"""`import fedsign` in a folder that has `clients`, `strategies` and `simulations` of its own."""

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import fedsign
from fedsign.companions import HOME, NAMES
from fedsign.extensions import python_api

TINY = {"rounds": 2, "callbacks": [], "partition": {"num_clients": 3, "alpha": 1.0}, "server": {"cohort_size": 3}}
SCRIPT = f"""
import fedsign, json, sys
done = fedsign.run({{**{TINY}, "engine": json.loads(sys.argv[1])}})
print(json.dumps([line["loss"] for line in done.rounds]))
"""
ENGINES = [
    '{"name": "in_process"}',
    '{"name": "in_process", "workers": 2}',
    '{"name": "ray", "init_args": {"num_cpus": 2}}',
]


@pytest.fixture
def user_folder(tmp_path: Path) -> Path:
    """A folder with two packages and a module of the names of FedSign's."""
    for name in NAMES[:2]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("mine = True\n")
        (tmp_path / name / "own.py").write_text("")
    (tmp_path / f"{NAMES[2]}.py").write_text("mine = True\n")
    return tmp_path


def python(folder: Path, source: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    (folder / "script.py").write_text(source)
    return subprocess.run(
        [sys.executable, "script.py", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(HOME), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def error_of(done: "subprocess.CompletedProcess[str]") -> str:
    assert done.returncode == 1, done.stdout
    return done.stderr.strip().splitlines()[-1]


def test_import_fedsign_imports_neither_torch_nor_flower_and_adds_no_finder(tmp_path: Path) -> None:
    done = python(
        tmp_path,
        "import sys\nfinders = list(sys.meta_path)\nimport fedsign\nfedsign.__version__\n"
        "assert sys.meta_path == finders\nprint({'torch', 'flwr', 'numpy', 'clients'} & sys.modules.keys())",
    )
    assert (done.stdout, done.stderr) == ("set()\n", "")


@pytest.mark.needs("workers", "ray")
@pytest.mark.slow
@pytest.mark.engines
def test_the_api_in_a_folder_with_packages_of_the_same_names(user_folder: Path) -> None:
    processes = [python(user_folder, SCRIPT, engine) for engine in ENGINES]
    assert [done.returncode for done in processes] == [0] * len(ENGINES), [done.stderr for done in processes]
    losses = {done.stdout.splitlines()[-1] for done in processes}
    assert len(losses) == 1 and losses.pop().count(",") == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_module_of_the_users_that_is_imported_already_is_an_error_that_names_both(
    user_folder: Path, name: str
) -> None:
    said = error_of(python(user_folder, f"import {name}, fedsign\nassert {name}.mine\nfedsign.run()"))
    assert said.startswith("fedsign.errors.ConfigError: ") and said.endswith("rename yours.")
    assert str(HOME / name) in said and str(user_folder.resolve() / name) in said


HIDDEN = (
    "import clients.own",
    "from clients import own",
    "from strategies import mine",
    "from simulations import mine",
)
TRY = """
import fedsign
fedsign.run
for asked in {asked}:
    try:
        exec(asked)
    except ModuleNotFoundError as error:
        print(error)
"""


def test_a_hidden_module_is_an_error_that_names_both(user_folder: Path) -> None:
    done = python(user_folder, TRY.format(asked=HIDDEN))
    for asked, said in zip(HIDDEN, done.stdout.splitlines(), strict=True):
        name = re.split(r"[ .]", asked)[1]
        assert str(HOME / name) in said and str(user_folder.resolve() / name) in said
        assert said.endswith("rename yours.")


def test_the_command_line_finds_its_packages_behind_others_of_their_names(user_folder: Path) -> None:
    (user_folder / "simulations.py").unlink()  # where the command line itself is
    done = subprocess.run(
        [sys.executable, "-P", "-m", "simulations.cli", "list", "strategies"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(user_folder), str(HOME)])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0 and "fedsign" in done.stdout, done.stderr


ABSENT = """
import sys
from fedsign.companions import HOME, import_packages
sys.path[:] = [at for at in sys.path if at == str(HOME) or not (HOME / at / "clients").exists()]  \
# an installation beside
import_packages()
import clients.own
"""


def test_what_is_neither_ours_nor_the_users_is_python_s_own_error(tmp_path: Path) -> None:
    said = error_of(python(tmp_path, ABSENT))
    assert said == "ModuleNotFoundError: No module named 'clients.own'"


@pytest.mark.parametrize("module", [fedsign, fedsign.analyze])
def test_every_name_has_its_type(module: ModuleType) -> None:
    (typed,) = (node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.If))
    imports = [node for node in typed.body if isinstance(node, ast.ImportFrom)]
    assert {alias.name: f"{node.module}:{alias.name}" for node in imports for alias in node.names} == python_api(
        module.__name__
    )
    assert {*python_api(module.__name__)} <= {*dir(module)}


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'fedsign' has no attribute 'simulate'"):
        _ = fedsign.simulate
