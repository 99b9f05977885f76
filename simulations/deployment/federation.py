"""A federation's folder on the server's machine: its sites, and the paths of its files.

`federation.toml` is authoritative; the SuperLink's registrations are updated to match it (`membership`).
"""

import datetime as dt
import ipaddress
import os
import pwd
import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import tomli_w

from fedsign.errors import ConfigError
from fedsign.storage.digests import digest_of
from fedsign.storage.disk import write_text
from fedsign.storage.texts import read_marked
from fedsign.versions import versions

FILE = "federation.toml"

_HEADER = "# Written by 'fedsign deploy'; change it with add-site, revoke and renew.\n\n"
_SITE_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_HOST_NAME = re.compile(r"(?![\d.]+$)(?!-)[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63})*")  # not digits alone


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """A site. `public_key` is "" in an insecure federation."""

    name: str
    partition: int
    public_key: str
    state: str = "active"  # or revoked
    max_examples: int = 0  # maximum count that a reply may claim; 0: the experiment's setting
    since: str = field(default_factory=lambda: f"{dt.datetime.now(dt.UTC):%Y-%m-%d}")

    @property
    def is_active(self) -> bool:
        """Whether the site may take part."""
        return self.state == "active"


@dataclass(frozen=True, kw_only=True, slots=True)
class Federation:
    """A federation. `hosts`: names and addresses, the first of which sites connect to; `bind`: where it listens."""

    folder: Path
    name: str
    hosts: tuple[str, ...]
    port: int = 8000
    bind: str = "0.0.0.0"
    insecure: bool = False
    plain_supernodes: bool = False  # also lets in those of Flower, which sign the time of a request alone
    versions: Mapping[str, str] = field(default_factory=versions)
    sites: tuple[Site, ...] = ()

    @property
    def active(self) -> tuple[Site, ...]:
        """Sites that may take part, in the order of their partitions."""
        return tuple(sorted((site for site in self.sites if site.is_active), key=lambda site: site.partition))

    @property
    def server(self) -> Path:
        """The SuperLink's folder."""
        return self.folder / "server"

    @property
    def certificate(self) -> Path:
        """The server's certificate."""
        return self.server / "server.pem"

    @property
    def authority(self) -> Path:
        """The CA's certificate, which every site has."""
        return self.folder / "ca" / "ca.pem"

    @property
    def trusted(self) -> Path | None:
        """The CA that signed the server's certificate; None without TLS."""
        return None if self.insecure else self.authority

    @property
    def authority_key(self) -> Path:
        """The CA's private key, which is in no kit."""
        return self.folder / "ca" / "ca.key"

    @property
    def address(self) -> str:
        """The address that sites connect to."""
        return with_port(self.hosts[0], self.port)

    @property
    def local_host(self) -> str:
        """The host by which local processes reach the SuperLink."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.bind, self.bind)

    @property
    def local_address(self) -> str:
        """`local_host` with the port."""
        return with_port(self.local_host, self.port)

    def kit(self, site: str) -> Path:
        """Return a site's folder, which is sent to the site."""
        return self.folder / "kits" / site

    def site(self, name: str) -> Site:
        """Return a site by name.

        Raises:
            ConfigError: there is none.
        """
        for site in self.sites:
            if site.name == name:
                return site
        known = ", ".join(site.name for site in self.sites) or "none yet"
        raise ConfigError(f"the federation {self.name} has no site '{name}'; its sites are: {known}.")

    def with_site(self, name: str, *, public_key: str, max_examples: int = 0) -> "Federation":
        """Add a site, at the lowest partition without an active site.

        Raises:
            ConfigError: the name or the key is in use, or the name is invalid.
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
        """Revoke a site. Its key stays on record, so that it is never accepted again."""
        gone = replace(self.site(name), state="revoked")
        return replace(self, sites=tuple(gone if site.name == name else site for site in self.sites))

    def write(self) -> None:
        """Write federation.toml."""
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
        tree = tomllib.loads(read_marked(path))
        for site in tree["sites"]:
            if site.pop("digest", None) not in (None, _digest(site)):
                raise ValueError(f"site {site.get('name')} is not as 'fedsign deploy' wrote it")
        tree["sites"] = tuple(Site(**site) for site in tree["sites"])
        return Federation(folder=folder.resolve(), **tree | {"hosts": tuple(tree["hosts"])})
    except PermissionError as error:
        raise whose(folder) from error
    except FileNotFoundError as error:
        raise ConfigError(
            f"{folder} holds no federation ({FILE} is missing); name another folder, or make one with 'fedsign "
            "deploy init'."
        ) from error
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); restore it from a copy.") from error


def whose(folder: Path) -> ConfigError:
    """Return the error of an account that may not use a folder: it names the one that may."""
    for path in (folder := folder.absolute(), *folder.parents):
        with suppress(PermissionError):  # below a folder that is closed to this account
            owner = name_of(path.stat().st_uid)
            return ConfigError(
                f"{folder} belongs to {owner}, but this is {name_of(os.getuid())}; run this command as {owner}: sudo "
                f"-u {owner} fedsign ..."
            )
    raise AssertionError("everybody may look at the root")


def name_of(account: int) -> str:
    """Return an account's name, or its number if it has none."""
    with suppress(KeyError):
        return pwd.getpwuid(account).pw_name
    return str(account)


def _digest(site: Mapping[str, Any]) -> str:
    """Return a digest of a site's table, to detect edits: the table decides whose key speaks for which partition."""
    return digest_of(repr(sorted(site.items())).encode())


def check_site_name(name: str) -> None:
    """Raise ConfigError unless the name is valid for a folder and a systemd unit."""
    if not _SITE_NAME.fullmatch(name):
        raise ConfigError(
            f"'{name}' cannot be a site's name; expected small letters, digits and '-', a letter or digit first."
        )


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Parse an address; None for a host name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def check_host(host: str) -> None:
    """Raise ConfigError unless it is a host name or an address, without a port."""
    if address_of(host) is None and not _HOST_NAME.fullmatch(host):
        raise ConfigError(
            f"--host {host} is neither a name nor an address; expected such as fl.example.org or 192.0.2.10, "
            "the port is given with --port."
        )


def check_bind(bind: str) -> None:
    """Raise ConfigError unless it is an address."""
    if address_of(bind) is None:
        raise ConfigError(
            f"--bind {bind} is no address; expected one of this machine's, such as 192.0.2.10, or 0.0.0.0 for all "
            "of them."
        )


def with_port(host: str, port: int) -> str:
    """Format host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
