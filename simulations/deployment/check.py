"""`fedsign deploy check`: row by row, whether a site or the server can take part as it is."""

import os
import re
from collections.abc import Iterator, Mapping

from clients.deployment.settings import site_tables
from fedsign.errors import ConfigError, FedSignError
from fedsign.storage.disk import is_private
from simulations.deployment.authority import ends_at, validity
from simulations.deployment.federation import Federation, versions
from simulations.deployment.keys import fingerprint, public_half
from simulations.deployment.kits import Kit
from simulations.deployment.membership import answers, process_of, statuses
from simulations.deployment.running import recorded
from simulations.deployment.start import UNSAFE
from simulations.deployment.tls import Seen, ServerError, look_at_server

Row = dict[str, str]
OK, WARN, BROKEN = "ok", "warn", "broken"
AHEAD_S, BEHIND_S = 5.0, 305.0  # Flower 1.41 refuses a site whose clock is further off
_WORTH_A_WORD_S = 2.0


def check_site(kit: Kit) -> list[Row]:
    """Rows of {"what", "state", "detail"}, at a site; state is ok, warn or broken."""
    rows = [_data(kit), *_versions(kit.facts["versions"]), _device(kit), *_tables(kit)]
    if not kit.facts["insecure"]:
        rows.append(_key(kit))
    return [*rows, *_server_seen(kit)]


def check_server(federation: Federation) -> list[Row]:
    """The same at the server."""
    rows = [*_versions(federation.versions), *_certificates(federation), _superlink(federation)]
    try:
        return [*rows, *_sites(federation)]
    except FedSignError as error:  # the other rows may say why
        return [*rows, _row("sites", BROKEN, str(error))]


def _data(kit: Kit) -> Row:
    folder = kit.data_folder
    if folder is None:
        return _row(
            "data", WARN, 'data_root is "" in site.toml: what the experiment says will be looked for on this machine'
        )
    if not os.path.exists(folder):  # noqa: PTH110 - Path's raises where a folder above cannot be entered
        return _row(
            "data",
            BROKEN,
            f"{folder} does not exist, or this user cannot reach it; correct data_root in {kit.folder / 'site.toml'}",
        )
    if not os.access(folder, os.R_OK | (os.X_OK if folder.is_dir() else 0)):
        return _row("data", BROKEN, f"{folder} cannot be read by this user; give it the right to")
    if folder.is_dir():
        count = sum(1 for _ in folder.iterdir())
        return _row("data", OK if count else WARN, f"{folder} holds {count} entries")
    return _row("data", OK, f"{folder}, {folder.stat().st_size:,} bytes")


def _versions(of_the_federation: Mapping[str, str]) -> Iterator[Row]:
    own = versions()
    for name, wanted in of_the_federation.items():
        has = own.get(name, "missing")
        if has == wanted:
            yield _row(name, OK, has)
        elif has == "missing" or (name in ("fedsign", "flwr") and _minor(has) != _minor(wanted)):
            yield _row(name, BROKEN, f"{has} here, {wanted} in the federation: pip install {name}=={wanted}")
        else:
            yield _row(name, WARN, f"{has} here, {wanted} in the federation: the last bits of results may differ")


def _device(kit: Kit) -> Row:
    import torch

    asked = re.fullmatch(r"cuda(?::(\d+))?", kit.device)
    count = torch.cuda.device_count()
    if asked is not None:
        index = int(asked[1] or 0)
        if index >= count:
            return _row("device", BROKEN, f"site.toml says {kit.device}, but torch sees {count} CUDA devices")
        return _row("device", OK, f"{kit.device}, {torch.cuda.get_device_name(index)}")
    if kit.device not in ("", "cpu", "auto"):
        return _row("device", BROKEN, f'site.toml says \'{kit.device}\'; expected is "", "cpu", "cuda" or "cuda:1"')
    beside = f"; torch sees {count} CUDA devices" if count else ""
    return _row("device", OK, (kit.device or "as the experiment says") + f", {os.cpu_count()} cores{beside}")


def _tables(kit: Kit) -> Iterator[Row]:
    """What the site sets of capabilities."""
    for name, settings in kit.tables.items():
        try:
            yield _row(name, OK, site_tables()[name].check(settings))
        except FedSignError as error:
            yield _row(name, BROKEN, f"[{name}] in site.toml: {error}")


