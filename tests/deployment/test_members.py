"""Who belongs to a federation: keys, claims, sites that are absent, come and go; on Flower's LinkState in this process."""

import datetime as dt
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from flwr.supercore.error import FlowerError

from fedsign.errors import EngineError
from fedsign.flower.partition_grid import PartitionGrid
from fedsign.storage.results import RunFolder
from simulations.deployment import keys, provision
from simulations.deployment.engine.server_app import members_of
from simulations.deployment.engine.submission import tell_events
from simulations.deployment.federation import Federation, open_federation
from tests.deployment.link import Link, superlink
from tests.unit.test_flower_room import ROLES, node, requests

NAMES = ("alpha", "beta", "gamma")


@dataclass
class Started:
    """A federation of three sites, whose keys its SuperLink takes, and what the grid noted."""

    federation: Federation
    link: Link
    grid: PartitionGrid
    noted: list[dict[str, str]]

    def start(self, name: str, *partitions: int) -> int:
        """The site's SuperNode, which says that it serves these partitions."""
        return self.link.start(self.federation.site(name).public_key, node(*partitions))

    def replied(self) -> list[int]:
        """Who replied in a round with all partitions."""
        return [reply.metadata.src_node_id for reply in self.grid.send_and_receive(requests(0, 1, 2), timeout=1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    asked = Federation(folder=tmp_path_factory.mktemp("made") / "federation", name="x", hosts=("192.0.2.10",))
    return provision.init(asked, [(name, None) for name in NAMES], lifetime=dt.timedelta(days=1)).folder


@pytest.fixture
def started(folder: Path, tmp_path: Path) -> Iterator[Started]:
    federation = open_federation(Path(shutil.copytree(folder, tmp_path / "federation")))
    with superlink() as link:
        for site in federation.sites:
            link.register(site.name, site.public_key)
        noted: list[dict[str, str]] = []
        grid = PartitionGrid(
            link.grid,
            num_partitions=3,
            roles=ROLES,
            leaves_process=True,
            members=members_of(str(federation.folder), link.grid),
            note=lambda event: noted.append(dict(event)),
        )
        yield Started(federation, link, grid, noted)


def test_a_claim_beyond_a_sites_key_is_refused_and_noted(started: Started) -> None:
    started.start("beta", 0, 1)
    started.start("gamma", 2)
    with pytest.raises(EngineError, match=r"1 of 3 partitions have no node after 0\.5 s \(first: \[0\]"):
        started.grid.roll_call(timeout_s=0.5)
    why = "it claims to be [0], but its key is registered for partition 1"
    assert started.noted == [{"site": "beta", "event": "refused", "why": why}]


def test_a_site_that_claims_anothers_partition_alone_serves_none(started: Started) -> None:
    for name, claimed in (("alpha", 1), ("gamma", 2)):
        started.start(name, claimed)
    with pytest.raises(EngineError, match=r"2 of 3 partitions have no node after 0\.2 s \(first: \[0, 1\]"):
        started.grid.roll_call(timeout_s=0.2)


def test_a_strangers_key_is_refused(started: Started, tmp_path: Path) -> None:
    stranger = keys.make_key(tmp_path / "stranger.key", comment="alpha")
    with pytest.raises(FlowerError, match="No SuperNode found with the given public key"):
        started.link.start(stranger, node(0))
    started.link.register("alpha", stranger)  # as somebody might with `flwr` alone: no site of federation.toml
    started.link.start(stranger, node(0))
    for name, partition in (("beta", 1), ("gamma", 2)):
        started.start(name, partition)
    with pytest.raises(EngineError, match=r"1 of 3 partitions have no node after 0\.2 s \(first: \[0\]"):
        started.grid.roll_call(timeout_s=0.2)


def test_a_federation_without_keys_takes_every_node(tmp_path: Path) -> None:
    asked = Federation(folder=tmp_path / "federation", name="x", hosts=("192.0.2.10",), insecure=True)
    made = provision.init(asked, [("alpha", None)], lifetime=dt.timedelta(days=1))
    with superlink() as link:
        assert members_of(str(made.folder), link.grid) is None


def test_what_happens_to_sites_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = RunFolder(tmp_path)
    assert tell_events(folder, 0) == 0
    folder.append("members.jsonl", {"round": 3, "site": "beta", "event": "refused", "why": "it claims to be [0]"})
    assert tell_events(folder, 0) == tell_events(folder, 1) == 1
    assert caplog.messages == ["round 3: site beta refused: it claims to be [0]"]
