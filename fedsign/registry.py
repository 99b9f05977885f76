"""Names -> factories, and "package.module:Name" wherever a name is taken.

One table per kind.  A new row is one new file and one line here; the contract tests pick it up.  Targets
are strings so that `fedsign list` and `fedsign --help` import nothing heavy, and so that this package
does not import the packages above it.

A factory's leading parameters are what the program hands in (`Kind.num_given` of them); all others are
its settings: their names, types and defaults are what the configuration accepts (see `fedsign.plugins`).
"""

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsign.errors import ConfigError

PACKAGES = ("fedsign", "strategies", "clients", "simulations")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A family of factories."""

    plural: str
    num_given: int
    table: dict[str, tuple[str, str]]  # name -> (target, one line for `fedsign list`)


KINDS: dict[str, Kind] = {
    "dataset": Kind(
        plural="datasets",
        num_given=1,
        table={
            "digits": (
                "fedsign.data.digits:digits",
                "8x8 digits shipped with scikit-learn, 1,797 images",
            ),
            "mnist": ("fedsign.data.mnist:mnist", "MNIST from a folder, 70,000 images of 28x28"),
            "fashion_mnist": ("fedsign.data.mnist:fashion_mnist", "Fashion-MNIST from a folder"),
        },
    ),
    "partition": Kind(
        plural="partitions",
        num_given=3,
        table={
            "dirichlet": (
                "fedsign.data.partition.dirichlet:dirichlet",
                "label skew: each class is dealt out by a Dirichlet(alpha) draw",
            ),
            "iid": ("fedsign.data.partition.iid:iid", "shuffled and cut into equal parts"),
        },
    ),
    "model": Kind(
        plural="models",
        num_given=2,
        table={
            "mlp": ("fedsign.models.mlp:mlp", "fully connected, ReLU"),
            "cnn": ("fedsign.models.cnn:cnn", "two convolutions with BatchNorm, for small images"),
            "linear": (
                "fedsign.models.mlp:linear",
                "one linear layer (logistic or linear regression)",
            ),
        },
    ),
    "task": Kind(
        plural="tasks",
        num_given=0,
        table={
            "classification": (
                "fedsign.tasks.classification:Classification",
                "cross-entropy on class labels",
            ),
            "regression": (
                "fedsign.tasks.regression:Regression",
                "mean squared error on real targets",
            ),
        },
    ),
    "metric": Kind(
        plural="metrics",
        num_given=2,
        table={
            "accuracy": (
                "fedsign.metrics.accuracy:accuracy",
                "share of samples whose class is right",
            ),
            "rmse": ("fedsign.metrics.rmse:rmse", "root of the mean squared error"),
        },
    ),
    "objective": Kind(
        plural="objectives",
        num_given=0,
        table={
            "plain": ("fedsign.objectives.base:Objective", "the task's loss alone"),
            "fedprox": (
                "fedsign.objectives.fedprox:FedProxObjective",
                "plus (mu/2) distance to the received model",
            ),
            "feddyn": (
                "fedsign.objectives.feddyn:FedDynObjective",
                "plus a linear term of the client's own and a pull",
            ),
            "fedsign": (
                "fedsign.objectives.fedsign:FedSignObjective",
                "minus gamma x soft sign agreement, Eq. 1",
            ),
        },
    ),
    "optimizer": Kind(
        plural="optimizers",
        num_given=3,
        table={
            "sgd": ("fedsign.optim.sgd:sgd", "SGD with momentum"),
            "adamw": ("fedsign.optim.adamw:adamw", "AdamW"),
        },
    ),
    "strategy": Kind(
        plural="strategies",
        num_given=0,
        table={
            "fedavg": ("strategies.fedavg:FedAvg", "mean of the clients' models"),
            "fedprox": ("strategies.fedprox:FedProx", "FedAvg with a proximal term at the clients"),
            "feddyn": (
                "strategies.feddyn:FedDyn",
                "dynamic regularisation, reaches the joint optimum",
            ),
            "fedsign": (
                "strategies.fedsign:FedSign",
                "clients keep the signs of the received model",
            ),
            "flower_fedavg": ("flwr.serverapp.strategy:FedAvg", "Flower's own FedAvg, unmodified"),
        },
    ),
    "engine": Kind(
        plural="engines",
        num_given=0,
        table={
            "in_process": (
                "simulations.backends.in_process:InProcess",
                "clients one after another in this process",
            ),
            "ray": (
                "simulations.backends.ray:Ray",
                "Flower's simulation runtime: clients in Ray actors",
            ),
            "superlink": (
                "simulations.backends.superlink:SuperLink",
                "a local SuperLink with SuperNodes",
            ),
        },
    ),
    "callback": Kind(
        plural="callbacks",
        num_given=0,
        table={
            "progress": ("simulations.callbacks.progress:Progress", "progress bar on the terminal"),
            "report": ("simulations.callbacks.report:Report", "report.html at the end of the run"),
        },
    ),
}


def nearest(given: str, candidates: Iterable[str]) -> str:
    """` Did you mean 'x'?`, or nothing when no candidate is close.

    >>> nearest("fedsing", ["fedavg", "fedsign"])
    " Did you mean 'fedsign'?"
    """
    close = difflib.get_close_matches(given, list(candidates), n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""


def target_of(kind: str, name: str) -> str:
    """The "module:Name" behind a name.

    Raises:
        ConfigError: the name is neither in the table nor of the form "module:Name".
    """
    table = KINDS[kind].table
    if name in table:
        return table[name][0]
    module_name, _, attribute = name.partition(":")
    if module_name and not module_name.startswith(".") and attribute:
        return name
    raise ConfigError(
        f"{kind} '{name}' is not known;{nearest(name, table)} Expected one of {', '.join(sorted(table))}, "
        "or 'module:Name' for your own."
    )


def resolve(kind: str, name: str) -> Callable[..., Any]:
    """The factory behind a name; a user's own module is looked for in the current folder too."""
    target = target_of(kind, name)
    module_name, _, attribute = target.partition(":")
    try:
        module = _import(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # the module is there, but something that it imports is not
        raise ConfigError(
            f"{kind} '{name}': there is no module '{module_name}' in {Path.cwd()} or among the installed "
            f"packages; start from the folder that holds it.{_shadowed(module_name)}"
        ) from error
    try:
        factory = getattr(module, attribute)
    except AttributeError as error:
        raise ConfigError(
            f"{kind} '{name}': module '{module_name}' has no '{attribute}'.{nearest(attribute, dir(module))}"
        ) from error
    if not (inspect.isclass(factory) or inspect.isroutine(factory)):
        raise ConfigError(f"{kind} '{name}' is a {type(factory).__name__}; expected a class or a function.")
    found: Callable[..., Any] = factory
    return found


def _import(module_name: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # last: a user's file must not hide an installed package
        importlib.invalidate_caches()
    return importlib.import_module(module_name)


def _shadowed(module_name: str) -> str:
    package = module_name.partition(".")[0]
    if package in PACKAGES and (Path.cwd() / package).is_dir():
        return f" Your folder '{package}' has the name of a package of FedSign's: rename it."
    return ""