def _key(kit: Kit) -> Row:
    try:
        public = public_half(kit.key)
    except ConfigError as error:
        return _row("key", BROKEN, str(error))
    if not is_private(kit.key):
        return _row("key", BROKEN, f"{kit.key} can be read by others: chmod 600 {kit.key}")
    known = (
        (kit.folder / "key.pub").read_text(encoding="utf-8").split()[:2] if (kit.folder / "key.pub").exists() else []
    )
    if known and known != public.split()[:2]:
        return _row(
            "key",
            BROKEN,
            "key does not belong to key.pub, which the server knows; it is another site's, or a newer one",
        )
    return _row("key", OK, fingerprint(public))


def _server_seen(kit: Kit) -> Iterator[Row]:
    insecure = kit.facts["insecure"]
    try:
        seen = look_at_server(kit.facts["host"], kit.facts["port"], authority=None if insecure else kit.authority)
    except ServerError as error:
        yield _row("server", BROKEN, str(error))
        return
    yield _row("server", OK, kit.address)
    yield _tls(seen)
    yield _clock(seen)
    if not insecure and kit.key.exists():
        yield _taken(kit)


def _tls(seen: Seen) -> Row:
    if seen.certificate_ends is None:
        return _row("TLS", WARN, UNSAFE)
    return _row("TLS", *validity(seen.certificate_ends))


def _clock(seen: Seen) -> Row:
    ahead_s = seen.ahead_s
    where = f"{abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} the server's"
    if ahead_s > AHEAD_S or ahead_s < -BEHIND_S:
        return _row(
            "clock",
            BROKEN,
            f"{where}; Flower refuses more than {AHEAD_S:.0f} s ahead or {BEHIND_S:.0f} s behind: use NTP",
        )
    if abs(ahead_s) > _WORTH_A_WORD_S:
        return _row("clock", WARN, f"{where}; use NTP")
    return _row("clock", OK, "as the server's, to a second or two")


def _taken(kit: Kit) -> Row:
    from simulations.deployment.knock import NOT_TAKEN, is_known

    process = recorded(kit.folder / "pid")
    if process is not None:
        return _row("membership", OK, f"its SuperNode is running, process {process.pid}")
    try:
        answer = is_known(kit, host=kit.facts["host"])
    except (FedSignError, ValueError, OSError) as error:
        return _row("membership", BROKEN, str(error))
    if answer is None:
        return _row("membership", WARN, "the SuperLink could not say; try again in a moment")
    return (
        _row("membership", OK, f"the SuperLink knows {kit.facts['site']}")
        if answer
        else _row("membership", BROKEN, NOT_TAKEN)
    )


def _certificates(federation: Federation) -> Iterator[Row]:
    if federation.insecure:
        yield _row("TLS", WARN, UNSAFE)
        return
    for what, path in (("certificate", federation.certificate), ("CA", federation.authority)):
        try:
            yield _row(what, *validity(ends_at(path)))
        except ConfigError as error:
            yield _row(what, BROKEN, str(error))
    for key in (federation.server / "server.key", federation.authority_key):
        if key.exists():  # the CA's may be kept elsewhere
            private = is_private(key)
            yield _row(key.name, OK if private else BROKEN, "for its owner alone" if private else f"chmod 600 {key}")


def _superlink(federation: Federation) -> Row:
    process = process_of(federation)
    if process is None:
        other = ", though something else listens on its port" if answers(federation) else ""
        return _row("SuperLink", WARN, f"not running{other}; start it with {federation.server / 'start.sh'}")
    if not answers(federation):
        return _row("SuperLink", WARN, f"process {process.pid} does not answer at {federation.local_address} yet")
    return _row("SuperLink", OK, f"process {process.pid} at {federation.local_address}")


def _sites(federation: Federation) -> Iterator[Row]:
    """What the SuperLink says of each site."""
    known = {}
    if process_of(federation) is not None and answers(federation) and not federation.insecure:
        known = statuses(federation)
    for site in federation.sites:
        key = fingerprint(site.public_key) if site.public_key else "no key"
        status = known.get(site.name, "not asked")
        if site.is_active:
            state = OK if status in ("online", "registered", "offline", "not asked") else BROKEN
            yield _row(f"site {site.name}", state, f"partition {site.partition}, {status}, {key}")
        else:
            state = BROKEN if status in ("online", "registered", "offline") else OK
            yield _row(f"site {site.name}", state, f"revoked, {status}, {key}")


def _row(what: str, state: str, detail: str) -> Row:
    return {"what": what, "state": state, "detail": detail}


def _minor(version: str) -> list[str]:
    """Versions that differ further to the right work together."""
    return version.split(".")[:2]
