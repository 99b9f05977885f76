"""Data that lie at sites: a site's are read by the experiment's reader from the site's own root, and joined where they are.

With `partition.name=sites` every client is a site.  A process reads the sites whose roots it knows: all of them in
process, its own at a node, none at a server, whose data set is then empty and still says what a model has to fit.  So
whatever decides a model's shape comes from the configuration: class names, columns, the shape of a sample.  What is learnt
of data (means, texts, classes) would differ from site to site, and is refused.

A root is a folder or a file.  A reader with the setting `root` gets it as such; one with `path` finds its file (and
`test_path`) in the folder.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsign import plugins
from fedsign.config import DataPart, ExperimentConfig
from fedsign.data.base import AnySamples, Dataset, LazySamples, Samples, features_of
from fedsign.data.checks import checked_dataset
from fedsign.data.columns import num_features
from fedsign.data.normalise import IDENTITY
from fedsign.data.splitting import hold_out_validation
from fedsign.errors import ConfigError, DataError, FedSignError

SITES = "sites"
_TABLES = ("csv", "parquet")


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """What all sites' data have in common, by the configuration."""

    input_shape: tuple[int, ...]
    class_names: tuple[str, ...]


def has_sites(config: ExperimentConfig) -> bool:
    """Whether clients have data of their own."""
    return config.partition.name == SITES


def lies_at_nodes(config: ExperimentConfig) -> bool:
    """Whether sites' data are read by nodes alone, and never by the server."""
    return has_sites(config) and config.engine.name == "superlink"


def root_of(config: ExperimentConfig, site: int) -> str:
    """Where a site's data lie; empty where this process does not know."""
    roots = config.partition.settings["roots"]
    return str(roots[site]) if site < len(roots) else ""


def name_of(config: ExperimentConfig, site: int) -> str:
    """What a site is called: by `partition.names`, or else by its folder."""
    names = config.partition.settings["names"]
    if site < len(names) and names[site]:
        return str(names[site])
    return Path(root_of(config, site)).name or f"site {site}"


def frame_of(config: ExperimentConfig) -> Frame:
    """See Frame.

    Raises:
        ConfigError: the configuration does not say it.
    """
    data = config.data
    class_names = tuple(data.settings.get("class_names") or ())
    if config.task == "classification" and not class_names:
        raise ConfigError(
            f"partition.name=sites was given with data.name={data.name}, but the sites' class names are not known; name them "
            "with --set 'data.class_names=[\"...\"]' (a reader of your own takes a setting class_names)."
        )
    return Frame(input_shape=tuple(config.partition.settings["input_shape"]) or _shape(data), class_names=class_names)


def check_sites(config: ExperimentConfig) -> None:
    """Raise ConfigError for what cannot be, before any data are read."""
    part, num_clients = config.partition, config.partition.num_clients
    for key in ("roots", "names"):
        given = part.settings[key]
        if len(given) > num_clients or (given and key == "names" and len(given) < num_clients):
            raise ConfigError(
                f"partition.{key} holds {len(given)} entries for partition.num_clients={num_clients} sites; expected is one for "
                "each: set partition.num_clients to the number of sites."
            )
    missing = next((site for site in range(num_clients) if not root_of(config, site)), None)
    if missing is not None and not lies_at_nodes(config):
        raise ConfigError(
            f"partition.name=sites was given with engine.name={config.engine.name}, but site {missing} of "
            f"partition.num_clients={num_clients} has no data here; give every site's folder with "
            "--set 'partition.roots=[\"...\"]', or let nodes bring their own: engine.name=superlink."
        )
    normalise = config.data.normalise
    if normalise in ("per_channel", "unit") or (normalise == "default" and config.data.name in _TABLES):
        raise ConfigError(_measured(normalise))
    if config.data.validation_fraction and not is_evaluated_at_clients(config):
        raise ConfigError(
            f"data.validation_fraction={config.data.validation_fraction} was given, but validation samples lie at the sites and "
            "evaluation at the server; set it to 0, or use server.evaluation=clients."
        )
    frame_of(config)


