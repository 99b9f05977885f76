"""Mutual authentication: both ends of a connection prove that they know a shared key.

Each end sends a nonce and answers the other's with HMAC-SHA256 over its own role, both nonces, and the digest of the
TLS certificate, if any (`fedsign.transport.tls`).  The key is never sent, replays fail because of the nonces, and
reflection fails because of the roles.  The listening end speaks first; the connecting end proves itself first.  Both
must agree on facts such as versions.  A deadline covers the whole handshake, even for a peer that trickles bytes.

Later messages are as secure as the socket: over TLS nobody in between can read or change them.
"""

import hmac
import json
import secrets
from collections.abc import Mapping
from pathlib import Path

from fedsign.errors import ConfigError, JoinError
from fedsign.storage.disk import is_private
from fedsign.transport.connection import Connection, Message

HANDSHAKE_S = 10.0
_MIN_KEY_BYTES = 16  # 128 bits
_MAX_HEADER_BYTES = 2**12  # from an unauthenticated peer
_LISTENING, _CONNECTING = "listening", "connecting"


def accept(
    connection: Connection, key: bytes, *, facts: Mapping[str, object], remedy: str, timeout_s: float = HANDSHAKE_S
) -> None:
    """Authenticate a peer as the listening end; a refused peer learns the reason.

    Args:
        facts: Facts that both ends must agree on.
        remedy: What to do if the keys differ.

    Raises:
        JoinError: the peer has other facts or another key, or does not finish in time.
    """
    with connection.deadline(timeout_s):
        nonce = secrets.token_hex()
        connection.send({"nonce": nonce})
        hello = connection.receive(max_header=_MAX_HEADER_BYTES)
        if hello is None:
            raise JoinError(f"it did not complete FedSign's handshake within {timeout_s:g} s.")
        why_not = _disagreement(facts, hello.get("facts"))
        if not why_not and not _proves(connection, hello, key, _CONNECTING, nonce, hello.get("nonce")):
            why_not = (
                "the connecting machine has another secret than the listening one, or somebody is between them; "
                f"{remedy}."
            )
        if why_not:
            connection.send({"refused": why_not})
            raise JoinError(why_not)
        connection.send({"proof": _proof(connection, key, _LISTENING, nonce, hello.get("nonce"))})


def connect(connection: Connection, key: bytes, *, facts: Mapping[str, object], timeout_s: float = HANDSHAKE_S) -> bool:
    """Authenticate the listening end as the connecting one; False if it does not speak this protocol.

    Raises:
        JoinError: it refuses this end, or does not know the key.
    """
    with connection.deadline(timeout_s):
        nonce, hello = secrets.token_hex(), connection.receive(max_header=_MAX_HEADER_BYTES)
        if hello is None or "nonce" not in hello:
            return False
        proof = _proof(connection, key, _CONNECTING, hello["nonce"], nonce)
        connection.send({"facts": dict(facts), "nonce": nonce, "proof": proof})
        answer = connection.receive(max_header=_MAX_HEADER_BYTES)
        if answer is None:
            return False
        if "refused" in answer:
            raise JoinError(str(answer["refused"]))
        if not _proves(connection, answer, key, _LISTENING, hello["nonce"], nonce):
            raise JoinError(
                "the listening machine does not know the secret; check the address, and --secret-file on both."
            )
        return True


def read_key(file: str, *, is_loopback: bool, given_as: str) -> bytes:
    """Read a key from a file that only its owner can access; on loopback the file is optional and the key empty.

    Raises:
        ConfigError: the file is missing, unreadable, accessible to others, or too short.
    """
    if not file:
        if is_loopback:
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
    if len(content) < _MIN_KEY_BYTES:
        raise ConfigError(
            f"{given_as}={file} holds {len(content)} bytes; expected {_MIN_KEY_BYTES} at least, "
            "such as those of 'openssl rand -hex 32'."
        )
    return content


def _disagreement(ours: Mapping[str, object], theirs: object) -> str:
    """A sentence about the first fact that differs; empty if all agree."""
    if not isinstance(theirs, dict):
        return "the connecting machine does not speak FedSign's protocol."
    for name, value in ours.items():
        if theirs.get(name) != value:
            return (
                f"the connecting machine has {name} {theirs.get(name)}, but the listening one has {value}; "
                "install the same versions on both."
            )
    return ""


def _proof(connection: Connection, key: bytes, role: str, listening_nonce: object, connecting_nonce: object) -> str:
    # JSON, because plain concatenation is ambiguous
    text = json.dumps([role, listening_nonce, connecting_nonce, connection.certificate])
    return hmac.digest(key, text.encode(), "sha256").hex()


def _proves(
    connection: Connection, answer: Message, key: bytes, role: str, listening_nonce: object, connecting_nonce: object
) -> bool:
    proof = answer.get("proof")
    return (
        isinstance(proof, str)
        and proof.isascii()  # compare_digest raises for other texts
        and hmac.compare_digest(proof, _proof(connection, key, role, listening_nonce, connecting_nonce))
    )
