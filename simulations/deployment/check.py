"""`fedsign deploy check`: whether a site or the server is ready to take part, row by row."""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from clients.deployment.settings import site_tables
from fedsign.errors import ConfigError, FedSignError
from fedsign.flower.signatures import skewed
from fedsign.versions import MISSING, compared, versions
from simulations.deployment.accounts import files, remarks
from simulations.deployment.federation import Federation
from simulations.deployment.keys import ANEW, RENEW, State, ends_at, fingerprint, load_private, public_line, validity
from simulations.deployment.membership import answers, nodes_of, process_of
from simulations.deployment.probe import ServerError, StillThereError, check_is_known, probe_server
from simulations.deployment.running import recorded
from simulations.deployment.start import PLAIN, UNSAFE
from simulations.deployment.startup_kits import PUBLIC_FILE, StartupKit

Row = dict[str, str]
Finding = tuple[State, str]
_WORTH_A_WORD_S = 2.0  # the server's Date header has whole seconds: less is noise


def check_site(kit: StartupKit, experiment: Path | None = None) -> list[Row]:
    """Check a site. Return rows of {"what", "state", "detail"}; state is ok, warn or broken.

    With an experiment, its data are read and examined as in a run.
    """
    rows = [
        _row("data", _data, kit),
        *_samples(kit, experiment),
        *_versions(kit.facts["versions"]),
        _row("device", _device, kit),
    ]
    rows += [_row(name, _table, name, settings) for name, settings in kit.tables.items()]
    if kit.trusted is not None:
        rows.append(_row("key", _key, kit))
    return [*rows, *(_as_row(*finding) for finding in files(kit.folder, apart=kit.data_folder)), *_server_rows(kit)]


def check_server(federation: Federation) -> list[Row]:
    """Check the server, with the same rows."""
    folders = [each for name in ("server", "ca", "kits/[a-z0-9]*") for each in sorted(federation.folder.glob(name))]
    rows = [*_versions(federation.versions), *_certificates(federation)]
    rows += [_as_row(*finding) for folder in folders for finding in files(folder)]
    rows += [_as_row("accounts", "warn", remark) for remark in remarks(federation)]
    rows += [_row("SuperLink", _superlink, federation)]
    try:
        return [*rows, *_sites(federation)]
    except FedSignError as error:  # other rows may show the cause
        return [*rows, _as_row("sites", "broken", str(error))]


def _row(name: str, run: Callable[..., Finding], *given: Any) -> Row:
    """Run a check, or report why it could not run."""
    try:
        return _as_row(name, *run(*given))
    except (FedSignError, ValueError, OSError) as error:
        return _as_row(name, "broken", str(error))


def _as_row(name: str, state: str, detail: str) -> Row:
    return {"what": name, "state": state, "detail": detail}


def _data(kit: StartupKit) -> Finding:
    folder = kit.data_folder
    if folder is None:
        return "warn", 'data_root is "" in site.toml: the experiment\'s path will be used on this machine'
    if not os.path.exists(folder):  # noqa: PTH110 - Path.exists raises if a parent folder cannot be entered
        where = f"correct data_root in {kit.folder / 'site.toml'}"
        return "broken", f"{folder} does not exist, or this user cannot reach it; {where}"
    # with r alone a folder can be listed, but no file in it opened; that takes x
    if not os.access(folder, os.R_OK | (os.X_OK if folder.is_dir() else 0)):
        return "broken", f"{folder} cannot be read by this user; give it the right to"
    if folder.is_dir():
        count = sum(1 for _ in folder.iterdir())
        return "ok" if count else "warn", f"{folder} contains {count} {'entry' if count == 1 else 'entries'}"
    return "ok", f"{folder}, {folder.stat().st_size:,} bytes"


def _samples(kit: StartupKit, experiment: Path | None) -> Iterator[Row]:
    if experiment is None:
        return
    from clients.deployment.node import workload_of
    from fedsign import config as configs

    try:
        config = configs.load(experiment, ["engine.name=superlink"])
        work = workload_of(config.to_toml(), (int(kit.facts["partition"]),), tuple(kit.node_config().items()))
        data = work.dataset
        yield _as_row("samples", "ok", f"{len(data.train):,} for training, {len(data.test):,} for the test")
        for record in work.check_data():
            yield _as_row(record["rule"], "warn", f"{record['message']}; {record['remedy']}")
    except FedSignError as error:
        yield _as_row("samples", "broken", str(error))


def _versions(of_the_federation: Mapping[str, str]) -> Iterator[Row]:
    own = versions()
    # broken: other minor releases of FedSign or Flower do not understand each other; warn: only bits may differ
    for name, state in compared(own, of_the_federation):
        has, wanted = own.get(name, MISSING), of_the_federation[name]
        differs = f"{has} here, {wanted} in the federation: "
        remedy = {"ok": "", "warn": "the last bits of results may differ", "broken": f"pip install {name}=={wanted}"}
        yield _as_row(name, state, has if state == "ok" else differs + remedy[state])


