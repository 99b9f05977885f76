"""What the ServerApp knows about a federation's sites, and members.jsonl, its record of their events.

Text from a site is untrusted: it is shortened and made printable before it is written.
"""

from collections.abc import Mapping
from typing import Annotated, cast

from flwr.app import ConfigRecord
from flwr.serverapp import Grid
from flwr.superlink.grid import HttpGrid
from pydantic import StringConstraints, TypeAdapter

from clients.deployment.node import CONSENTS_KEY
from fedsign.flower.nodes import Member, Members, Note, SiteHooks
from fedsign.flower.wire import VERSIONS_KEY
from fedsign.records import printable
from fedsign.storage.results import RunFolder
from fedsign.versions import INSTALLED, MISSING, compared, versions
from simulations.deployment.federation import Federation, open_federation
from simulations.deployment.keys import ends_at, validity
from simulations.deployment.membership import in_pem
from simulations.deployment.progress import Progress
from simulations.deployment.refusals import refused
from simulations.deployment.start import PLAIN

SUPERLINK = "SuperLink"  # in members.jsonl, in place of a site; no site can have this name
# anchored and short: these texts end up in the server's terminal and in members.jsonl
_VERSIONS = TypeAdapter(dict[str, Annotated[str, StringConstraints(pattern=r"^[\w.+!-]{1,40}$")]])


def hooks_of(grid: Grid, folder: RunFolder, federation: Federation | None, progress: Progress | None) -> SiteHooks:
    """Return the hooks of a run on a federation, or on the run's own SuperNodes."""

    def note(event: Mapping[str, str]) -> None:
        # here, at the one place where events are written: their texts may quote a site
        entries = {key: printable(value) for key, value in event.items()}
        folder.append("members.jsonl", {"round": len(folder.rounds()) + 1, **entries})

    # the run's own SuperNodes have no keys, and nobody asks for their status
    if federation is None or progress is None:
        return SiteHooks(note=note, judge=judge)
    if federation.plain_supernodes:
        note({"site": SUPERLINK, "event": "lets in plain SuperNodes", "why": PLAIN})
    return SiteHooks(note=note, judge=judge, members=members_of(federation, grid, note), watch=progress)


def judge(answer: ConfigRecord) -> tuple[str, str]:
    """Compare a node's versions with the server's, and read what its site permits; see `Judge`."""
    here = versions()
    try:
        node_versions = _VERSIONS.validate_json(str(answer.get(VERSIONS_KEY, "{}")))
    except ValueError:
        node_versions = {}
    states = dict(compared(node_versions, here))
    differs = ", ".join(
        f"{program} {node_versions.get(program, MISSING)} where the server has {here[program]}"
        for program, state in states.items()
        if state != "ok"
    )
    newer = [f"{program} {node_versions[key]}" for program in here if (key := program + INSTALLED) in node_versions]
    restart = f"start its SuperNode again, which does not run the {', '.join(newer)} that is installed" if newer else ""
    if "broken" in states.values():
        remedy = restart or "install the server's there ('fedsign deploy check' in its kit)"
        return f"its versions do not fit: {differs}; {remedy}.", ""
    consents = printable(str(answer.get(CONSENTS_KEY, "")))
    remarks = [f"{differs}: the last bits of its results may differ"] if differs else []
    remarks += [restart] if restart else []
    return "", "; ".join([*remarks, f"the site has set {consents}"] if consents else remarks)


def members_of(federation: Federation, grid: Grid, note: Note = lambda event: None) -> Members | None:
    """Return a function that reads the federation's current sites; None if sites are not identified.

    `note` is called when the server's certificate was renewed, and for replies that the SuperLink refused.
    """
    if federation.insecure:
        return None
    certificate, known = federation.certificate.read_bytes(), refused(federation)
    state, how = validity(ends_at(federation.certificate))
    if state != "ok":
        note({"site": SUPERLINK, "event": "expiring", "why": f"its certificate {how}"})

    def members() -> list[Member]:
        nonlocal certificate, known
        # Counter's difference keeps increases only: a restarted SuperLink counts from 0 again
        before, known = known, refused(federation)
        for (site, why), count in (known - before).items():
            note({"site": site, "event": "refused", "why": f"{count} {why}"})
        # `deploy renew` replaces the file, while the SuperLink keeps the certificate that it started with
        if (now := federation.certificate.read_bytes()) != certificate:
            certificate = now
            why = f"its certificate is valid until {ends_at(federation.certificate):%Y-%m-%d}, once it is started again"
            note({"site": SUPERLINK, "event": "renewed", "why": why})
        # by key, which a node cannot choose, unlike the partition and the name that it claims
        node_of = {node.public_key: node.node_id for node in cast(HttpGrid, grid).get_nodes()}
        return [
            Member(
                site.name,
                site.partition,
                node_of.get(in_pem(site.public_key)) if site.is_active else None,
                site.is_active,
                site.max_examples,
            )
            # read again in every round: sites join and are revoked during a run
            for site in open_federation(federation.folder).sites
        ]

    return members
