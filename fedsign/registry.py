"""The registry: names of components and their factories; every name may also be "package.module:Name".

One table per kind.  A new component is one new file and one row here, or in the table of its capability
(`fedsign.capabilities`); the contract tests pick it up.  Targets are strings: `fedsign list` and `fedsign --help`
import nothing heavy, and this package does not import the packages above it.

The first `Kind.num_given` parameters of a factory are passed by the program.  All others are its settings: names,
types and defaults define what the configuration accepts (`fedsign.plugins`).
"""

import importlib
import inspect
import logging
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from fedsign.capabilities import CAPABILITIES, absent
from fedsign.capability import Kind
from fedsign.companions import NAMES, HiddenModuleError
from fedsign.errors import ConfigError, FedSignError, nearest

PACKAGES = ("fedsign", *NAMES)
_LONGEST = 300  # characters of a foreign exception's message that are shown
# Old module names in configurations of 0.1: accepted with a warning for one release.
_MOVED = {old: new for each in CAPABILITIES.values() for old, new in each.moved.items()}


KINDS: dict[str, Kind] = {
    "dataset": Kind(
        plural="datasets",
        num_given=1,
        table={
            "digits": ("fedsign.data.digits:digits", "8x8 digits shipped with scikit-learn, 1,797 images"),
            "synthetic": (
                "fedsign.data.synthetic:synthetic",
                "Synthetic(alpha, beta) of FedProx: one softmax model per natural client",
            ),
        },
    ),
    "partition": Kind(
        plural="partitions",
        num_given=3,
        table={
            "dirichlet": (
                "fedsign.data.partition.dirichlet:dirichlet",
                "label skew: each class is split by a Dirichlet(alpha) draw",
            ),
            "iid": ("fedsign.data.partition.iid:iid", "shuffled and cut into equal parts"),
            "shards": (
                "fedsign.data.partition.shards:shards",
                "sorted by label and cut into shards, a few per client",
            ),
            "classes": ("fedsign.data.partition.classes:classes", "label skew: each client holds k classes"),
            "quantity": (
                "fedsign.data.partition.quantity:quantity",
                "quantity skew: sizes by a Dirichlet(alpha) draw, IID labels",
            ),
            "dirichlet_prefix": (
                "fedsign.data.partition.prefix:dirichlet_prefix",
                "dirichlet, cut as in NIID-Bench and FedSign 0.2: favors the last client",
            ),
            "quantity_prefix": (
                "fedsign.data.partition.prefix:quantity_prefix",
                "quantity, cut as in NIID-Bench and FedSign 0.2",
            ),
            "natural": (
                "fedsign.data.partition.natural:natural",
                "the data's natural clients: writers, speakers, hospitals",
            ),
            "virtual": (
                "fedsign.data.partition.virtual:virtual",
                "each client draws its samples from the whole set on first use; for a million clients",
            ),
        },
    ),
    "model": Kind(
        plural="models",
        num_given=2,
        table={
            "mlp": ("fedsign.models.mlp:mlp", "fully connected, ReLU"),
            "cnn": ("fedsign.models.cnn:cnn", "two convolutions with BatchNorm, for small images"),
            "linear": ("fedsign.models.mlp:linear", "one linear layer (logistic or linear regression)"),
            "mcmahan_cnn": ("fedsign.models.cnn:mcmahan_cnn", "McMahan's two convolutions, 1.66 M parameters on MNIST"),
            "niid_cnn": (
                "fedsign.models.cnn:niid_cnn",
                "simple-cnn of NIID-Bench and MOON, for images of at least 16x16",
            ),
            "pfl_cnn": ("fedsign.models.cnn:pfl_cnn", "pfl-research's CNN with dropout, 1.63 M parameters on CIFAR"),
        },
    ),
    "task": Kind(
        plural="tasks",
        table={
            "classification": ("fedsign.tasks.classification:Classification", "cross-entropy on class labels"),
            "regression": ("fedsign.tasks.regression:Regression", "mean squared error on real targets"),
        },
    ),
    "metric": Kind(
        plural="metrics",
        num_given=2,
        table={
            "accuracy": ("fedsign.metrics.accuracy:accuracy", "fraction of samples classified correctly"),
            "balanced_accuracy": (
                "fedsign.metrics.balanced_accuracy:balanced_accuracy",
                "mean over classes of the accuracy within a class",
            ),
            "auc": ("fedsign.metrics.auc:auc", "area under the ROC curve, one-vs-rest mean over classes"),
            "f1": ("fedsign.metrics.f1:f1", "F1, mean over classes"),
            "rmse": ("fedsign.metrics.rmse:rmse", "root of the mean squared error"),
        },
    ),
    "objective": Kind(
        plural="objectives",
        table={
            "plain": ("fedsign.objectives.base:Objective", "the task's loss alone"),
            "fedprox": (
                "fedsign.objectives.fedprox:FedProxObjective",
                "plus mu/2 times the squared distance to the received model",
            ),
            "feddyn": (
                "fedsign.objectives.feddyn:FedDynObjective",
                "plus the client's linear term and a proximal term",
            ),
            "fedsign": (
                "fedsign.objectives.fedsign:FedSignObjective",
                "minus gamma times the soft sign agreement, Eq. 1",
            ),
            "moon": ("fedsign.objectives.moon:MoonObjective", "plus mu times the contrastive loss of representations"),
            "scaffold": (
                "fedsign.objectives.scaffold:ScaffoldObjective",
                "plus a linear term from the server's and the client's control variates",
            ),
        },
    ),
    "optimizer": Kind(
        plural="optimizers",
        num_given=3,
        table={
            "sgd": ("fedsign.optim.sgd:sgd", "SGD with momentum"),
            "adam": ("fedsign.optim.adam:adam", "Adam, with L2 weight decay"),
            "adamw": ("fedsign.optim.adamw:adamw", "AdamW, with decoupled weight decay"),
        },
    ),
    "schedule": Kind(
        plural="schedules",
        num_given=2,
        table={
            "constant": ("fedsign.schedules.constant:constant", "the same learning rate in every round"),
            "exponential": ("fedsign.schedules.exponential:exponential", "multiplied by a factor in every round"),
            "step": ("fedsign.schedules.step:step", "multiplied by a factor every N rounds"),
            "cosine": ("fedsign.schedules.cosine:cosine", "cosine decay from 1 to a final factor"),
            "warmup_cosine": ("fedsign.schedules.warmup:warmup_cosine", "linear warm-up, then cosine decay"),
            "warmup_linear": ("fedsign.schedules.warmup:warmup_linear", "linear warm-up, then linear decay"),
        },
    ),
    "server_optimizer": Kind(
        plural="server_optimizers",
        table={
            "none": ("strategies.server_optim.none:none", "the server takes the aggregate as it is"),
            "sgd": ("strategies.server_optim.sgd:ServerSGD", "SGD with momentum on the pseudo-gradient (FedAvgM)"),
            "adam": ("strategies.server_optim.adam:ServerAdam", "Adam on the pseudo-gradient (FedAdam)"),
            "yogi": ("strategies.server_optim.yogi:ServerYogi", "Yogi on the pseudo-gradient (FedYogi)"),
            "adagrad": ("strategies.server_optim.adagrad:ServerAdagrad", "Adagrad on the pseudo-gradient (FedAdagrad)"),
        },
    ),
    "strategy": Kind(
        plural="strategies",
        table={
            "fedavg": ("strategies.fedavg:FedAvg", "mean of the clients' models"),
            "fedprox": ("strategies.fedprox:FedProx", "FedAvg with a proximal term at the clients"),
            "feddyn": ("strategies.feddyn:FedDyn", "dynamic regularization, converges to the joint optimum"),
            "fedsign": ("strategies.fedsign:FedSign", "clients are regularized toward the signs of the received model"),
            "scaffold": ("strategies.scaffold:SCAFFOLD", "control variates correct the clients' drift"),
            "moon": ("strategies.moon:MOON", "contrastive term that keeps representations near the received model's"),
            "fedpan": ("strategies.fedpan:FedPAN", "FedAvg with position-aware neurons"),
            "flower_fedavg": ("flwr.serverapp.strategy:FedAvg", "Flower's own FedAvg, unmodified"),
            "flower_fedadam": ("strategies.flower.adaptive:fedadam", "Flower's own: Adam at the server"),
            "flower_fedyogi": ("strategies.flower.adaptive:fedyogi", "Flower's own: Yogi at the server"),
            "flower_fedadagrad": ("strategies.flower.adaptive:fedadagrad", "Flower's own: Adagrad at the server"),
            "flower_fedavgm": ("strategies.flower.adaptive:fedavgm", "Flower's own: momentum at the server"),
            "flower_qfedavg": ("strategies.flower.fair:qfedavg", "Flower's own: clients with a higher loss weigh more"),
        },
    ),
    "engine": Kind(
        plural="engines",
        table={
            "in_process": ("simulations.backends.in_process:InProcess", "clients one after another in this process"),
        },
    ),
    "callback": Kind(
        plural="callbacks",
        table={
            "progress": ("simulations.callbacks.progress:Progress", "progress bar on the terminal"),
            "report": ("simulations.callbacks.report:Report", "report.html at the end of the run"),
        },
    ),
}