def _device(kit: StartupKit) -> Finding:
    import torch

    from fedsign.numerics import device_of

    try:
        device = device_of(kit.device or "auto")
    except ConfigError as error:
        raise ConfigError(f"device in site.toml: {error}") from error
    if kit.device.startswith("cuda"):
        return "ok", f"{kit.device}, {torch.cuda.get_device_name(device)}"
    count = torch.cuda.device_count()
    beside = f"; torch sees {count} CUDA devices" if count else ""
    return "ok", f"{kit.device or 'as the experiment says'}, {os.cpu_count()} cores{beside}"


def _table(name: str, settings: Mapping[str, Any]) -> Finding:
    """Check a site's settings of a capability."""
    try:
        return "ok", site_tables()[name].check(settings)
    except FedSignError as error:
        raise ConfigError(f"[{name}] in site.toml: {error}") from error


def _key(kit: StartupKit) -> Finding:
    public, known = public_line(load_private(kit.key).public_key()), kit.folder / PUBLIC_FILE
    # type and key only: the third word is a comment, which people edit
    if known.exists() and known.read_text(encoding="utf-8").split()[:2] != public.split():
        return "broken", "key does not belong to key.pub, which the server knows; it is another site's, or a newer one"
    return "ok", fingerprint(public)


def _server_rows(kit: StartupKit) -> Iterator[Row]:
    try:
        server = probe_server(kit.facts["host"], kit.facts["port"], authority=kit.trusted)
    except ServerError as error:
        # TLS, clock and membership need the connection that failed
        yield _as_row("server", "broken", str(error))
        return
    yield _as_row("server", "ok", kit.address)
    yield _as_row("TLS", *(("warn", UNSAFE) if server.certificate_ends is None else validity(server.certificate_ends)))
    yield _as_row("clock", *_clock(server.ahead_s))
    if kit.trusted is not None and kit.key.exists():
        yield _row("membership", _membership, kit)


def _clock(ahead_s: float) -> Finding:
    if why := skewed(ahead_s):
        return "broken", why
    if abs(ahead_s) > _WORTH_A_WORD_S:
        where = f"{abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} the server's"
        return "warn", f"{where}; use NTP"
    return "ok", f"within {_WORTH_A_WORD_S:g} s of the server's"


def _membership(kit: StartupKit) -> Finding:
    process = recorded(kit.folder / "pid")
    if process is not None:
        # do not probe: that signs the site's node off, and node ids belong to keys, so it would be this SuperNode's
        return "ok", f"its SuperNode is running, process {process.pid}"
    try:
        if check_is_known(kit, host=kit.facts["host"]):
            return "ok", f"the SuperLink knows {kit.facts['site']}"
    except StillThereError as error:
        return "warn", str(error)
    return "warn", "the SuperLink could not say; try again in a moment"


def _certificates(federation: Federation) -> Iterator[Row]:
    if federation.insecure:
        yield _as_row("TLS", "warn", UNSAFE)
        return
    if federation.plain_supernodes:
        yield _as_row("signatures", "warn", PLAIN)
    for name, path, remedy in (("certificate", federation.certificate, RENEW), ("CA", federation.authority, ANEW)):
        yield _row(name, lambda path, remedy: validity(ends_at(path), remedy), path, remedy)


def _superlink(federation: Federation) -> Finding:
    process = process_of(federation)
    if process is None:
        other = ", though something else listens on its port" if answers(federation) else ""
        return "warn", f"not running{other}; start it with {federation.server / 'start.sh'}"
    if not answers(federation):
        return "warn", f"process {process.pid} does not answer at {federation.local_address} yet"
    return "ok", f"process {process.pid} at {federation.local_address}"


def _sites(federation: Federation) -> Iterator[Row]:
    """Report the SuperLink's state of each site."""
    # without keys, nodes are not registered and have no names to match
    known = {}
    if process_of(federation) is not None and answers(federation) and not federation.insecure:
        known = {node.name: node.status for node in nodes_of(federation)}
    for site in federation.sites:
        key = fingerprint(site.public_key) if site.public_key else "no key"
        status = known.get(site.name, "not asked")
        # "offline" is right for an active site: check the registration, not who happens to be up
        is_right = status == "not asked" or (status in ("online", "registered", "offline")) == site.is_active
        belongs = f"partition {site.partition}" if site.is_active else "revoked"
        yield _as_row(f"site {site.name}", "ok" if is_right else "broken", f"{belongs}, {status}, {key}")
