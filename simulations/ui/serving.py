"""Start the server: a socket, a token, an index, and one line with the URL."""

import os
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path

import typer
import uvicorn
from starlette.applications import Starlette

from fedsign.errors import ResultsError
from simulations.ui.index import Index
from simulations.ui.security import is_loopback
from simulations.ui.server import Server


def serve(roots: Sequence[Path], *, host: str, port: int, is_read_only: bool) -> None:
    """Serve until Ctrl-C.

    Raises:
        ResultsError: the address cannot be used.
    """
    listener = listen(host, port)
    token = secrets.token_urlsafe(24)
    app, _ = application(roots, host=host, port=listener.getsockname()[1], token=token, is_read_only=is_read_only)
    if not is_loopback(host):
        typer.echo(
            f"warning: --host {host} lets other machines connect, without encryption; whoever reads the token can "
            f"{'see the runs' if is_read_only else 'see and resume runs'}.",
            err=True,
        )
    shown = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    typer.echo(f"http://{shown}:{listener.getsockname()[1]}/?token={token}")
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="warning", lifespan="off", ws="none", timeout_graceful_shutdown=1)
    )
    server.run(sockets=[listener])


def application(
    roots: Sequence[Path], *, host: str, port: int, token: str, is_read_only: bool
) -> tuple[Starlette, Index]:
    """The application, whose index has begun to read the runs."""
    cache = cache_folder()
    index = Index(roots, cache)
    index.start()
    return Server(index, token=token, logs=cache, is_read_only=is_read_only).app(host=host, port=port), index


def cache_folder() -> Path:
    """Where the index lies: the user's own cache, so that a folder with runs can be read-only or untrusted."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "fedsign"


def listen(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        ResultsError: the address cannot be used.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()  # before the URL is printed: a browser that is faster than the server waits
    except OSError as error:
        raise ResultsError(
            f"--host {host} --port {port} cannot be used ({error.strerror}); give another port, or 0 for any free one."
        ) from error
    return listener
