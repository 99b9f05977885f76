"""Flower's HTTP application behind the gate, with TLS, in this process."""

import datetime as dt
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.superlink.main import create_app

from fedsign.flower.door import Door
from simulations.deployment import provision
from simulations.deployment.admission import Admission
from simulations.deployment.federation import Federation
from simulations.deployment.gate import Gate
from simulations.deployment.membership import in_pem
from simulations.deployment.refusals import Refusals
from simulations.deployment.running import free_port
from simulations.deployment.startup_kits import StartupKit, open_startup_kit

HOST = "127.0.0.1"


@dataclass
class Served:
    """A federation of two sites, its SuperLink's memory, and the node of the first site."""

    federation: Federation
    state: InMemoryLinkState
    node_id: int
    admission: Admission

    @property
    def kit(self) -> StartupKit:
        return open_startup_kit(self.federation.kit("a"))

    def was_killed(self, *, still_believed_s: float) -> None:
        """The site's SuperNode was there, and is gone without a word."""
        self.state.deactivate_node(self.node_id)
        assert self.state.activate_node(self.node_id, HEARTBEAT_DEFAULT_INTERVAL)
        self.state.nodes[self.node_id].online_until = time.time() + still_believed_s
        (self.kit.folder / "flower" / "node-id").unlink(missing_ok=True)


@contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[Served]:
    """A federation of the sites a and b, served in a thread of this process."""
    asked = Federation(folder=folder, name="x", hosts=(HOST,), bind=HOST, port=free_port(), **settings)
    federation = provision.init(asked, [("a", None), ("b", None)], lifetime=dt.timedelta(days=40))
    app, is_open, admission = create_app(), threading.Event(), Admission(folder, Refusals(federation))
    is_open.set()
    app.state.enable_supernode_auth = True
    config = uvicorn.Config(
        Gate(app, is_open, admission),
        host=HOST,
        port=federation.port,
        ssl_certfile=federation.certificate,
        ssl_keyfile=federation.server / "server.key",
        http=Door,
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
    try:
        yield Served(federation, state, ids[0], admission)
    finally:
        server.should_exit = True
        thread.join()
