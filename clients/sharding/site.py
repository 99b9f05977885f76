"""A site's own settings of `client.sharding`: its number of machines, and where they join."""

from collections.abc import Mapping
from typing import Any

from fedsign.config import checked
from fedsign.sharding.section import ShardingSection


class SiteMachines:
    """The table [sharding] of site.toml; see `clients.deployment.settings.SiteTable`."""

    name, section = "sharding", "client.sharding"
    keys, files = ("machines", "listen", "secret_file", "insecure_network"), ("secret_file",)
    consents = ("insecure_network",)

    def check(self, settings: Mapping[str, Any]) -> str:
        """A summary of the settings."""
        sharding = checked(ShardingSection, settings)
        address, _ = sharding.where_machines_join()
        return f"{sharding.machines} machines, which join at {address}"


SITE_MACHINES = SiteMachines()
