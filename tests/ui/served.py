"""A server of `fedsign ui` in this process, and folders for it."""

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from simulations.ui.index import Index
from simulations.ui.serving import application, listen

TOKEN = "the-token-of-the-tests"


@dataclass(frozen=True, kw_only=True)
class Served:
    """A running server, and a client with its cookie."""

    url: str
    client: httpx.Client
    index: Index

    @property
    def opening_url(self) -> str:
        """The URL that the command prints."""
        return f"{self.url}/?token={TOKEN}"

    def get(self, path: str, **query: Any) -> Any:
        """The JSON at a path."""
        answer = self.client.get(path, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def rows(self, **query: Any) -> list[dict[str, Any]]:
        """The rows of the list, read afresh."""
        self.index.refresh()
        rows: list[dict[str, Any]] = self.get("/api/list", **query)["rows"]
        return rows

    def post(self, path: str, content: Any, **headers: str) -> httpx.Response:
        """POST as the page does, except for some headers."""
        usual = {"origin": self.url, "x-fedsign-token": TOKEN}
        return self.client.post(path, json=content, headers={**usual, **headers})


@contextmanager
def served(roots: Sequence[Path], *, is_read_only: bool = False) -> Iterator[Served]:
    """Serve folders until the block ends."""
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    app, index = application(roots, host="127.0.0.1", port=port, token=TOKEN, is_read_only=is_read_only)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", ws="none"))
    thread = threading.Thread(target=_serve, args=(server, listener))
    thread.start()
    url = f"http://127.0.0.1:{port}"
    try:
        while not server.started or index.progress.is_building:
            time.sleep(0.01)
        with httpx.Client(base_url=url, cookies={f"fedsign-ui-{port}": TOKEN}, trust_env=False, timeout=100) as client:
            yield Served(url=url, client=client, index=index)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def _serve(server: uvicorn.Server, listener: socket.socket) -> None:
    server.run(sockets=[listener])