for _capability in CAPABILITIES.values():  # new kinds first, since any capability may add rows to them
    KINDS |= _capability.kinds
for _capability in CAPABILITIES.values():
    for _kind, _rows in _capability.rows.items():
        KINDS[_kind].table.update(_rows)


def one_of(given: str, names: Iterable[str]) -> str:
    """The nearest name and the list of all names, to complete an error message (no final period).

    >>> one_of("fedsing", ["fedavg", "fedsign"])
    " Did you mean 'fedsign'? Expected one of fedavg, fedsign"
    """
    known = list(names)
    return f"{nearest(given, known)} Expected one of {', '.join(known)}"


def target_of(kind: str, name: str) -> str:
    """The "module:Name" behind a name.

    Raises:
        ConfigError: the name is neither registered nor of the form "module:Name".
    """
    table = KINDS[kind].table
    if name in table:
        return table[name][0]
    module_name, _, attribute = name.partition(":")
    if module_name and not module_name.startswith(".") and attribute:
        return name
    for capability, names in absent("names").items():
        if name in names.get(kind, ()):
            raise ConfigError(
                f"{kind} '{name}' was given, but needs the capability '{capability}', which was deleted from this "
                "FedSign; install one that has it."
            )
    raise ConfigError(f"{kind} '{name}' is not known.{one_of(name, sorted(table))}, or 'module:Name' for your own.")


