"""Framed messages over a stream socket: a Unix socket, TCP, or either wrapped by `ssl`.

A frame consists of two lengths (big-endian, 4 bytes for the header, 8 for the payload), a header (a JSON object), and a
payload of bytes.  Lengths are checked before memory is allocated.  Payloads are received directly into a given buffer.
A Unix socket also passes open files; see `fedsign.transport.tensors`.

[Note: a lost peer] Sending to a lost peer does not raise, and receiving returns None, so losses are handled in one
place.  The kernel reports a peer process that ends immediately, and a host or network that fails within about 20
seconds by TCP keepalive.

[Note: TLS] A server should set `SSLContext.num_tickets = 0`.  Session tickets make a client's socket readable although
there is no message.
"""

import hashlib
import json
import os
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from fedsign.errors import EngineError

Message = dict[str, Any]

MAX_HEADER_BYTES = 2**26
_LENGTHS = struct.Struct(">IQ")
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_CHUNK_BYTES = 2**18
_SHUTDOWN_S = 2.0
_TCP_OPTIONS = {  # see [Note: a lost peer]; systems that lack an option report losses later
    "TCP_NODELAY": 1,
    "TCP_KEEPIDLE": 5,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 20_000,  # milliseconds for unacknowledged data
}


class Connection:
    """One end of a connection; iterating yields messages until the peer is lost."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        # bytes that TLS has buffered, which the system's `poll` does not see
        self.num_buffered: Callable[[], int] = getattr(sock, "pending", int)
        self.passes_descriptors = sock.family == socket.AF_UNIX and not hasattr(sock, "pending")
        self.local_host = self.peer_host = ""  # TCP only
        if sock.family == socket.AF_INET:
            with suppress(OSError):  # the peer may be gone already
                self.local_host, self.peer_host = sock.getsockname()[0], sock.getpeername()[0]
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for name in _TCP_OPTIONS.keys() & vars(socket):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), _TCP_OPTIONS[name])
        self._unsent, self._unread = bytearray(), bytearray()
        self._deadline: float | None = None
        self.certificate = ""  # digest of the listening end's TLS certificate, see `fedsign.transport.tls`

    def encrypt(self, context: ssl.SSLContext, *, is_listening: bool) -> None:
        """Switch to TLS.

        Raises:
            OSError: the peer does not speak TLS, is lost, or misses the deadline.
        """
        self._socket = wrapped = context.wrap_socket(
            self._socket, server_side=is_listening, do_handshake_on_connect=False
        )
        self.num_buffered, self.passes_descriptors = wrapped.pending, False
        self._limit_wait()
        wrapped.do_handshake()
        if not is_listening:
            self.certificate = hashlib.sha256(wrapped.getpeercert(binary_form=True) or b"").hexdigest()

    def fileno(self) -> int:
        """For `select` and the like; the function `poll` also considers TLS's buffer."""
        return self._socket.fileno()

    def __iter__(self) -> Iterator[Message]:
        return iter(self.receive, None)

    def send(self, message: Message, payload: bytes | memoryview = b"", *, flush: bool = True) -> None:
        """Send a frame, or buffer it until the next flush.  See [Note: a lost peer]."""
        header = json.dumps(message).encode()
        self._unsent += _LENGTHS.pack(len(header), len(payload)) + header
        if not flush:
            return
        # buffered frames and this header go out in one system call, which matters because TCP_NODELAY is on
        unsent, self._unsent = self._unsent, bytearray()
        try:
            self._limit_wait()
            self._socket.sendall(unsent)
            if payload:  # apart: joined to the header, a large payload would be copied
                self._socket.sendall(payload)
        except OSError:
            self.shutdown()

    def receive(self, payload: memoryview | None = None, *, max_header: int = MAX_HEADER_BYTES) -> Message | None:
        """Wait for the next message, and receive its payload into the start of a buffer.

        Returns None if the peer is lost, violates the protocol, exceeds a limit, or misses the deadline.
        """
        try:
            num_header, num_payload = _lengths(self._exactly(_LENGTHS.size), max_header, payload)
            message = _parsed(self._exactly(num_header))
            if payload is not None:
                self._fill(payload[:num_payload])
        except (OSError, ValueError):
            self.shutdown()
            return None
        return message

    def drain(self) -> list[Message | None]:
        """The complete messages, without payloads, of a readable connection; the last is None if the peer is lost."""
        messages: list[Message | None] = []
        try:
            chunk = self._socket.recv(_CHUNK_BYTES)
            if not chunk:
                raise ConnectionResetError
            self._unread += chunk
            start = 0
            while len(self._unread) >= (begin := start + _LENGTHS.size):
                # None: a payload is a violation here
                num_header, _ = _lengths(self._unread[start:begin], MAX_HEADER_BYTES, None)
                if len(self._unread) < begin + num_header:
                    break
                start = begin + num_header
                messages.append(_parsed(self._unread[begin:start]))
            del self._unread[:start]
        except (OSError, ValueError):
            self.shutdown()
            messages.append(None)
        return messages

    def send_descriptor(self, descriptor: int) -> None:
        """Send an open file over a Unix socket."""
        with suppress(OSError):
            socket.send_fds(self._socket, [b"\0"], [descriptor])

    def receive_descriptor(self) -> int | None:
        """Receive an open file, which the caller must close; None if the peer is lost or too many files are open."""
        with suppress(OSError):
            _, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)  # recv_fds makes it inheritable
                return descriptor
        return None

    @contextmanager
    def deadline(self, seconds: float) -> Iterator[None]:
        """Treat a peer as lost that does not complete its transfers in time, even if it trickles bytes."""
        self._deadline = time.monotonic() + seconds
        try:
            yield
        finally:
            self._deadline = None
            with suppress(OSError):
                self._socket.settimeout(None)

    def check_same_user(self) -> None:
        """Authenticate the peer on a Unix socket by its user, as reported by the kernel.

        Raises:
            EngineError: it belongs to another user.
        """
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(credentials)
        if user != os.getuid():
            raise EngineError(
                f"a process of user {user} is at the other end, but only user {os.getuid()} is trusted; "
                "end that process."
            )

    def finish(self, message: Message) -> None:
        """Send the last message, wait until the peer has read it, and close; closing at once could discard it."""
        with self.deadline(_SHUTDOWN_S):
            self.send(message)
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
                while True:
                    self._exactly(_CHUNK_BYTES)  # until the peer closes
        self.close()

    def shutdown(self) -> None:
        """End the connection for both ends, and wake up other threads that wait on it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Shut down and close."""
        self.shutdown()
        self._socket.close()

    def _exactly(self, num: int) -> bytearray:
        buffer = bytearray(num)
        self._fill(memoryview(buffer))
        return buffer

    def _fill(self, buffer: memoryview) -> None:
        """Receive exactly this many bytes.  Raises: OSError: the peer is lost."""
        num = min(len(buffer), len(self._unread))
        buffer[:num] = self._unread[:num]
        del self._unread[:num]
        while num < len(buffer):
            self._limit_wait()
            more = self._socket.recv_into(buffer[num:])
            if not more:
                raise ConnectionResetError
            num += more

    def _limit_wait(self) -> None:
        """Set the socket's timeout from the deadline.  Raises: TimeoutError: it has passed."""
        if self._deadline is not None:
            left_s = self._deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            self._socket.settimeout(left_s)


