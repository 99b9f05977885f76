"""A gate in front of the SuperLink: other machines and accounts reach only what a SuperNode needs.

Flower 1.41 serves all its APIs on one port, and the open-source SuperLink has no accounts. Anyone who reaches the port
could register a key, or start a run, which executes code at every site. The gate therefore lets all pass to the Fleet
API, which requires a registered key; runs and registrations are for the account that runs the SuperLink
(`fedsign.flower.door`).

Two cases need care because of how SuperNodes react. Before the sites are registered, a SuperNode or a health probe is
told to try again, since it would take a refusal as final. A key without an active site is refused here, since Flower
would answer as it does for a site that it believes to be connected already.

`python -m simulations.deployment.gate FEDERATION ARGUMENTS...` runs `flower-superlink ARGUMENTS...` behind the gate,
and registers the federation's sites once it answers.
"""

import os
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
from flwr.supercore.error import ApiErrorCode
from flwr.superlink import extensions
from flwr.superlink.cli import flower_superlink
from flwr.superlink.servicer.fleet import fleet_handlers
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from fedsign.errors import FedSignError
from fedsign.flower import door
from fedsign.flower.door import HEALTH, is_own
from simulations.deployment.federation import Federation, open_federation
from simulations.deployment.membership import answers, in_pem, register_sites
from simulations.deployment.refusals import Refusals

_OPEN_TO_SITES = "/v1/fleet/"
_REFUSAL = "Only SuperNodes are served; start runs and register sites on the server's machine, by its account.\n"
_UNKNOWN = "This key is not that of an active site."
_NOT_YET = "The sites are being registered; try again.\n"
# ASGI header names are lower-case bytes, and so is Flower's constant
_ACTIVATE, _KEY_HEADER = "/v1/fleet/activate-node", FLEET_HTTP_PUBLIC_KEY_HEADER.encode("ascii")
_POLL_S = 0.2


class Gate:
    """The outermost ASGI middleware. `is_open`: sites are registered; `knows`: whether a key is an active site's."""

    def __init__(
        self, app: ASGIApp, is_open: threading.Event, knows: Callable[[bytes], bool] = lambda key: True
    ) -> None:
        self.app = app
        self.is_open = is_open
        self.knows = knows

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        app = self.app
        # the server's own start and stop events have no path and no client
        if scope["type"] != "lifespan":
            if scope["path"].startswith((_OPEN_TO_SITES, HEALTH)) and not self.is_open.is_set():
                app = PlainTextResponse(_NOT_YET, status_code=503)
            elif not may_pass(scope):
                refusal = PlainTextResponse(_REFUSAL, status_code=403)
                app = refusal if scope["type"] == "http" else WebSocketClose(code=1008)
            elif scope["path"] == _ACTIVATE and not self.knows(dict(scope["headers"]).get(_KEY_HEADER, b"")):
                # 404, because Flower's SuperNode takes a 403 as the end of a run, and hangs
                app = JSONResponse(
                    {"code": ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED, "detail": _UNKNOWN}, status_code=404
                )
        await app(scope, receive, send)


def may_pass(scope: Scope) -> bool:
    """Whether a request is a SuperNode's, or comes from this account on this machine."""
    path = scope["path"]
    return path == HEALTH or path.startswith(_OPEN_TO_SITES) or is_own(scope)


def is_active(folder: Path, key: bytes) -> bool:
    """Whether a key, as sent by a SuperNode, is an active site's; without keys everyone is accepted."""
    # read again for every activation: sites are added and revoked while the SuperLink runs
    federation = open_federation(folder)
    return federation.insecure or key in {b64encode(in_pem(site.public_key)) for site in federation.active}


def guard(federation: Federation, is_open: threading.Event) -> None:
    """Put the gate, and the count of refused replies, in front of this process's SuperLink."""
    gate = Middleware(Gate, is_open=is_open, knows=partial(is_active, federation.folder))
    door.install()
    door.hide_tokens()
    # Flower calls both through their modules when it builds and serves its app, so these must be set before it starts
    extensions.get_middleware = lambda: (gate,)
    fleet_handlers.push_messages = Refusals(federation).push_messages


def main() -> None:
    """Run the SuperLink behind the gate."""
    door.hide()
    folder, *arguments = sys.argv[1:]
    federation = open_federation(Path(folder))
    is_open = threading.Event()
    guard(federation, is_open)
    # in a thread: registration talks to the SuperLink, which blocks the main thread until it ends
    threading.Thread(target=_register_when_up, args=[federation, is_open], daemon=True).start()
    sys.argv = ["flower-superlink", *arguments]  # Flower's entry point parses sys.argv
    superlink: Any = flower_superlink
    superlink()


def _register_when_up(federation: Federation, is_open: threading.Event) -> None:
    try:
        while not answers(federation):
            time.sleep(_POLL_S)
        register_sites(federation)
    except Exception as error:  # noqa: BLE001 - after any error here, the gate would stay closed forever
        message = error if isinstance(error, FedSignError) else f"{type(error).__name__}: {error}"
        print(f"fedsign: the sites could not be registered: {message}", file=sys.stderr, flush=True)
        os._exit(1)  # sys.exit would end this thread only
    is_open.set()


if __name__ == "__main__":
    main()
