"""Whose the files of a server and of its sites are: who may read them, and who should not be able to."""

import os
import stat
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from simulations.deployment.federation import Federation, name_of
from simulations.deployment.running import recorded

_PUBLIC = frozenset({".md", ".pem", ".pub", ".service", ".sh", ".toml"})


def remarks(federation: Federation) -> Iterator[str]:
    """Yield which accounts can read more than they need, and the remedies."""
    key, secret = federation.authority_key, federation.server / "server.key"
    with suppress(OSError):  # stored elsewhere, or readable for root alone
        if b"ENCRYPTED" not in key.read_bytes():
            yield (
                f"{key} is not encrypted, and whoever can read it can pose as the server: encrypt it with 'ssh-keygen "
                f"-p -m PKCS8 -f {key}', or move it off this machine, for 'fedsign deploy renew --ca-key'"
            )
    running, of_account = {site.name: federation.kit(site.name) for site in federation.sites}, defaultdict(list)
    for name, folder in {"the server": federation.server, **running}.items():
        if process := recorded(folder / "pid"):
            of_account[process.uids().effective].append(name)
    for account, names in of_account.items():
        if "the server" in names and secret.exists() and account in (0, secret.stat().st_uid):
            yield (
                f"runs execute code as {name_of(account)}, who can read {secret}: move it to a folder of root's, and "
                "start the SuperLink under an account of its own, by its systemd unit or 'deploy start --key-stdin'"
            )
        if len(names) > 1:
            yield f"{', '.join(names)} run as {name_of(account)}, who reads each one's files: give each its own account"


def files(folder: Path, *, apart: Path | None = None) -> list[tuple[str, str, str]]:
    """Return files that belong to another account than the folder, or are open to others, or that there are none.

    `apart`: what is left out.
    """
    owner, closed, found = folder.stat().st_uid, set[Path](), list[tuple[str, str, str]]()
    if os.getuid() not in (owner, 0):
        found.append((folder.name, "broken", f"it is {name_of(owner)}'s: run this as that account, or as root"))
    for path in (folder, *sorted(folder.rglob("*"))):
        with suppress(FileNotFoundError):  # a database's, which come and go
            status = path.lstat()
            if stat.S_ISLNK(status.st_mode) or apart in (path, *path.parents):
                continue
            is_key, mode, name = path.name.endswith("key"), status.st_mode & 0o777, str(path.relative_to(folder.parent))
            if path.is_dir() and not mode & 0o011:
                closed.add(path)
            # root may keep a key from the account that starts with it
            if status.st_uid not in ((owner, 0) if is_key else (owner,)):
                whose = f"belongs to {name_of(status.st_uid)}, expected {name_of(owner)}"
                found.append((name, "broken", f"{whose}: chown {name_of(owner)} {path}"))
            forbidden = 0o022 if path.is_dir() or path.suffix in _PUBLIC else 0o077
            if mode & forbidden and (is_key or not closed.intersection(path.parents)):
                found.append((name, "broken", f"mode {mode:03o} lets others in: chmod go= {path}"))
    return found or [(folder.name, "ok", f"{name_of(owner)}'s, and closed to others")]
