"""The kit sent to a site, and the server's folder: scripts, systemd units, instructions.

A kit holds the CA's certificate, never its key. It holds the site's private key only if the site did not generate
one itself.
"""

import tarfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
from jinja2 import Environment, PackageLoader, StrictUndefined

from clients.deployment.settings import SiteTable, node_keys, site_tables
from fedsign.errors import ConfigError
from fedsign.storage.owned import check_writable, writing
from fedsign.storage.texts import read_marked
from simulations.deployment.federation import Federation, Site, with_port

SITE_FILE = "site.toml"
_FACTS = frozenset({"name", "site", "partition", "host", "port", "insecure", "versions"})
_EXPECTED: dict[str, tuple[type, str]] = {
    "data_root": (str, "a text in quotes"),
    "device": (str, "a text in quotes"),
    "share_details": (bool, "true or false"),
    "federation": (dict, "the table [federation] that the kit came with"),
}
KEY_FILE, PUBLIC_FILE, AUTHORITY_FILE = "key", "key.pub", "ca.pem"


@dataclass(frozen=True, kw_only=True, slots=True)
class StartupKit:
    """A site's kit. `data_root` and `device` are the site's own; "" for the experiment's.

    `share_details`: whether tracebacks and label counts may leave the site. `tables`: settings of capabilities
    (`clients.deployment.settings`).
    """

    folder: Path
    facts: Mapping[str, Any]
    data_root: str = ""
    device: str = ""
    share_details: bool = False
    tables: Mapping[str, Mapping[str, str | int]] = field(default_factory=dict)

    @property
    def key(self) -> Path:
        """The site's private key."""
        return self.folder / KEY_FILE

    @property
    def trusted(self) -> Path | None:
        """The CA that signed the server's certificate; None without TLS."""
        return None if self.facts["insecure"] else self.folder / AUTHORITY_FILE

    @property
    def address(self) -> str:
        """The SuperLink's address."""
        return with_port(self.facts["host"], self.facts["port"])

    @property
    def data_folder(self) -> Path | None:
        """The site's data folder; a relative path starts at the kit."""
        return (self.folder / Path(self.data_root).expanduser()).resolve() if self.data_root else None

    def node_config(self) -> dict[str, str | int]:
        """Return the node configuration that the SuperNode passes to its ClientApp."""
        root, shares = str(self.data_folder or ""), self.share_details
        own: dict[str, str | int] = {"data-root": root, "device": self.device, "share-details": shares}
        config = {"partition-id": self.facts["partition"], "site": self.facts["site"]}
        config |= {key: value for key, value in own.items() if value}
        for table, name, key, _ in node_keys():
            if name in self.tables.get(table, {}):
                config[key] = self.tables[table][name]
        return config


def open_startup_kit(folder: Path) -> StartupKit:
    """Read site.toml.

    Raises:
        ConfigError: there is none, or it is not valid.
    """
    path = folder / SITE_FILE
    try:
        tree = tomllib.loads(read_marked(path))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}); name the folder of a site's kit, as unpacked."
        ) from error
    except ValueError as error:
        raise ConfigError(
            f'{path} is no TOML ({error}); texts stand in quotes there, such as data_root = "/data".'
        ) from error
    # what installed capabilities let a site set
    own = site_tables()
    expected = _EXPECTED | dict.fromkeys(own, (dict, "a table"))
    # "federation" is required; the other keys have defaults
    for key in [*tree, "federation"]:
        if key not in expected:
            raise ConfigError(f"{path} has the unknown key '{key}'; expected {', '.join(expected)}.")
        kind, expectation = expected[key]
        if not isinstance(tree.get(key), kind):
            raise ConfigError(f"{path} has {key} = {tree.get(key)!r}; expected {expectation}.")
    facts = tree.pop("federation")
    missing = _FACTS - set(facts)
    if missing:
        raise ConfigError(
            f"{path} has no {min(missing)} in [federation]; unpack the kit again, and edit the two lines above only."
        )
    tables = {name: _table_of(own[name], tree.pop(name), path) for name in own if name in tree}
    return StartupKit(folder=folder.resolve(), facts=facts, tables=tables, **tree)


