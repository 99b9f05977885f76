"""What the ServerApp knows of a federation's sites, and what it writes down of them: members.jsonl, one line for each event.

What a site says is its own: it is cut and made printable before it is written.
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
from fedsign.versions import MISSING, compared, versions
from simulations.deployment.federation import Federation, open_federation
from simulations.deployment.keys import ends_at
from simulations.deployment.membership import in_pem
from simulations.deployment.progress import Progress
from simulations.deployment.refusals import refused

SUPERLINK = "SuperLink"  # in members.jsonl, in the place of a site, none of which can be called so
_VERSIONS = TypeAdapter(dict[str, Annotated[str, StringConstraints(pattern=r"^[\w.+!-]{1,40}$")]])


def hooks_of(grid: Grid, folder: RunFolder, federation: Federation | None, progress: Progress | None) -> SiteHooks:
    """Of a run on a federation, or on SuperNodes of its own."""

    def note(event: Mapping[str, str]) -> None:
        told = {key: printable(value) for key, value in event.items()}
        folder.append("members.jsonl", {"round": len(folder.rounds()) + 1, **told})

    if federation is None or progress is None:
        return SiteHooks(note=note, judge=judge)
    return SiteHooks(note=note, judge=judge, members=members_of(federation, grid, note), watch=progress)


def judge(answer: ConfigRecord) -> tuple[str, str]:
    """Whether a node's versions fit the server's, and what its site has allowed by itself; see `Judge`."""
    here = versions()
    try:
        there = _VERSIONS.validate_json(str(answer.get(VERSIONS_KEY, "{}")))
    except ValueError:
        there = {}
    states = dict(compared(there, here))
    differs = ", ".join(
        f"{program} {there.get(program, MISSING)} where the server has {here[program]}"
        for program, state in states.items()
        if state != "ok"
    )
    if "broken" in states.values():
        return (
            f"its versions do not fit: {differs}; install the server's there ('fedsign deploy check' in its kit).",
            "",
        )
    consents = printable(str(answer.get(CONSENTS_KEY, "")))
    remarks = [f"{differs}: the last bits of its results may differ"] if differs else []
    return "", "; ".join([*remarks, f"the site has set {consents}"] if consents else remarks)


def members_of(federation: Federation, grid: Grid, note: Note = lambda event: None) -> Members | None:
    """The sites of a federation, as they are whenever somebody asks; None where no site shows who it is.

    `note` is told when the server's certificate has been renewed, and what the SuperLink has refused.
    """
    if federation.insecure:
        return None
    certificate, known = federation.certificate.read_bytes(), refused(federation)

    def members() -> list[Member]:
        nonlocal certificate, known
        before, known = known, refused(federation)
        for (site, why), count in (known - before).items():
            note({"site": site, "event": "refused", "why": f"{count} {why}"})
        if (now := federation.certificate.read_bytes()) != certificate:
            certificate = now
            why = f"its certificate is valid until {ends_at(federation.certificate):%Y-%m-%d}, once it is started again"
            note({"site": SUPERLINK, "event": "renewed", "why": why})
        node_of = {node.public_key: node.node_id for node in cast(HttpGrid, grid).get_nodes()}
        return [
            Member(
                site.name,
                site.partition,
                node_of.get(in_pem(site.public_key)) if site.is_active else None,
                site.is_active,
                site.max_examples,
            )
            for site in open_federation(federation.folder).sites
        ]

    return members
