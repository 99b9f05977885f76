"""The Flower app that engines outside this process need, generated from the installed package.

It holds two stubs, the configuration as one string, and the modules of the user's own: everything that
was imported from the current folder.  No clone of this project is needed, only its installation on the
nodes.
"""

import shutil
import sys
import uuid
from pathlib import Path
from typing import Any

import tomli_w

import fedsign
from clients.node import EXPERIMENT_KEY, RUN_KEY, STATE_KEY, is_deployed
from fedsign.config import ExperimentConfig
from fedsign.data import sites
from fedsign.disk import write_text
from fedsign.registry import PACKAGES

FOLDER_KEY = "run-folder"
WORKING_KEY = "working-folder"  # the command's, to which relative paths of the configuration belong
FOLLOWER_KEY = "followed-by"  # the command's process id; a run that nobody follows ends
CLIENT_STUB, SERVER_STUB = "fedsign_client_app", "fedsign_server_app"  # no names that a user's own file may have

_CLIENT_SOURCE = '''"""The ClientApp, from the installed package."""

import clients.app

app = clients.app.app
'''
_SERVER_SOURCE = '''"""The ServerApp, from the installed package."""

import simulations.server_app

app = simulations.server_app.app
'''


def write_app(
    target: Path, config: ExperimentConfig, *, run_folder: Path, state_folder: Path, followed_by: int | None = None
) -> Path:
    """Write the app into a fresh folder `target` and return it.

    `followed_by`: the process that the ServerApp does not outlive, where a SuperLink does.
    """
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    (target / f"{CLIENT_STUB}.py").write_text(_CLIENT_SOURCE, encoding="utf-8")
    (target / f"{SERVER_STUB}.py").write_text(_SERVER_SOURCE, encoding="utf-8")
    for source in user_modules(Path.cwd()):
        copy = target / source.relative_to(Path.cwd().resolve())
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
    run_config = {
        EXPERIMENT_KEY: _without_roots(config).to_toml(),
        FOLDER_KEY: str(run_folder.resolve()),
        RUN_KEY: _name_of(run_folder),
    }
    if not is_deployed(config):  # where a node's states lie is the node's affair
        run_config[STATE_KEY] = str(state_folder.resolve())
    if followed_by is not None:
        run_config |= {FOLLOWER_KEY: str(followed_by), WORKING_KEY: str(Path.cwd())}
    (target / "pyproject.toml").write_text(tomli_w.dumps(_pyproject(run_config)), encoding="utf-8")
    return target


def _without_roots(config: ExperimentConfig) -> ExperimentConfig:
    """What a node may know: where other sites' data lie is not among it."""
    return config.replace(**{"partition.roots": []}) if sites.lies_at_nodes(config) else config


def _name_of(run_folder: Path) -> str:
    """What nodes call a run: the same whenever it is resumed, and no other run's."""
    path = run_folder / "name"
    if not path.exists():
        write_text(path, f"{run_folder.resolve().name}-{uuid.uuid4().hex[:12]}")
    return path.read_text(encoding="utf-8")


def user_modules(folder: Path) -> list[Path]:
    """The source files below `folder` that this process has imported and that no package brings."""
    folder = folder.resolve()
    found = set()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is None or name.partition(".")[0] in (*PACKAGES, "__main__"):
            continue
        path = Path(file)
        if not path.is_absolute() or path.suffix != ".py" or not path.is_file():
            continue  # some libraries make modules up
        path = path.resolve()
        if path.is_relative_to(folder) and not _is_installed(path, folder):
            found.add(path)
    return sorted(found)


def _is_installed(path: Path, folder: Path) -> bool:
    """Whether a file belongs to an environment (.venv) that lies in the user's folder."""
    parents = [folder / part for part in path.relative_to(folder).parents]
    return "site-packages" in path.parts or any((parent / "pyvenv.cfg").exists() for parent in parents)


def _pyproject(run_config: dict[str, str]) -> dict[str, Any]:
    return {
        "project": {
            "name": "fedsign-experiment",
            "version": fedsign.__version__,
            "description": "A FedSign experiment",
            "license": "Apache-2.0",
            "dependencies": [],
        },
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "fedsign",
                    "components": {"serverapp": f"{SERVER_STUB}:app", "clientapp": f"{CLIENT_STUB}:app"},
                    "config": run_config,
                }
            }
        },
    }