def resolve(kind: str, name: str) -> Callable[..., Any]:
    """The factory behind a name; a user's own module may also lie in the current folder.

    Raises:
        ConfigError: the module cannot be imported, or the object is missing or not callable.
    """
    module_name, _, attribute = target_of(kind, name).partition(":")
    module = _module(kind, name, module_name)
    try:
        factory = getattr(module, attribute)
    except AttributeError as error:
        raise ConfigError(
            f"{kind} '{name}': module '{module_name}' has no '{attribute}'."
            f"{nearest(attribute, dir(module))}{_shadowed(module_name)}"
        ) from error
    if not (inspect.isclass(factory) or inspect.isroutine(factory)):
        raise ConfigError(f"{kind} '{name}' is of type {type(factory).__name__}; expected a class or a function.")
    resolved: Callable[..., Any] = factory
    return resolved


def error_in(kind: str, name: str, error: BaseException, factory: Callable[..., Any] | None = None) -> ConfigError:
    """An exception in user code as a ConfigError: one sentence that says where it was raised."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    text = next(iter(text.strip().splitlines()), "")
    where = place_of(error) or (_source_of(factory) if factory is not None else "")
    return ConfigError(
        f"{kind} '{name}': {type(error).__name__}{text and ': '}{text[:_LONGEST]}{f' ({where})' if where else ''}"
    )


def _module(kind: str, name: str, module_name: str) -> ModuleType:
    """Import a module; any failure becomes a ConfigError."""
    if module_name in _MOVED:
        moved_to = _MOVED[module_name]
        logging.getLogger("fedsign").warning(
            "%s '%s': module %s is now %s; change the name", kind, name, module_name, moved_to
        )
        module_name = moved_to
    try:
        return _import(module_name)
    except FedSignError:
        raise
    except HiddenModuleError as error:
        raise ConfigError(f"{kind} '{name}': {error}") from error
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise error_in(kind, name, error) from error  # the module exists, but one of its own imports does not
        raise ConfigError(
            f"{kind} '{name}': there is no module '{module_name}' in {Path.cwd()} or among the installed "
            f"packages; start from the folder that holds it.{_shadowed(module_name)}"
        ) from error
    except (Exception, SystemExit) as error:  # a script may call sys.exit on import
        raise error_in(kind, name, error) from error


def _import(module_name: str) -> ModuleType:
    if module_name not in sys.modules and "" not in sys.path and (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)  # last: a user's file must not hide an installed package
        importlib.invalidate_caches()
    return importlib.import_module(module_name)


def _shadowed(module_name: str) -> str:
    """A hint if another module of the same name hides the user's file or folder."""
    package = module_name.partition(".")[0]
    module = sys.modules.get(package)
    if module is None:
        return ""
    paths = {
        Path(path).resolve() for path in (getattr(module, "__file__", None) or "", *getattr(module, "__path__", ()))
    }
    for own in (Path.cwd() / f"{package}.py", Path.cwd() / package):
        if own.exists() and own.resolve() not in paths:
            owner = "a package of FedSign's" if package in PACKAGES else "an installed module"
            return f" Your {'folder' if own.is_dir() else 'file'} '{own.name}' has the name of {owner}: rename it."
    return ""


def place_of(error: BaseException) -> str:
    """The innermost line of user code in the traceback, or nothing."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    return next((f"{frame.filename}:{frame.lineno}" for frame in reversed(frames) if _is_own(frame.filename)), "")


def _is_own(filename: str) -> bool:
    """Whether a file is user code: not the standard library, not an installed package, not FedSign."""
    path, here = Path(filename).resolve(), Path(__file__).resolve().parent.parent
    folders = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [here / package for package in PACKAGES]
    return not filename.startswith("<") and not any(path.is_relative_to(folder) for folder in folders)


def _source_of(factory: Callable[..., Any]) -> str:
    """Where a factory is defined, if known."""
    code = getattr(factory.__init__ if inspect.isclass(factory) else factory, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""
