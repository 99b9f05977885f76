"""The Flower app for engines with other processes, generated from the installed package.

It holds the ClientApp, the configuration as one string, and the user's own modules: everything imported from the
current folder. Nodes need FedSign installed, but no clone of this repository.
"""

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import tomli_w

from clients.node import EXPERIMENT_KEY, Node
from fedsign._version import __version__
from fedsign.config import ExperimentConfig
from fedsign.registry import PACKAGES

CLIENT_STUB = "fedsign_client_app"  # unlikely to clash with a user's file

_CLIENT_SOURCE = '''"""The ClientApp, from the installed package."""

from clients.app import client_app
from {module} import {name}

app = client_app({name})
'''


def write_app(
    target: Path,
    config: ExperimentConfig,
    *,
    run_config: Mapping[str, str],
    node: type[Node] = Node,
    server_app: str = "flwr.serverapp:ServerApp",
) -> Path:
    """Write the app into a fresh folder `target` and return it.

    Args:
        target: the app's folder.
        config: the experiment as sent.
        run_config: further settings for nodes and server.
        node: the kind of the engine's nodes.
        server_app: the ServerApp, "module:name". Flower requires one even where it does not run it (Ray).
    """
    # a module of an earlier start would still be imported
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    client = _CLIENT_SOURCE.format(module=node.__module__, name=node.__name__)
    (target / f"{CLIENT_STUB}.py").write_text(client, encoding="utf-8")
    for source in user_modules(Path.cwd()):
        copy = target / source.relative_to(Path.cwd().resolve())
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
    components = {"serverapp": server_app, "clientapp": f"{CLIENT_STUB}:app"}
    # as one string: Flower's run configuration has no nested tables
    run_config = {EXPERIMENT_KEY: config.to_toml(), **run_config}
    app = {"publisher": "fedsign", "components": components, "config": run_config}
    project = {
        "name": "fedsign-experiment",
        "version": __version__,
        "license": "Apache-2.0",
        "dependencies": [],
        "description": "A FedSign experiment",
    }
    tree = {"project": project, "tool": {"flwr": {"app": app}}}
    (target / "pyproject.toml").write_text(tomli_w.dumps(tree), encoding="utf-8")
    return target


def user_modules(folder: Path) -> list[Path]:
    """Return the imported source files below `folder` that do not belong to an installed package."""
    folder = folder.resolve()
    paths = set()
    # a list: a lazy module may import another one when it is asked for __file__
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is None or name.partition(".")[0] in (*PACKAGES, "__main__"):
            continue
        path = Path(file)
        if not path.is_absolute() or path.suffix != ".py" or not path.is_file():
            continue  # some libraries create modules without files
        path = path.resolve()
        if path.is_relative_to(folder) and not _is_installed(path, folder):
            paths.add(path)
    return sorted(paths)


def _is_installed(path: Path, folder: Path) -> bool:
    """Whether a file belongs to an environment (.venv) inside the user's folder."""
    parents = [folder / part for part in path.relative_to(folder).parents]
    return "site-packages" in path.parts or any((parent / "pyvenv.cfg").exists() for parent in parents)