def check_evaluation(config: ExperimentConfig) -> None:
    """Raise ConfigError unless somebody has the test samples that [server] asks for."""
    if config.server.evaluate_clients and not is_evaluated_at_clients(config):
        raise ConfigError(
            f"server.evaluate_clients={config.server.evaluate_clients} was given, but the server evaluates; set it to 0, or let "
            "the clients evaluate: server.evaluation=clients."
        )
    is_evaluated_at_clients(config)


def is_evaluated_at_clients(config: ExperimentConfig) -> bool:
    """Whether sites test the model on samples of their own, or the server on its.

    Raises:
        ConfigError: it was asked for what there is no data for.
    """
    asked, test_root = config.server.evaluation, config.partition.settings.get("test_root")
    if not has_sites(config):
        if asked == "clients":
            raise ConfigError(
                f"server.evaluation=clients was given with partition.name={config.partition.name}, whose clients have no test "
                "samples of their own; use partition.name=sites, or server.evaluation=server."
            )
        return False
    if asked == "server" and not test_root:
        raise ConfigError(
            "server.evaluation=server was given with partition.name=sites, but the server has no test samples; name them with "
            "--set partition.test_root=PATH, or use server.evaluation=clients."
        )
    return asked == "clients" or not test_root


def read_sites(config: ExperimentConfig, here: frozenset[int] | None = None) -> Dataset:
    """The data of the sites that are `here`, a sample's owner being its site; not normalised yet.

    If it is not said which are, they are all in process (and with Ray), and none where nodes have them.
    The test samples are the sites' own, or, where the server evaluates and has some here, the server's.

    Raises:
        DataError: a site's data cannot be read, or do not fit the configuration; it names the site.
    """
    check_sites(config)
    frame = frame_of(config)
    found: dict[int, Dataset] = {}
    if here is None:
        here = frozenset(() if lies_at_nodes(config) else range(config.partition.num_clients))
    for site in sorted(here):
        if root := root_of(config, site):
            with _naming(f"site '{name_of(config, site)}'"):
                found[site] = _read_site(config, root, frame)
    train = {site: data.train for site, data in found.items()}
    test = {site: data.test for site, data in found.items()}
    held = {site: data.validation for site, data in found.items() if data.validation is not None}
    joined_test = _joined(test, frame)
    normalisations = {data.normalisation for data in found.values()}
    test_root = str(config.partition.settings["test_root"])
    if test_root and not is_evaluated_at_clients(config):
        with _naming("the server's test data"):
            server = _read(config, test_root, frame)
            joined_test = _joined({0: server.train, 1: server.test}, frame)
            normalisations.add(server.normalisation)
    if len(normalisations) > 1:
        raise DataError(
            f"data.name={config.data.name} gives sites different normalisations; let it name the same one at every site, or set "
            "data.normalise=none."
        )
    return Dataset(
        train=_joined(train, frame),
        test=joined_test,
        validation=_joined(held, frame) if held else None,
        class_names=frame.class_names,
        normalisation=normalisations.pop() if normalisations else IDENTITY,
    )


def rooted(data: DataPart, root: str) -> dict[str, Any]:
    """The reader's settings for data below a root.

    Raises:
        ConfigError: the reader has no setting for it.
    """
    known = plugins.names_of(data.kind, data.name)
    settings = dict(data.settings)
    if "root" in known:
        settings["root"] = root
    elif "path" in known:
        here = Path(root).expanduser()
        settings["path"] = str(here / settings["path"] if here.is_dir() else here)
        if settings.get("test_path"):
            settings["test_path"] = str((here if here.is_dir() else here.parent) / settings["test_path"])
    else:
        raise ConfigError(
            f"data.name={data.name} takes neither a root nor a path, so that a site cannot say where its data lie; use "
            "image_folder, csv, parquet or npz, or give your reader a setting root."
        )
    return settings


