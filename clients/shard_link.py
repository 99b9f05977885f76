"""Messages with tensors between the machines that train a client together, over TCP: what `clients.parcels` are on one machine.

A frame is two lengths, a message in JSON, and bytes that lie in the sender's memory as they shall lie in the receiver's.  Nothing is pickled,
and nothing is encrypted: who is spoken to is made sure of once, by a secret (`let_in`, `ask_in`), and the network is trusted with the rest.

[Note: an end that is gone] is told by the system: at once where a process ends, however it ends, and after some 20 seconds where a machine
or the network does, which does not answer the probes of a connection any more.

[Note: the proof] Both ends show that they know the secret, without sending it: each answers a number that the other has drawn with
HMAC-SHA256, over its own part in this as well, so that no answer can be sent back as one's own.
"""

import hmac
import json
import secrets
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fedsign
from fedsign.disk import is_private
from fedsign.errors import ConfigError, JoinError
from fedsign.processes import Message

_PROTOCOL = 1
_LENGTHS = struct.Struct(">QQ")  # of the message, and of the bytes behind it
_LONGEST, _LONGEST_STRANGER = 2**26, 2**12  # bytes of a message
_SHORTEST_SECRET = 16
_INTRODUCTION_S = 10.0
_FAREWELL_S = 2.0
_SERVER, _WORKER = b"first machine", b"further machine"
_VIGILANCE = {  # see [Note: an end that is gone]; where a system has no such option, its end is told later
    "TCP_NODELAY": 1,
    "TCP_KEEPIDLE": 5,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 20_000,  # milliseconds, for what was sent
}


class Link:
    """A connection to another machine; what is sent to one that is gone is lost, and that it is gone is heard."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _VIGILANCE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._socket = connection
        self.here: str = connection.getsockname()[0]
        self.there: str = connection.getpeername()[0]

    def fileno(self) -> int:
        """What becomes readable when there is something to be heard, or when the other end is gone."""
        return self._socket.fileno()

    def send(self, message: Message, memory: Tensor | None = None) -> None:
        """Send a message, with a memory [bytes] behind it."""
        text = json.dumps(message).encode()
        num_bytes = 0 if memory is None else len(memory)
        try:
            self._socket.sendall(_LENGTHS.pack(len(text), num_bytes) + text)
            if memory is not None:
                self._socket.sendall(memory.numpy().data)
        except OSError:
            self.cut()

    def receive(self, memory: Tensor | None = None, *, longest: int = _LONGEST) -> Message | None:
        """The next message; what comes behind it is put into a memory [bytes].  None where the other end is gone, or speaks something else."""
        try:
            length, num_bytes = _LENGTHS.unpack(self._exactly(bytearray(_LENGTHS.size)))
            if length > longest or num_bytes > (0 if memory is None else len(memory)):
                raise ConnectionError
            message = json.loads(self._exactly(bytearray(length)))
            if memory is not None:
                self._exactly(memory[:num_bytes].numpy())
        except (OSError, ValueError):
            return None
        return message if isinstance(message, dict) else None

    def patience(self, seconds: float | None) -> None:
        """Take an end that is silent for so long, or too slow, for one that is gone."""
        with suppress(OSError):
            self._socket.settimeout(seconds)

    def say_farewell(self, message: Message) -> None:
        """Send the last message, and wait until the other end has it: to close with something unread would take it back."""
        self.patience(_FAREWELL_S)
        self.send(message)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            while self._socket.recv(_LONGEST_STRANGER):
                pass
        self.close()

    def cut(self) -> None:
        """Let both ends hear that this is over, another thread of this process that listens included."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Both ends hear it: to close alone would not end what another thread waits for."""
        self.cut()
        self._socket.close()

    def _exactly(self, place: Any) -> Any:
        """Fill a buffer.

        Raises:
            OSError: the other end is gone.
        """
        rest = memoryview(place)
        while rest:
            num = self._socket.recv_into(rest)
            if not num:
                raise ConnectionResetError
            rest = rest[num:]
        return place