def _table_of(table: SiteTable, given: Mapping[str, Any], path: Path) -> dict[str, str | int]:
    """Return a table of settings; relative paths start at the kit.

    Raises:
        ConfigError: it is not a valid table.
    """
    if not given.keys() <= {*table.keys}:
        raise ConfigError(f"{path} has {table.name} = {given!r}; expected a table of {', '.join(table.keys)}.")
    files = {key: Path(given[key]).expanduser() for key in table.files if given.get(key)}
    return {**given, **{key: str((path.parent / file).resolve()) for key, file in files.items()}}


def check_kit(kit: Path) -> None:
    """Raise ResultsError if a kit would replace files that are not FedSign's; a key may be there."""
    check_writable(kit, "*.*")
    check_writable(kit.parent, _archive(kit).name)


def write_kit(federation: Federation, site: Site, *, data_root: str, device: str) -> None:
    """Fill a site's folder, which may hold its key already, and pack it."""
    folder = federation.kit(site.name)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    own = tomli_w.dumps({"data_root": data_root, "device": device})
    facts = {
        "name": federation.name,
        "site": site.name,
        "partition": site.partition,
        "host": federation.hosts[0],
        "port": federation.port,
        "insecure": federation.insecure,
        "versions": dict(federation.versions),
    }
    given = tomli_w.dumps({"federation": facts})
    with writing(folder.parent, site.name) as staged:
        kit = staged / site.name
        kit.mkdir()
        _write(kit / SITE_FILE, "site.toml", mine=own, theirs=given)
        if not federation.insecure:
            (kit / AUTHORITY_FILE).write_bytes(federation.authority.read_bytes())
            (kit / PUBLIC_FILE).write_text(f"{site.public_key} {site.name}\n", encoding="utf-8")
        description = f"SuperNode of {site.name} in the federation {federation.name}"
        _write_programs(kit, description, f"fedsign-{site.name}", folder=site.name, federation=None)
        # no index offers a local version such as 2.5.0+cpu
        versions = {name: text.partition("+")[0] for name, text in federation.versions.items()}
        keys = [*folder.glob(KEY_FILE)]
        _write(
            kit / "README.md", "site.md", site=site.name, federation=federation, has_key=bool(keys), versions=versions
        )
        _pack(kit, keys)


def write_server(federation: Federation) -> None:
    """Write the server's start script, systemd unit and instructions, once: they may then be edited."""
    federation.server.mkdir(parents=True, exist_ok=True, mode=0o700)
    description = f"SuperLink of the federation {federation.name}"
    facts = {"folder": "federation/server", "federation": federation}
    _write_programs(federation.server, description, "fedsign-superlink", **facts)
    _write(federation.folder / "README.md", "federation.md", federation=federation)
    (federation.folder / ".gitignore").write_text("*\n", encoding="utf-8")  # keys must not be committed


def _write_programs(path: Path, description: str, unit: str, **facts: Any) -> None:
    """Write the start script and the systemd unit; `facts`: the folder under /opt, and the federation if a server's."""
    _write(path / "start.sh", "start.sh", what=description)
    (path / "start.sh").chmod(0o700)
    _write(path / f"{unit}.service", "unit.service", what=description, name=unit, **facts)


def _write(path: Path, template: str, **values: Any) -> None:
    """Fill a template of the folder `texts`."""
    environment = Environment(
        loader=PackageLoader("simulations.deployment", "texts"),
        undefined=StrictUndefined,  # a misspelled variable must not become an empty line of a script
        keep_trailing_newline=True,
        trim_blocks=True,
    )
    path.write_text(environment.get_template(f"{template}.jinja").render(values), encoding="utf-8")


def _archive(kit: Path) -> Path:
    return kit.with_name(kit.name + ".tar.gz")


def _pack(kit: Path, keys: Sequence[Path]) -> None:
    """Pack the kit. Only the owner can read it, since it may hold a key."""
    archive = _archive(kit)
    archive.touch(mode=0o600)  # before any content
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(kit, arcname=kit.name, recursive=False, filter=_private)
        for path in sorted([*kit.iterdir(), *keys], key=lambda path: path.name):
            tar.add(path, arcname=f"{kit.name}/{path.name}", filter=_private)


def _private(info: tarfile.TarInfo) -> tarfile.TarInfo:
    # account names and numbers of the server are not the sites' business
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mode &= 0o700  # nor is the site's kit that of its other accounts
    return info
