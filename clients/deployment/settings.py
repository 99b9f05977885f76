"""What a site sets for itself: the keys of a SuperNode's configuration, and tables of a bundle's site.toml.

Light, since `fedsign deploy` reads and writes them without torch and Flower.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from fedsign.extensions import extensions

PARTITIONS_KEY, ROOT_KEY, SITE_KEY, DEVICE_KEY = "partitions", "data-root", "site", "device"
STATE_ROOT_KEY, SHARE_KEY = "state-root", "share-details"


class SiteTable(Protocol):
    """Settings of a capability that each site has of its own (extension point `site_table`).

    In a node's configuration the key of `machines` in the table `sharding` is `sharding-machines`.
    """

    name: str
    section: str  # of the experiment's configuration, over which they win
    keys: tuple[str, ...]
    files: tuple[str, ...]  # those of the keys that name a file
    consents: tuple[str, ...]  # those that nobody but the site may set to true, once it sets any

    def check(self, settings: Mapping[str, Any]) -> str:
        """What `fedsign deploy check` says of them.

        Raises:
            ConfigError: they cannot be used.
        """
        ...


def site_tables() -> dict[str, SiteTable]:
    """Those of all capabilities, by their names."""
    return {table.name: table for table in extensions("site_table")}


def node_keys() -> Iterator[tuple[str, str, str, str]]:
    """(table, key, key in a node's configuration, key of the experiment) of each setting."""
    for table in site_tables().values():
        for key in table.keys:
            yield table.name, key, f"{table.name}-{key.replace('_', '-')}", f"{table.section}.{key}"


def consents(own: Mapping[str, Any]) -> list[str]:
    """What a node's configuration allows that nobody but the site may."""
    return [
        f"{table}.{key}"
        for table, key, name, _ in node_keys()
        if key in site_tables()[table].consents and own.get(name)
    ]