def let_in(link: Link, secret: bytes) -> None:
    """Make sure of a machine that wants to join; see [Note: the proof].

    Raises:
        JoinError: it has another version or secret, or does not answer.
    """
    link.patience(_INTRODUCTION_S)
    mine = secrets.token_hex()
    link.send({"versions": _versions(), "number": mine})
    said = link.receive(longest=_LONGEST_STRANGER) or {}
    why_not = _differing(said.get("versions"))
    if not why_not and not _is(said.get("proof"), _proof(secret, _WORKER, mine, said.get("number"))):
        why_not = (
            "the machine that joins has another secret than the first one; give its --secret-file the same content as "
            "client.sharding.secret_file, or the node's sharding-secret-file, has here"
        )
    if why_not:
        link.send({"refused": f"{why_not}."})
        raise JoinError(f"{why_not}.")
    link.send({"proof": _proof(secret, _SERVER, mine, said["number"])})
    link.patience(None)


def ask_in(link: Link, secret: bytes) -> bool:
    """Join the first machine; False where nothing answers as one.

    Raises:
        JoinError: it has another version or secret.
    """
    link.patience(_INTRODUCTION_S)
    mine, said = secrets.token_hex(), link.receive(longest=_LONGEST_STRANGER)
    if said is None or "number" not in said:
        return False
    link.send({"versions": _versions(), "number": mine, "proof": _proof(secret, _WORKER, said["number"], mine)})
    answer = link.receive(longest=_LONGEST_STRANGER)
    if answer is None:
        return False
    if "refused" in answer:
        raise JoinError(str(answer["refused"]))
    if not _is(answer.get("proof"), _proof(secret, _SERVER, said["number"], mine)):
        raise JoinError(
            "what answers as the first machine does not know the secret of --secret-file; it is not obeyed."
        )
    link.patience(None)
    return True


def secret_of(file: str, address_is_loopback: bool, *, given_as: str) -> bytes:
    """The content of a file that only its owner can read; nothing where none is needed.

    Raises:
        ConfigError: it is needed and not given, cannot be read, can be read by others, or is too short.
    """
    if not file:
        if address_is_loopback:
            return b""
        raise ConfigError(
            f"{given_as} was not given, but machines join over a network; make a file with "
            "'(umask 077; openssl rand -hex 32 > silo.secret)' and name it on all of them."
        )
    path = Path(file).expanduser()
    try:
        content, private = path.read_bytes().strip(), is_private(path)
    except OSError as error:
        raise ConfigError(
            f"{given_as}={file} cannot be read ({error.strerror}); name the file with the secret."
        ) from error
    if not private:
        raise ConfigError(f"{given_as}={file} can be read by other users of this machine; run 'chmod 600 {file}'.")
    if len(content) < _SHORTEST_SECRET:
        raise ConfigError(
            f"{given_as}={file} holds {len(content)} bytes; expected are {_SHORTEST_SECRET} at least, such as those of 'openssl rand -hex 32'."
        )
    return content


def _versions() -> dict[str, Any]:
    return {"protocol": _PROTOCOL, "fedsign": fedsign.__version__, "torch": torch.__version__.partition("+")[0]}


def _differing(others: object) -> str:
    """What is not as here, as the start of a sentence; empty if all is."""
    if not isinstance(others, dict):
        return "what joins does not speak as a machine with FedSign does"
    for name, mine in _versions().items():
        if others.get(name) != mine:
            return f"the machine that joins has {name} {others.get(name)}, but the first one has {mine}; install the same versions on both"
    return ""


def _proof(secret: bytes, part: bytes, *numbers: object) -> str:
    return hmac.digest(secret, b" ".join([part, *(str(number).encode() for number in numbers)]), "sha256").hex()


def _is(found: object, expected: str) -> bool:
    return isinstance(found, str) and hmac.compare_digest(found.encode(), expected.encode())