def poll(connections: Iterable[Connection], timeout_s: float | None = None) -> list[Connection]:
    """Wait at most `timeout_s` for connections with messages, or with lost peers."""
    poller = select.poll()
    known = {connection.fileno(): connection for connection in connections}
    # TLS may have decrypted a whole record already: then the socket is not readable although a message is waiting.
    buffered = [connection for connection in known.values() if connection.num_buffered()]
    if buffered:
        return buffered
    for number in known:
        poller.register(number, select.POLLIN)  # a hang-up is reported unasked
    return [known[number] for number, _ in poller.poll(None if timeout_s is None else 1000 * timeout_s)]


def _lengths(prefix: bytearray, max_header: int, payload: memoryview | None) -> tuple[int, int]:
    """Unpack and check the lengths of a frame.  Raises: ValueError: one exceeds its limit."""
    num_header, num_payload = _LENGTHS.unpack(prefix)
    if num_header > max_header or num_payload > (0 if payload is None else len(payload)):
        raise ValueError("a frame exceeds its limit")
    return num_header, num_payload


def _parsed(header: bytearray) -> Message:
    """Parse a header.  Raises: ValueError: it is not a JSON object."""
    try:
        message = json.loads(header)
    except RecursionError as error:  # deeply nested input from an unauthenticated peer
        raise ValueError("a header is nested too deeply") from error
    if not isinstance(message, dict):
        raise ValueError("a header is not a JSON object")
    return message
