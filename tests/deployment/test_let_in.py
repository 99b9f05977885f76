"""Who is let in by a SuperLink: Flower's own HTTP application behind the gate, with TLS, in a thread."""

import datetime as dt
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import uvicorn
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.superlink.main import create_app

from fedsign.errors import EngineError
from simulations.deployment import keys, provision, start
from simulations.deployment.check import check_site
from simulations.deployment.federation import Federation, open_federation
from simulations.deployment.gate import Gate, is_active
from simulations.deployment.kits import Kit, open_kit
from simulations.deployment.membership import in_pem
from simulations.deployment.probe import StillThereError
from simulations.deployment.running import free_port

HOST = "127.0.0.1"


@dataclass
class Served:
    """A federation of two sites, its SuperLink's memory, and the node of the first site."""

    federation: Federation
    state: InMemoryLinkState
    node_id: int

    @property
    def kit(self) -> Kit:
        return open_kit(self.federation.kit("a"))

    def was_killed(self, *, still_believed_s: float) -> None:
        """The site's SuperNode was there, and is gone without a word."""
        self.state.deactivate_node(self.node_id)
        assert self.state.activate_node(self.node_id, HEARTBEAT_DEFAULT_INTERVAL)
        self.state.nodes[self.node_id].online_until = time.time() + still_believed_s
        (self.kit.folder / "flower" / "node-id").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("made") / "federation"
    asked = Federation(folder=folder, name="x", hosts=(HOST,), bind=HOST, port=free_port())
    federation = provision.init(asked, [("a", None), ("b", None)], lifetime=dt.timedelta(days=40))
    app, is_open = create_app(), threading.Event()
    is_open.set()
    config = uvicorn.Config(
        Gate(app, is_open, partial(is_active, folder)),
        host=HOST,
        port=federation.port,
        ssl_certfile=federation.certificate,
        ssl_keyfile=federation.server / "server.key",
        log_level="error",
    )
    state = app.state.linkstate_factory.state()
    ids = [
        state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, in_pem(site.public_key), 30.0, name=site.name)
        for site in federation.sites
    ]
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)  # so are those of its pool
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield Served(federation, state, ids[0])
    server.should_exit = True
    thread.join()


def greeted(kit: Kit) -> list[str]:
    """What a site says on its way in."""
    said: list[str] = []
    start._greet(kit, said.append, HOST)
    return said


def test_a_site_that_was_killed_is_told_what_it_waits_for_and_let_in_when_its_heartbeat_has_run_out(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "_POLL_S", 0.05)
    served.was_killed(still_believed_s=0.5)
    began_at = time.monotonic()
    (said,) = greeted(served.kit)
    assert 0.3 < time.monotonic() - began_at < 5
    assert "believes that its former SuperNode is still connected: for 60 s after that was killed" in said
    assert greeted(served.kit) == []


def test_a_site_that_remembers_its_former_supernode_does_not_wait(served: Served) -> None:
    served.was_killed(still_believed_s=60)
    (served.kit.folder / "flower").mkdir(exist_ok=True)
    (served.kit.folder / "flower" / "node-id").write_text(str(served.node_id), encoding="ascii")
    assert greeted(served.kit) == []


def test_a_key_that_is_in_use_elsewhere_is_refused_when_the_wait_is_over(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.was_killed(still_believed_s=60)
    monkeypatch.setattr(start, "HEARTBEAT_S", -start._SLACK_S)
    with pytest.raises(StillThereError, match="or as long as another machine uses the same key"):
        greeted(served.kit)
    (row,) = (row for row in check_site(served.kit) if row["what"] == "membership")
    assert (row["state"], "former SuperNode" in row["detail"]) == ("warn", True)


def test_the_keys_of_strangers_and_of_revoked_sites_are_refused_at_once(served: Served) -> None:
    """Also where the SuperLink still knows them."""
    provision.revoke(open_federation(served.federation.folder), "b")
    kit = served.federation.kit("b")
    for _ in ("revoked", "stranger"):
        began_at = time.monotonic()
        with pytest.raises(EngineError, match="does not take this site's key: it is revoked, or was never registered"):
            greeted(open_kit(kit))
        assert time.monotonic() - began_at < 5
        (kit / "key").unlink()
        keys.make_key(kit / "key", comment="b")


def test_without_keys_every_supernode_is_let_in(tmp_path: Path) -> None:
    asked = Federation(folder=tmp_path / "federation", name="x", hosts=(HOST,), insecure=True)
    made = provision.init(asked, [("a", None)], lifetime=dt.timedelta(days=40))
    assert is_active(made.folder, b"")
