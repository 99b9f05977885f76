"""A gate in front of the SuperLink: other machines and accounts reach only what a SuperNode needs.

Flower 1.41 serves all its APIs on one port, and the open-source SuperLink has no accounts. Anyone who reaches the port
could register a key, or start a run, which executes code at every site. The gate therefore lets sites pass to the Fleet
API alone; runs and registrations are for the account that runs the SuperLink (`fedsign.flower.door`).

Flower reads and translates a body before it looks at the key. The gate looks first (`admission`), and reads the body of
a site only, up to a limit, a few at a time.

Two cases need care because of how SuperNodes react. Before the sites are registered, a SuperNode or a health probe is
told to try again, since it would take a refusal as final. A key without an active site is refused here, since Flower
would answer as it does for a site that it believes to be connected already.

`python -m simulations.deployment.gate FEDERATION ARGUMENTS...` runs `flower-superlink ARGUMENTS...` behind the gate,
and registers the federation's sites once it answers.
"""

import asyncio
import gc
import hashlib
import os
import sys
import threading
import time
from collections import defaultdict
from contextlib import AbstractAsyncContextManager, nullcontext
from math import inf
from pathlib import Path
from typing import Any

from flwr.supercore.error import ApiErrorCode
from flwr.superlink import extensions
from flwr.superlink.cli import flower_superlink
from flwr.superlink.servicer.fleet import fleet_handlers
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from fedsign.errors import FedSignError
from fedsign.flower import door
from fedsign.flower.door import HEALTH, is_own
from fedsign.flower.signatures import REFUSAL_HEADER
from simulations.deployment.admission import Admission, RefusedError, address_of
from simulations.deployment.federation import Federation, open_federation
from simulations.deployment.membership import answers, register_sites
from simulations.deployment.progress import runs_of
from simulations.deployment.refusals import Refusals

STDIN = "/dev/stdin"  # in place of the file of the server's key
MAX_BODY = 2**25  # of one request; Flower cuts arrays into parts of 5 MiB
_OPEN_TO_SITES, _ACTIVATE, _REGISTER = "/v1/fleet/", "/v1/fleet/activate-node", "/v1/fleet/register-node"
_PULL, _PUSH = "/v1/fleet/pull-messages", "/v1/fleet/push-object"
_REFUSAL = "Only SuperNodes are served; start runs and register sites on the server's machine, by its account."
_NOT_YET = "The sites are being registered; try again."
_LONG = f"A request may have at most {MAX_BODY // 2**20} MiB; lower Flower's FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE."
_NO_BODY = "A body is not allowed here."
_SLOW = "The rest of the request did not come."
_MUCH = "A reply may have at most eight times the bytes of the model plus 64 MiB."
_CHANGED = "The body is not the one that was signed."
_BODY_S = 60.0  # between two parts of a body
_SMALL, _MAX_LARGE = 2**16, 2  # of a site at a time: as many as its SuperNode sends
_MARGIN, _MODELS = 2**26, 8  # bytes and models that a site may upload for one message; SCAFFOLD replies with two
_LOOK_S = 5.0
_COLLECT_BYTES = 2**26
_POLL_S = 0.2


