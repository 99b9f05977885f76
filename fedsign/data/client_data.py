"""Data that clients hold themselves, and data below a local root.

Most partitions deal out one data set.  If clients hold data sets of their own, the partition's factory declares the
class that reads them as its trait `client_data`.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

from fedsign import plugins
from fedsign.config import ExperimentConfig
from fedsign.data.base import Dataset
from fedsign.errors import ConfigError
from fedsign.sections import DataPart
from fedsign.traits import PartitionTraits


class ClientData(Protocol):
    """A reader of the data sets that the clients of an experiment hold."""

    def __init__(self, config: ExperimentConfig) -> None: ...

    @property
    def is_evaluated_at_clients(self) -> bool:
        """Whether clients evaluate on their own samples, instead of the server.

        Raises:
            ConfigError: `server.evaluation` requires samples that do not exist.
        """
        ...

    def read(self, here: frozenset[int] | None) -> Dataset:
        """The data of the clients `here` (None: all that this process may read), each sample owned by its client."""
        ...

    def at_root(self, root: str, here: Collection[int] | None) -> ExperimentConfig:
        """The experiment on a machine that holds the data of the clients `here` below `root`."""
        ...


def client_data_of(config: ExperimentConfig) -> ClientData | None:
    """The reader of the clients' own data; None if one data set is partitioned."""
    data: type[ClientData] | None = PartitionTraits.of(config.partition.name).client_data
    return None if data is None else data(config)


def at_root(config: ExperimentConfig, root: str, here: Collection[int] | None) -> ExperimentConfig:
    """The experiment on a machine with its data below `root`; `here`: clients that hold data of their own there."""
    clients = client_data_of(config)
    if clients is not None:
        return clients.at_root(root, here)
    if not {"root", "path"} & {*plugins.names_of(config.data.kind, config.data.name)}:
        return config  # the data set is not read from disk
    before = config.data.settings
    own = rooted(config.data, root).items()
    return config.replace(**{f"data.{key}": value for key, value in own if value != before.get(key)})


def rooted(data: DataPart, root: str) -> dict[str, Any]:
    """The reader's settings for data below a root, which is a folder or a file.

    Raises:
        ConfigError: the reader has no setting for a location.
    """
    known = plugins.names_of(data.kind, data.name)
    settings = dict(data.settings)
    if "root" in known:
        settings["root"] = root
    elif "path" in known:
        here = Path(root).expanduser()
        # pathlib lets an absolute path win over the folder in front of it
        settings["path"] = str(here / settings["path"] if here.is_dir() else here)
        if settings.get("test_path"):
            settings["test_path"] = str((here if here.is_dir() else here.parent) / settings["test_path"])
    else:
        raise ConfigError(
            f"data.name={data.name} takes neither a root nor a path, so that a site cannot say where its data lie; use "
            "image_folder, csv, parquet, npz, text_folder or jsonl, or give your reader a setting root."
        )
    return settings
