"""A federation's folder on the server's machine: who belongs to it, and where its files lie.

`federation.toml` is the truth about the sites; what the SuperLink knows is made equal to it (`membership`).
"""

import datetime as dt
import ipaddress
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import tomli_w

from fedsign.errors import ConfigError
from fedsign.storage.digests import digest_of
from fedsign.storage.disk import write_text
from fedsign.versions import versions

FILE = "federation.toml"

_HEADER = "# Written by 'fedsign deploy'; change it with add-site, revoke and renew.\n\n"
_SITE_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_HOST_NAME = re.compile(r"(?![\d.]+$)(?!-)[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63})*")  # digits alone are an address


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """One site; `public_key` is "" in an insecure federation."""

    name: str
    partition: int
    public_key: str
    state: str = "active"  # or revoked
    max_examples: int = 0  # that its replies may count; 0: as the experiment says
    since: str = field(default_factory=lambda: f"{dt.datetime.now(dt.UTC):%Y-%m-%d}")

    @property
    def is_active(self) -> bool:
        """Whether it may take part."""
        return self.state == "active"


@dataclass(frozen=True, kw_only=True, slots=True)
class Federation:
    """`hosts`: the server's names and addresses, the first of which sites connect to; `bind`: where it listens."""

    folder: Path
    name: str
    hosts: tuple[str, ...]
    port: int = 8000
    bind: str = "0.0.0.0"
    insecure: bool = False
    versions: Mapping[str, str] = field(default_factory=versions)
    sites: tuple[Site, ...] = ()

    @property
    def active(self) -> tuple[Site, ...]:
        """Sites that may take part, in the order of their partitions."""
        return tuple(sorted((site for site in self.sites if site.is_active), key=lambda site: site.partition))

    @property
    def server(self) -> Path:
        """What the SuperLink needs."""
        return self.folder / "server"

    @property
    def certificate(self) -> Path:
        """The server's."""
        return self.server / "server.pem"

    @property
    def authority(self) -> Path:
        """The CA's certificate, which all know."""
        return self.folder / "ca" / "ca.pem"

    @property
    def trusted(self) -> Path | None:
        """The CA that vouches for the server; None without TLS."""
        return None if self.insecure else self.authority

    @property
    def authority_key(self) -> Path:
        """The CA's key, which is in no kit."""
        return self.folder / "ca" / "ca.key"

    @property
    def address(self) -> str:
        """What sites connect to."""
        return with_port(self.hosts[0], self.port)

    @property
    def local_host(self) -> str:
        """How processes of the server's machine reach the SuperLink."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.bind, self.bind)

    @property
    def local_address(self) -> str:
        """The same with the port."""
        return with_port(self.local_host, self.port)

    def kit(self, site: str) -> Path:
        """The folder that is sent to a site."""
        return self.folder / "kits" / site

    def site(self, name: str) -> Site:
        """By its name.

        Raises:
            ConfigError: there is none.
        """
        for site in self.sites:
            if site.name == name:
                return site
        known = ", ".join(site.name for site in self.sites) or "none yet"
        raise ConfigError(f"the federation {self.name} has no site '{name}'; its sites are: {known}.")

    def with_site(self, name: str, *, public_key: str, max_examples: int = 0) -> "Federation":
        """One site more, which gets the lowest partition that no active site has.

        Raises:
            ConfigError: the name or the key is in use, or the name cannot be one.
        """
        check_site_name(name)
        for site in self.sites:
            if site.name == name:
                raise ConfigError(f"a site '{name}' is there already ({site.state}); give the new one another name.")
            if public_key and site.public_key == public_key:
                raise ConfigError(f"this key is that of site '{site.name}' ({site.state}); every site needs its own.")
        taken = {site.partition for site in self.active}
        partition = next(index for index in range(len(taken) + 1) if index not in taken)
        return replace(
            self,
            sites=(*self.sites, Site(name=name, partition=partition, public_key=public_key, max_examples=max_examples)),
        )

    def without(self, name: str) -> "Federation":
        """The site revoked; its key stays on record, so that it is never taken again."""
        gone = replace(self.site(name), state="revoked")
        return replace(self, sites=tuple(gone if site.name == name else site for site in self.sites))

    def write(self) -> None:
        """To federation.toml."""
        tree = asdict(self)
        del tree["folder"]
        tree["sites"] = [site | {"digest": _digest(site)} for site in tree["sites"]]
        write_text(self.folder / FILE, _HEADER + tomli_w.dumps(tree))


def open_federation(folder: Path) -> Federation:
    """Read federation.toml.

    Raises:
        ConfigError: the folder holds no federation, or the file is damaged.
    """
    path = folder / FILE
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
        for site in tree["sites"]:
            if site.pop("digest", None) not in (None, _digest(site)):
                raise ValueError(f"site {site.get('name')} is not as 'fedsign deploy' wrote it")
        tree["sites"] = tuple(Site(**site) for site in tree["sites"])
        return Federation(folder=folder.resolve(), **tree | {"hosts": tuple(tree["hosts"])})
    except FileNotFoundError as error:
        raise ConfigError(
            f"{folder} holds no federation ({FILE} is missing); name another folder, or make one with 'fedsign "
            "deploy init'."
        ) from error
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); restore it from a copy.") from error


def _digest(site: Mapping[str, Any]) -> str:
    """Of a site's table: whose key speaks for which partition is not read back unchecked."""
    return digest_of(repr(sorted(site.items())).encode())


def check_site_name(name: str) -> None:
    """Raise ConfigError unless it can be a folder's and a unit's name."""
    if not _SITE_NAME.fullmatch(name):
        raise ConfigError(
            f"'{name}' cannot be a site's name; expected are small letters, digits and '-', a letter or digit first."
        )


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address, or None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def check_host(host: str) -> None:
    """Raise ConfigError unless it is a name or an address, without a port."""
    if address_of(host) is None and not _HOST_NAME.fullmatch(host):
        raise ConfigError(
            f"--host {host} is neither a name nor an address; expected is such as fl.example.org or 192.0.2.10, "
            "the port is given with --port."
        )


def check_bind(bind: str) -> None:
    """Raise ConfigError unless it is an address."""
    if address_of(bind) is None:
        raise ConfigError(
            f"--bind {bind} is no address; expected is one of this machine's, such as 192.0.2.10, or 0.0.0.0 for all "
            "of them."
        )


def with_port(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
