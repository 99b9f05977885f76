"""Create and change a federation: init, add-site, revoke, renew."""

import datetime as dt
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from fedsign.errors import ConfigError
from simulations.deployment import membership
from simulations.deployment.federation import FILE, Federation, check_bind, check_host
from simulations.deployment.keys import Certified, issue, make_authority, make_key, read_public, with_passphrase
from simulations.deployment.startup_kits import KEY_FILE, check_kit, write_kit, write_server


def init(
    federation: Federation, sites: Sequence[tuple[str, Path | None]], *, lifetime: dt.timedelta, passphrase: bytes = b""
) -> Federation:
    """Create the folder: CA, server, a kit for each site; for `sites`, see `add_site`.

    The CA's key is encrypted if there is a passphrase.

    Raises:
        ConfigError: the folder is in use, or a name, address or key is invalid.
    """
    folder = federation.folder
    if (folder / FILE).exists():
        raise ConfigError(
            f"{folder} holds a federation already; add sites with 'fedsign deploy add-site', or name another folder."
        )
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; name a folder that is, or none that exists.")
    for host in federation.hosts:
        check_host(host)
    check_bind(federation.bind)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)  # mkdir's mode does not apply to an existing folder
        federation.server.mkdir(mode=0o700)
        if not federation.insecure:
            federation.authority.parent.mkdir(mode=0o700)
            authority = make_authority(federation.name)
            stored = replace(authority, key=with_passphrase(authority.key, new=passphrase))
            stored.write(federation.authority, federation.authority_key)
            _issue(federation, authority, lifetime)
        write_server(federation)
        # after keys and certificates: with this file the folder counts as a federation, which add_site extends
        federation.write()
        for name, public_key in sites:
            federation = add_site(federation, name, public_key)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # leave no partial federation
        raise
    return federation


def add_site(
    federation: Federation,
    name: str,
    public_key: Path | None,
    *,
    data_root: str = "",
    device: str = "",
    max_examples: int = 0,
) -> Federation:
    """Add a site and its kit. `public_key`: the file that the site sent, or None to generate a key in the kit."""
    federation.with_site(name, public_key="")  # refuses a used name before a key is generated
    check_kit(federation.kit(name))
    key = _public_key(federation, name, public_key)
    grown = federation.with_site(name, public_key=key, max_examples=max_examples)
    grown.write()
    write_kit(grown, grown.site(name), data_root=data_root, device=device)
    return grown


def revoke(federation: Federation, name: str) -> Federation:
    """Revoke a site, in the file first, so that the next start enforces it even if the SuperLink is unreachable now."""
    if not federation.site(name).is_active:
        raise ConfigError(f"site '{name}' is revoked already.")
    left = federation.without(name)
    left.write()
    return left


def renew(
    federation: Federation,
    hosts: Sequence[str],
    *,
    lifetime: dt.timedelta,
    ca_key: Path | None = None,
    passphrase: Callable[[], bytes] = bytes,
) -> Federation:
    """Issue a new certificate for the server, with more names and addresses if given.

    `ca_key`: where the CA's key is, if not in the folder; `passphrase` is asked for if it is encrypted.

    Raises:
        ConfigError: the federation has no certificates, the CA's key is stored elsewhere, or the passphrase is wrong.
    """
    if federation.insecure:
        raise ConfigError("an insecure federation has no certificate; make a new one without --insecure.")
    for host in hosts:
        check_host(host)
    ca_key = ca_key or federation.authority_key
    try:
        key = ca_key.read_bytes()
    except OSError as error:
        raise ConfigError(f"{ca_key} cannot be read ({error.strerror}); name the CA's key with --ca-key.") from error
    key = with_passphrase(key, old=passphrase() if b"ENCRYPTED" in key else b"")
    grown = replace(federation, hosts=tuple(dict.fromkeys((*federation.hosts, *hosts))))
    _issue(grown, Certified(certificate=federation.authority.read_bytes(), key=key), lifetime)
    grown.write()
    return grown


def apply(federation: Federation) -> bool:
    """Update a running SuperLink at once; otherwise it is updated at its start."""
    if membership.process_of(federation) is None or not membership.answers(federation):
        return False
    membership.register_sites(federation)
    return True


def _issue(federation: Federation, authority: Certified, lifetime: dt.timedelta) -> None:
    # `local_host`: the engine on this machine connects to the address that `bind` names
    hosts = (*federation.hosts, federation.local_host)
    issue(authority, hosts, lifetime=lifetime).write(federation.certificate, federation.server / "server.key")


def _public_key(federation: Federation, site: str, sent: Path | None) -> str:
    """Return the key that a site sent, or a new one's in its kit; "" in an insecure federation."""
    if federation.insecure and sent is not None:
        raise ConfigError(f"a public key was given for '{site}', but an insecure federation asks for none; drop it.")
    if federation.insecure:
        return ""
    if sent is not None:
        return read_public(sent)
    kit = federation.kit(site)
    kit.mkdir(parents=True, exist_ok=True, mode=0o700)
    return " ".join(make_key(kit / KEY_FILE, comment=site).split()[:2])
