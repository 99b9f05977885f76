"""Data that clients hold themselves, and data below a root of this machine's own.

Most partitions deal one data set out.  Where clients hold data sets of their own, the partition's factory declares as
`client_data` the class that reads them.
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
    """The data sets that the clients of an experiment hold."""

    def __init__(self, config: ExperimentConfig) -> None: ...

    @property
    def is_evaluated_at_clients(self) -> bool:
        """Whether clients test the model on samples of their own, and not the server.

        Raises:
            ConfigError: `server.evaluation` asks for samples that nobody has.
        """
        ...

    def read(self, here: frozenset[int] | None) -> Dataset:
        """One data set, each sample owned by its client, of the clients that are `here`; None: of all that this process may read."""
        ...

    def at_root(self, root: str, here: Collection[int] | None) -> ExperimentConfig:
        """The experiment on a machine that has the data of the clients `here` below a root of its own."""
        ...


def client_data_of(config: ExperimentConfig) -> ClientData | None:
    """What reads the clients' own data; None where one data set is dealt out."""
    data: type[ClientData] | None = PartitionTraits.of(config.partition.name).client_data
    return None if data is None else data(config)


def at_root(config: ExperimentConfig, root: str, here: Collection[int] | None) -> ExperimentConfig:
    """The experiment on a machine that has the data (those of the clients `here`, if clients hold them) below a root of its own."""
    clients = client_data_of(config)
    if clients is not None:
        return clients.at_root(root, here)
    if not {"root", "path"} & {*plugins.names_of(config.data.kind, config.data.name)}:
        return config  # data that come from nowhere
    before = config.data.settings
    own = rooted(config.data, root).items()
    return config.replace(**{f"data.{key}": value for key, value in own if value != before.get(key)})


def rooted(data: DataPart, root: str) -> dict[str, Any]:
    """The reader's settings for data below a root: a folder or a file.

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
            "image_folder, csv, parquet, npz, text_folder or jsonl, or give your reader a setting root."
        )
    return settings
