"""Framed messages over a stream socket: a Unix socket, TCP, or either wrapped by `ssl`.

A frame is two lengths (big-endian, 4 bytes for the header, 8 for the payload), a header that is a JSON object, and a payload of bytes.
Lengths are checked before memory is allocated.  A payload is received into memory of the receiver's, without a copy.
Over a Unix socket a frame may bring a file descriptor; see `fedsign.transport.tensors`.

[Note: a lost peer] Sending to a peer that is gone does not raise; receiving returns None.  So there is one place where a loss is handled.
The kernel reports a process that ends at once, and a host or network that fails after some 20 seconds, by TCP's keepalive probes.

[Note: TLS] A server should set `SSLContext.num_tickets = 0`: session tickets make a client's socket readable when there is no message.
"""

import json
import os
import select
import socket
import struct
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

Message = dict[str, Any]
Buffer = bytes | bytearray | memoryview

MAX_HEADER_BYTES = 2**26
_LENGTHS = struct.Struct(">IQ")
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_CHUNK_BYTES = 2**18
_SHUTDOWN_S = 2.0
_ANCILLARY_BYTES = socket.CMSG_SPACE(struct.calcsize("i"))
_TCP_OPTIONS = {  # see [Note: a lost peer]; a system without an option reports the loss later
    "TCP_NODELAY": 1,
    "TCP_KEEPIDLE": 5,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 20_000,  # milliseconds, for what was sent
}


class Connection:
    """One end of a connection; iterating yields messages until the peer is gone."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._is_tls = hasattr(sock, "pending")
        self.passes_descriptors = sock.family == socket.AF_UNIX and not self._is_tls
        self.local_host = self.peer_host = ""  # of TCP
        if sock.family == socket.AF_INET:
            self.local_host, self.peer_host = sock.getsockname()[0], sock.getpeername()[0]
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _TCP_OPTIONS.items():
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._unsent, self._unread = bytearray(), bytearray()
        self._descriptors: deque[int] = deque()
        self._deadline: float | None = None

    def fileno(self) -> int:
        """For `select` and its like; `poll` also sees what TLS has buffered."""
        return self._socket.fileno()

    def __iter__(self) -> Iterator[Message]:
        return iter(self.receive, None)

    def send(
        self, message: Message, payload: Buffer = b"", *, descriptor: int | None = None, flush: bool = True
    ) -> None:
        """Send a frame; without `flush`, together with the next frame that is flushed.  See [Note: a lost peer]."""
        header = json.dumps(message).encode()
        self._unsent += _LENGTHS.pack(len(header), len(payload)) + header
        if not (flush or payload or descriptor is not None):
            return
        unsent, self._unsent = self._unsent, bytearray()
        try:
            self._limit_wait()
            if descriptor is not None:
                del unsent[: socket.send_fds(self._socket, [unsent], [descriptor])]
            self._socket.sendall(unsent)
            if payload:
                self._socket.sendall(payload)
        except OSError:
            self.shutdown()

    def receive(self, payload: memoryview | None = None, *, max_header: int = MAX_HEADER_BYTES) -> Message | None:
        """Wait for the next message; its payload fills the start of a buffer.

        Returns None if the peer is gone, does not follow the protocol, exceeds a limit, or misses the deadline.
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
        """The complete messages of a readable connection, without payloads; the last is None if the peer is gone."""
        messages: list[Message | None] = []
        try:
            chunk = self._socket.recv(_CHUNK_BYTES)
            if not chunk:
                raise ConnectionResetError
            self._unread += chunk
            start = 0
            while len(self._unread) >= (begin := start + _LENGTHS.size):
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

    def take_descriptor(self) -> int:
        """The file descriptor that came with the last message; the caller closes it.

        Raises:
            OSError: none came, or this process has too many open.
        """
        if not self._descriptors:
            raise OSError("a message came without its file descriptor; raise the limit of open files (ulimit -n).")
        return self._descriptors.popleft()

    @contextmanager
    def deadline(self, seconds: float) -> Iterator[None]:
        """Treat a peer that has not sent or received everything within this block as lost, however it trickles."""
        self._deadline = time.monotonic() + seconds
        try:
            yield
        finally:
            self._deadline = None
            with suppress(OSError):
                self._socket.settimeout(None)

    def peer_user(self) -> int:
        """The user whose process is at the other end of a Unix socket."""
        found = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return int(_CREDENTIALS.unpack(found)[1])

    def has_buffered(self) -> bool:
        """Whether TLS has decrypted more than was read, which the system's `poll` does not see."""
        return self._is_tls and bool(self._socket.pending())  # type: ignore[attr-defined]

    def finish(self, message: Message) -> None:
        """Send the last message, wait until the peer has it, and close: to close with unread data would discard it."""
        with self.deadline(_SHUTDOWN_S):
            self.send(message)
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
                while self._read_into(memoryview(bytearray(_CHUNK_BYTES))):
                    pass
        self.close()

    def shutdown(self) -> None:
        """Let both ends see the end of the connection, as well as another thread that waits here."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Shut down and close."""
        self.shutdown()
        self._socket.close()
        _close_all(self._descriptors)

    def _exactly(self, num: int) -> bytearray:
        buffer = bytearray(num)
        self._fill(memoryview(buffer))
        return buffer

    def _fill(self, buffer: memoryview) -> None:
        """Raises: OSError: the peer is gone."""
        num = min(len(buffer), len(self._unread))
        buffer[:num] = self._unread[:num]
        del self._unread[:num]
        while num < len(buffer):
            more = self._read_into(buffer[num:])
            if not more:
                raise ConnectionResetError
            num += more

    def _read_into(self, buffer: memoryview) -> int:
        self._limit_wait()
        if not self.passes_descriptors:
            return self._socket.recv_into(buffer)
        num, ancillary, _, _ = self._socket.recvmsg_into([buffer], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._descriptors.extend(array("i", data[: len(data) - len(data) % 4]))
        return num

    def _limit_wait(self) -> None:
        """Raises: TimeoutError: the deadline has passed."""
        if self._deadline is not None:
            left_s = self._deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            self._socket.settimeout(left_s)


def local_address(name: str) -> str:
    """Of a Unix socket in Linux's abstract namespace: nothing lies on a disk."""
    return f"\0fedsign-{name}"


def poll(connections: Iterable[Connection], timeout_s: float | None = None) -> list[Connection]:
    """Those with messages or without a peer; waits for the first, at most `timeout_s`."""
    poller = select.poll()
    known = {connection.fileno(): connection for connection in connections}
    buffered = [connection for connection in known.values() if connection.has_buffered()]
    if buffered:
        return buffered
    for number in known:
        poller.register(number, select.POLLIN)
    return [known[number] for number, _ in poller.poll(None if timeout_s is None else 1000 * timeout_s)]


def _lengths(prefix: Buffer, max_header: int, payload: memoryview | None) -> tuple[int, int]:
    """Raises: ValueError: header or payload exceeds its limit."""
    num_header, num_payload = _LENGTHS.unpack(prefix)
    if num_header > max_header or num_payload > (0 if payload is None else len(payload)):
        raise ValueError("a frame exceeds its limit")
    return num_header, num_payload


def _parsed(header: bytearray) -> Message:
    """Raises: ValueError: it is not a JSON object."""
    try:
        message = json.loads(header)
    except RecursionError as error:  # of a stranger's brackets
        raise ValueError("a header is nested too deeply") from error
    if not isinstance(message, dict):
        raise ValueError("a header is not a JSON object")
    return message


def _close_all(descriptors: deque[int]) -> None:
    while descriptors:
        os.close(descriptors.popleft())