class Gate:
    """The outermost ASGI middleware. `is_open`: sites are registered."""

    def __init__(self, app: ASGIApp, is_open: threading.Event, admission: Admission) -> None:
        self.app, self.is_open, self.admission = app, is_open, admission
        self._uploads = Uploads(admission.federation)
        self._num_read = 0
        self._large: dict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(_MAX_LARGE))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        # the server's own start and stop events have no path and no client
        if scope["type"] == "lifespan":
            door.hurry()
            await self.app(scope, receive, send)
            return
        try:
            await self._pass(scope, receive, send)
        except RefusedError as refusal:
            await _refused(refusal, scope)(scope, receive, send)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, is_own_request = scope["path"], is_own(scope)
        if path.startswith((_OPEN_TO_SITES, HEALTH)) and not self.is_open.is_set():
            raise RefusedError(503, _NOT_YET)
        if scope["type"] == "http" and path.startswith(_OPEN_TO_SITES):
            await self._serve_site(scope, receive, send)
        elif is_own_request or (scope["type"] == "http" and path == HEALTH):
            if not is_own_request and _length(scope) != 0:
                raise RefusedError(413, _NO_BODY)
            await self.app(scope, receive, send)
        else:
            raise RefusedError(403, _REFUSAL)

    async def _serve_site(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == _REGISTER and not self.admission.federation.insecure:
            raise RefusedError(403, _REFUSAL)
        site, digest = self.admission.digest_of(scope)
        door.admit(scope, site)
        length = _length(scope)
        is_large = length is None or length > _SMALL
        turn: AbstractAsyncContextManager[Any] = self._large[site] if is_large and site else nullcontext()
        # held until Flower has answered: it copies a body several times
        async with turn:
            try:
                body = await self._body(site, length, digest, scope, receive)
            except RefusedError as refusal:
                self.admission.count(site, address_of(scope), refusal)
                raise
            if body is not None:
                send = self._uploads.watched(site, send) if scope["path"] == _PULL else send
                self._num_read += len(body)
                await self.app(scope, _replayed(body, receive), send)
        if self._num_read > _COLLECT_BYTES:  # Flower's errors hold their requests until the next collection
            self._num_read = 0
            gc.collect()

    async def _body(
        self, site: str, length: int | None, digest: str | None, scope: Scope, receive: Receive
    ) -> bytes | None:
        """The body that was signed; None if the connection was lost."""
        if length is not None and length > MAX_BODY:
            raise RefusedError(413, _LONG)
        body = await _read(receive)
        if body is None:
            return None
        if digest is not None and hashlib.sha256(body).hexdigest() != digest:
            raise RefusedError(401, _CHANGED)
        if scope["path"] == _PUSH and not self._uploads.may_add(site, len(body)):
            raise RefusedError(413, _MUCH)
        return body


class Uploads:
    """Bytes that each site has uploaded since its last message, against the model's."""

    def __init__(self, federation: Federation) -> None:
        self._federation, self._bytes = federation, defaultdict[str, int](int)
        self._looked_at, self._most = -_LOOK_S, inf

    def may_add(self, site: str, num_bytes: int) -> bool:
        """Count an object, unless the site has sent enough."""
        self._bytes[site] += num_bytes
        return not site or self._bytes[site] <= self._limit()

    def watched(self, site: str, send: Send) -> Send:
        """`send` of an answer to a site that asks for messages; with one, it may reply again."""

        status = 0

        async def watch(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            if status == 200 and message.get("body"):
                self._bytes[site] = 0
            await send(message)

        return watch

    def _limit(self) -> float:
        now = time.monotonic()
        if now - self._looked_at > _LOOK_S:
            sizes = [run.model_bytes for run in runs_of(self._federation) if run.is_running]
            # a run that does not tell its model's may have any
            self._looked_at, self._most = now, max(sizes) * _MODELS + _MARGIN if sizes and all(sizes) else inf
        return self._most


def _length(scope: Scope) -> int | None:
    """The announced length of a body; None if it comes in chunks."""
    headers = Headers(scope=scope)
    return None if "transfer-encoding" in headers else int(headers.get("content-length", 0))


async def _read(receive: Receive) -> bytes | None:
    """A body; None if the connection was lost.

    Raises:
        RefusedError: it is too long, or comes too slowly.
    """
    parts, length = [], 0
    while True:
        try:
            message = await asyncio.wait_for(receive(), _BODY_S)
        except TimeoutError as error:
            raise RefusedError(408, _SLOW) from error
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        length += len(parts[-1])
        if length > MAX_BODY:
            raise RefusedError(413, _LONG)
        if not message.get("more_body", False):
            return b"".join(parts)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """`receive` of a request whose body was read."""
    left = [body]

    async def replay() -> Message:
        return {"type": "http.request", "body": left.pop(), "more_body": False} if left else await receive()

    return replay


def _refused(refusal: RefusedError, scope: Scope) -> ASGIApp:
    """The answer to a refused request; the connection ends with it, so that nobody reads the rest."""
    if scope["type"] == "websocket":
        return WebSocketClose(code=1008)
    door.end(scope)
    status, detail = refusal.status, str(refusal)
    # 404, because Flower's SuperNode takes a 403 as the end of a run, and hangs
    if scope["path"] == _ACTIVATE and status == 401:
        status = 404
    content = {"code": ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED, "detail": detail}
    return JSONResponse(content, status_code=status, headers={REFUSAL_HEADER: detail, "connection": "close"})


def guard(federation: Federation, is_open: threading.Event) -> None:
    """Put the gate, and the count of refused replies, in front of this process's SuperLink."""
    refusals = Refusals(federation)
    gate = Middleware(Gate, is_open=is_open, admission=Admission(federation.folder, refusals))
    door.install()
    door.hide_tokens()
    # Flower calls both through their modules when it builds and serves its app, so these must be set before it starts
    extensions.get_middleware = lambda: (gate,)
    fleet_handlers.push_messages = refusals.push_messages


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
    if STDIN in arguments:
        sys.argv[sys.argv.index(STDIN)] = in_memory()
    superlink: Any = flower_superlink
    superlink()


def in_memory() -> str:
    """Take the key from standard input, which children inherit, to memory of this hidden process; return its path."""
    descriptor = os.memfd_create("server.key")
    with open(0, "rb", closefd=False) as given, open(os.devnull, "rb") as nothing:  # noqa: PTH123
        os.write(descriptor, given.read())
        os.dup2(nothing.fileno(), 0)
    return f"/proc/self/fd/{descriptor}"


def _register_when_up(federation: Federation, is_open: threading.Event) -> None:
    try:
        while not answers(federation):
            time.sleep(_POLL_S)
        register_sites(federation)
    except Exception as error:  # noqa: BLE001 - after any error here, the gate would stay closed forever
        message = error if isinstance(error, FedSignError) else f"{type(error).__name__}: {error}"
        print(f"fedsign: the sites could not be registered: {message}", file=sys.stderr, flush=True)
        os._exit(1)  # sys.exit would end this thread only
    gc.freeze()  # what was imported: later collections are short
    is_open.set()


if __name__ == "__main__":
    main()
