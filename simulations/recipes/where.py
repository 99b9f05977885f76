"""The data and model of a recipe, and its estimated cost where it was never measured.

`--data` is a registered data set, a folder with a subfolder per class, or an .npz file; `--data-root` the folder of a
data set's files; `--model` a registered model.  By default the recipe's own are used.  The cost is estimated before
anything is run: the number of trainings and their rounds, minutes by a timed round, and that process's memory.
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
    """The experiment's `data` and `model` tables; empty by default."""

    data: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)

    @property
    def changes(self) -> dict[str, Any]:
        """The changes to the experiment."""
        tables = {"data": dict(self.data), "model": dict(self.model)}
        return {name: table for name, table in tables.items() if table}

    @property
    def set_name(self) -> str:
        """The registered data set; `npz` and `image_folder` for files of the user, whatever these are called."""
        return str(self.data.get("name", ""))

    @property
    def label(self) -> str:
        """The label in names of folders."""
        return self.title.replace(" with ", "-").replace(":", ".").replace("/", ".folder")

    @property
    def title(self) -> str:
        """The title, "cifar10 with resnet20"; a file is "mine.npz", a folder "mine/"."""
        data = self.set_name
        if path := self.data.get("path"):
            data = Path(path).name
        elif data == "image_folder" and (root := self.data.get("root")):
            data = f"{Path(root).name}/"
        return " with ".join(filter(None, (data, str(self.model.get("name", "")))))


def where_of(data: str, root: str = "", model: str = "") -> Where:
    """Parse the options.

    Raises:
        ConfigError: there is no such data set or model, or `root` is given for data that have none.
    """
    return Where(data=_data(data, root), model=_model(model))


def _data(data: str, root: str) -> dict[str, Any]:
    path = Path(data).expanduser()
    is_file = data.endswith(".npz") and path.is_file()
    if is_file or (data not in KINDS["dataset"].table and ":" not in data and path.is_dir()):
        if root:
            raise ConfigError(f"--data {data} is a path already: drop --data-root.")
        key, name = ("path", "npz") if is_file else ("root", "image_folder")
        return {"name": name, key: str(path.resolve())}
    if data not in KINDS["dataset"].table and ":" not in data:
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
    target_of("model", model)  # raises for an unknown model
    return {"name": model}


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """How many trainings a recipe needs, each like `experiment`, and in how many processes (None: one per core).

    Timing a round takes a few; `known` describes the cost where one takes too long.
    """

    trainings: int = 0
    experiment: Mapping[str, Any] = field(default_factory=dict)
    processes: int | None = None
    known: str = ""


BudgetOf = Callable[[bool, Where], Budget]
"""Returns the budget of a quick or a full check."""

AT_HOME = Where()
"""The recipe's own data and model."""


def cost(budget: Budget) -> str:
    """Describe the cost, estimated from a timed round.

    Raises:
        FedSignError: the experiment cannot be run: its data are missing, or do not fit the model.
    """
    if budget.known:
        return budget.known
    # in a process of its own, whose peak memory is that of one training, and whose thread count is a training's
    found = on_all_cores({"timed": partial(_timed, budget.experiment)})["timed"]
    if isinstance(found, str):
        raise ConfigError(f"the recipe cannot be checked there: {found} (model.name is --model here)")
    seconds, num_bytes = found
    rounds, processes = from_dict(dict(budget.experiment)).rounds, budget.processes or os.cpu_count() or 1
    # fewer trainings than processes leave cores idle
    minutes = budget.trainings * rounds * seconds / min(processes, budget.trainings) / 60
    lasting = f"about {minutes:.0f} minutes" if minutes >= 1 else "less than a minute"
    return (
        f"{budget.trainings} trainings of {rounds} rounds, {lasting} by a timed round of {seconds:.2g} s "
        f"({processes} at a time), {num_bytes / 1e9:.1f} GB a process"
    )


def in_options(error: FedSignError) -> str:
    """Return an error's text, with the option of `fedsign reproduce` for the folder of the data."""
    return str(error).replace("--set data.root=PATH", "--data-root PATH")


def _timed(experiment: Mapping[str, Any]) -> tuple[float, int] | str:
    """Return the seconds of a round, without one-time work, and this process's peak memory."""
    try:
        _, first, last = (_seconds(experiment, rounds) for rounds in (1, 1, 1 + _TIMED_ROUNDS))  # one warm-up
    except FedSignError as error:  # as text, because not every exception can be pickled
        return in_options(error)
    # ru_maxrss: bytes on macOS, KiB on Linux
    unit = 1 if sys.platform == "darwin" else 1024
    # the difference of two runs cancels their set-up; max, as a busy machine may turn it around
    return max(last - first, 0.0) / _TIMED_ROUNDS, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _seconds(experiment: Mapping[str, Any], rounds: int) -> float:
    with tempfile.TemporaryDirectory() as root:
        results = {"root": root, "checkpoint_every": rounds}
        began = time.perf_counter()
        run(merged(experiment, {"rounds": rounds, "callbacks": [], "results": results}))
        return time.perf_counter() - began
