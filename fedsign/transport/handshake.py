"""Both ends of a connection prove that they know a key, before either trusts the other.

Each end draws a nonce and answers the other's with HMAC-SHA256 over its own role, both nonces and the digest of the
certificate that TLS shows, if there is one (`fedsign.transport.tls`).  So the key is never sent, a recorded
answer fits no other handshake, and an end's own answer cannot be sent back to it.  The listening end speaks first, the connecting end proves itself
first.  Both must agree on facts such as versions.  The whole handshake has a deadline, also for a peer that trickles bytes.

Messages after the handshake are as safe as the socket: over TLS nobody between the ends reads or changes them.
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
_MIN_KEY_BYTES = 16
_MAX_HEADER_BYTES = 2**12  # from a stranger
_LISTENING, _CONNECTING = "listening", "connecting"


def accept(
    connection: Connection, key: bytes, *, facts: Mapping[str, object], remedy: str, timeout_s: float = HANDSHAKE_S
) -> None:
    """Authenticate a peer that has connected, as the listening end; a refused peer learns why.

    Args:
        facts: What both ends must agree on.
        remedy: What to do about keys that differ.

    Raises:
        JoinError: it has other facts or another key, or does not complete the handshake in time.
    """
    with connection.deadline(timeout_s):
        mine = secrets.token_hex()
        connection.send({"nonce": mine})
        hello = connection.receive(max_header=_MAX_HEADER_BYTES)
        if hello is None:
            raise JoinError(f"it did not complete FedSign's handshake within {timeout_s:g} s.")
        why_not = _disagreement(facts, hello.get("facts"))
        if not why_not and not _proves(connection, hello, key, _CONNECTING, mine, hello.get("nonce")):
            why_not = f"the connecting machine has another secret than the listening one, or somebody is between them; {remedy}."
        if why_not:
            connection.send({"refused": why_not})
            raise JoinError(why_not)
        connection.send({"proof": _proof(connection, key, _LISTENING, mine, hello.get("nonce"))})


def connect(connection: Connection, key: bytes, *, facts: Mapping[str, object], timeout_s: float = HANDSHAKE_S) -> bool:
    """Authenticate the listening end, as the one that has connected; False if it does not speak this protocol.

    Raises:
        JoinError: it refuses this end, or does not know the key.
    """
    with connection.deadline(timeout_s):
        mine, hello = secrets.token_hex(), connection.receive(max_header=_MAX_HEADER_BYTES)
        if hello is None or "nonce" not in hello:
            return False
        proof = _proof(connection, key, _CONNECTING, hello["nonce"], mine)
        connection.send({"facts": dict(facts), "nonce": mine, "proof": proof})
        answer = connection.receive(max_header=_MAX_HEADER_BYTES)
        if answer is None:
            return False
        if "refused" in answer:
            raise JoinError(str(answer["refused"]))
        if not _proves(connection, answer, key, _LISTENING, hello["nonce"], mine):
            raise JoinError(
                "the listening machine does not know the secret; check the address, and --secret-file on both."
            )
        return True


def read_key(file: str, *, is_loopback: bool, given_as: str) -> bytes:
    """The content of a file that only its owner can read; empty if none is given, which a loopback address allows.

    Raises:
        ConfigError: it is missing, unreadable, readable for others, or too short.
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
            f"{given_as}={file} holds {len(content)} bytes; expected are {_MIN_KEY_BYTES} at least, such as those of 'openssl rand -hex 32'."
        )
    return content


def _disagreement(mine: Mapping[str, object], theirs: object) -> str:
    """The first fact that differs, as a sentence; empty if none does."""
    if not isinstance(theirs, dict):
        return "the connecting machine does not speak FedSign's protocol."
    for name, value in mine.items():
        if theirs.get(name) != value:
            return f"the connecting machine has {name} {theirs.get(name)}, but the listening one has {value}; install the same versions on both."
    return ""


def _proof(connection: Connection, key: bytes, role: str, listening_nonce: object, connecting_nonce: object) -> str:
    text = json.dumps(
        [role, listening_nonce, connecting_nonce, connection.certificate]
    )  # unambiguous, unlike strings that are joined
    return hmac.digest(key, text.encode(), "sha256").hex()


def _proves(
    connection: Connection, answer: Message, key: bytes, role: str, listening_nonce: object, connecting_nonce: object
) -> bool:
    proof = answer.get("proof")
    return (
        isinstance(proof, str)
        and proof.isascii()
        and hmac.compare_digest(proof, _proof(connection, key, role, listening_nonce, connecting_nonce))
    )