def _read_site(config: ExperimentConfig, root: str, frame: Frame) -> Dataset:
    return hold_out_validation(_read(config, root, frame), config.data.validation_fraction, config.seed)


def _read(config: ExperimentConfig, root: str, frame: Frame) -> Dataset:
    """One root's data, checked against what the configuration says of all."""
    data = config.data
    settings = rooted(data, root)
    if "strict" in plugins.names_of(data.kind, data.name):
        settings["strict"] = True  # nothing may be learnt of one site's table
    if "path" in settings and not Path(root).expanduser().exists():
        raise DataError(f"there is nothing at {root}; correct the node's data-root, or partition.roots.")
    found = checked_dataset(plugins.build(data.kind, data.name, settings, config.seed), name=data.name)
    if found.standardised and data.normalise == "default":
        raise ConfigError(_measured(data.normalise))
    if found.class_names != frame.class_names:
        raise DataError(
            f"the data in {root} have the classes {list(found.class_names)[:20]}; expected are data.class_names="
            f"{list(frame.class_names)[:20]}, whether all of them occur or not."
        )
    if found.input_shape != frame.input_shape:
        raise DataError(
            f"the data in {root} have samples of the shape {list(found.input_shape)}; expected is {list(frame.input_shape)}, "
            "as the configuration says (partition.input_shape, or the reader's settings)."
        )
    return found


def _measured(normalise: str) -> str:
    return (
        f"data.normalise={normalise} measures the data, which would give every site another scale; use data.normalise=none, or "
        "constants with data.mean and data.std."
    )


@contextmanager
def _naming(whose: str) -> Iterator[None]:
    """Say whose data an error is about."""
    try:
        yield
    except FedSignError as error:
        raise type(error)(f"{whose}: {error}") from error


def _shape(data: DataPart) -> tuple[int, ...]:
    """Of one sample, as the reader's settings say it."""
    settings = data.settings
    if data.name == "image_folder":
        return (settings["channels"], settings["size"], settings["size"])
    if data.name in _TABLES and settings["features"]:
        return (num_features(settings["features"], settings.get("levels") or {}),)
    if data.name in _TABLES:
        raise ConfigError(
            "partition.name=sites was given without data.features, but the sites' tables have to agree on it; name the columns "
            'to predict from, such as --set \'data.features=["age", "pressure"]\'.'
        )
    raise ConfigError(
        f"partition.name=sites was given with data.name={data.name}, but the server cannot see the shape of the sites' samples; "
        "say it, such as --set 'partition.input_shape=[1, 28, 28]'."
    )


class _Joined:
    """The samples of several sites as one torch Dataset."""

    def __init__(self, parts: list[AnySamples]) -> None:
        self._parts = parts
        self._starts = np.cumsum([0, *map(len, parts)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Tensor:
        part = int(np.searchsorted(self._starts, index, side="right")) - 1
        features, _ = self._parts[part].batch(torch.tensor([index - int(self._starts[part])]))
        return features_of(features[0])


def _joined(parts: Mapping[int, AnySamples], frame: Frame) -> AnySamples:
    """Samples one after another; each is owned by the number of its part."""
    owners = torch.cat([torch.full((len(part),), site, dtype=torch.int64) for site, part in parts.items()] or [_none()])
    if not parts:
        targets = _none() if frame.class_names else _none().float()
        return Samples(features=torch.zeros(0, *frame.input_shape), targets=targets, owners=owners)
    targets = torch.cat([part.targets for part in parts.values()])
    in_memory = [part for part in parts.values() if isinstance(part, Samples)]
    if len(in_memory) == len(parts):
        if len(parts) == 1:
            return replace(in_memory[0], owners=owners)
        return Samples(features=torch.cat([part.features for part in in_memory]), targets=targets, owners=owners)
    return LazySamples(source=_Joined(list(parts.values())), targets=targets, owners=owners)


def _none() -> Tensor:
    return torch.zeros(0, dtype=torch.int64)
