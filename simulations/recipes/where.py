"""On which data and with which model a recipe is played, and what that costs where nobody has measured it.

`--data` is a registered set, a folder with one folder a class, or an .npz; `--data-root` the folder of a set's files;
`--model` a registered model.  What is not said stays as the recipe has it.  A cost is estimated before anything is
played: how many trainings of how many rounds there are, the minutes by a round that is timed, and the memory of the
process that played it.
"""

import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fedsign.config import from_dict, merged
from fedsign.errors import ConfigError, FedSignError
from fedsign.plugins import names_of
from fedsign.registry import KINDS, one_of, target_of
from simulations.api import run
from simulations.recipes.cells import on_all_cores

_TIMED_ROUNDS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Where:
    """Tables `data` and `model` of an experiment; empty where nothing was said."""

    data: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)

    @property
    def changes(self) -> dict[str, Any]:
        """Of an experiment: what was said."""
        tables = {"data": dict(self.data), "model": dict(self.model)}
        return {name: table for name, table in tables.items() if table}

    @property
    def set_name(self) -> str:
        """The registered set, or the name of the folder or file."""
        own = self.data.get("path") or (self.data.get("root") if self.data.get("name") == "image_folder" else "")
        return Path(own).stem if own else str(self.data.get("name", ""))

    @property
    def label(self) -> str:
        """For names of folders."""
        return self.title.replace(" with ", "-").replace(":", ".")

    @property
    def title(self) -> str:
        """ "cifar10 with resnet20"."""
        return " with ".join(filter(None, (self.set_name, str(self.model.get("name", "")))))


def where_of(data: str, root: str = "", model: str = "") -> Where:
    """What the options say.

    Raises:
        ConfigError: there is no such data or model, or the data reads no files.
    """
    return Where(data=_data(data, root), model=_model(model))


def _data(data: str, root: str) -> dict[str, Any]:
    path = Path(data).expanduser()
    if data.endswith(".npz") and path.is_file():
        return {"name": "npz", "path": str(path.resolve())}
    if data not in KINDS["dataset"].table and ":" not in data:
        if path.is_dir():
            return {"name": "image_folder", "root": str(path.resolve())}
        raise ConfigError(
            f"--data {data} was given, but it is neither an .npz file nor a folder with one folder a class here, nor "
            f"a registered data set.{one_of(data, KINDS['dataset'].table)}."
        )
    if root and "root" not in names_of("dataset", data):
        raise ConfigError(f"'{data}' reads no files of a folder: drop --data-root.")
    return {"name": data, **({"root": str(Path(root).expanduser().resolve())} if root else {})}


def _model(model: str) -> dict[str, Any]:
    if not model:
        return {}
    target_of("model", model)  # raises for one that there is not
    return {"name": model}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plays:
    """How many trainings a recipe plays, one like `experiment` each, and in how many processes (None: one a core)."""

    trainings: int
    experiment: Mapping[str, Any]
    processes: int | None = None


PlaysOf = Callable[[bool, Where], Plays]
"""Of a quick check or a whole one."""

AT_HOME = Where()
"""As the recipe has it."""


def cost(plays: Plays) -> str:
    """The cost in words, by a round that is timed.

    Raises:
        FedSignError: the experiment cannot be played: its data are missing, or the model does not fit them.
    """
    found = on_all_cores({"timed": partial(_timed, plays.experiment)})["timed"]
    if isinstance(found, str):
        raise ConfigError(
            f"the recipe cannot be played there: {found} (data.root is --data-root here, model.name is --model)"
        )
    seconds, num_bytes = found
    rounds, processes = from_dict(dict(plays.experiment)).rounds, plays.processes or os.cpu_count() or 1
    minutes = plays.trainings * rounds * seconds / min(processes, plays.trainings) / 60
    lasting = f"about {minutes:.0f} minutes" if minutes >= 1 else "less than a minute"
    return (
        f"{plays.trainings} trainings of {rounds} rounds, {lasting} by a timed round of {seconds:.2g} s "
        f"({processes} at a time), {num_bytes / 1e9:.1f} GB a process"
    )


def _timed(experiment: Mapping[str, Any]) -> tuple[float, int] | str:
    """Seconds of a round, what is done once left out, and the most memory that this process has had."""
    try:
        _, first, last = (_seconds(experiment, rounds) for rounds in (1, 1, 1 + _TIMED_ROUNDS))  # one to warm up
    except FedSignError as error:  # as a sentence: not every exception finds its way through a pool of processes
        return str(error)
    unit = 1 if sys.platform == "darwin" else 1024
    return max(last - first, 0.0) / _TIMED_ROUNDS, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _seconds(experiment: Mapping[str, Any], rounds: int) -> float:
    with tempfile.TemporaryDirectory() as root:
        results = {"root": root, "checkpoint_every": rounds}
        began = time.perf_counter()
        run(merged(experiment, {"rounds": rounds, "callbacks": [], "results": results}))
        return time.perf_counter() - began
