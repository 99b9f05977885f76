"""A site's own settings: keys of a SuperNode's configuration, and tables in the site.toml of a kit.

This module avoids torch and Flower, because `fedsign deploy` imports it.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from fedsign.extensions import extensions

PARTITIONS_KEY, ROOT_KEY, SITE_KEY, DEVICE_KEY = "partitions", "data-root", "site", "device"
STATE_ROOT_KEY, SHARE_KEY = "state-root", "share-details"


class SiteTable(Protocol):
    """A capability's settings that each site makes for itself (extension point `site_table`).

    In a node's configuration, `machines` of the table `sharding` becomes `sharding-machines`.
    """

    name: str
    section: str  # section of the experiment that they override
    keys: tuple[str, ...]
    files: tuple[str, ...]  # keys that name a file
    consents: tuple[str, ...]  # keys that only the site may set to true, once it sets any

    def check(self, settings: Mapping[str, Any]) -> str:
        """A summary for `fedsign deploy check`.

        Raises:
            ConfigError: the settings are invalid.
        """
        ...


def site_tables() -> dict[str, SiteTable]:
    """The site tables of all capabilities, by name."""
    return {table.name: table for table in extensions("site_table")}


def node_keys() -> Iterator[tuple[str, str, str, str]]:
    """(table, key, key in a node's configuration, key of the experiment) for each setting."""
    for table in site_tables().values():
        for key in table.keys:
            yield table.name, key, f"{table.name}-{key.replace('_', '-')}", f"{table.section}.{key}"


def consents(own: Mapping[str, Any]) -> list[str]:
    """The consents given in a node's configuration."""
    return [
        f"{table}.{key}"
        for table, key, name, _ in node_keys()
        if key in site_tables()[table].consents and own.get(name)
    ]
