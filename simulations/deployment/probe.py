"""What a site sees of its server: TLS handshake, certificate expiry, clock, and whether its key is accepted.

Everything except the last uses only Python's standard library, so that it does not depend on Flower.
"""

import datetime as dt
import email.utils
import ssl
from contextlib import closing, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any

import httpx
from cryptography import x509
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, HEARTBEAT_PATIENCE
from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient

from fedsign.errors import EngineError
from fedsign.flower.signatures import REFUSAL_HEADER, UNKNOWN, SignedRequests, skewed
from simulations.deployment.federation import with_port
from simulations.deployment.keys import ends_at, load_private
from simulations.deployment.startup_kits import AUTHORITY_FILE, StartupKit

_NOT_YET_VALID, _EXPIRED, _NAME_MISMATCH, _ADDRESS_MISMATCH = 9, 10, 62, 64  # X509_V_ERR_... of OpenSSL
_OTHER_NAME = (
    "the certificate of the server does not cover {host}; its operators can add it with 'fedsign deploy renew "
    "--host {host}'."
)
_UNTRUSTED = {
    _NOT_YET_VALID: (
        "the certificate of {host} is not valid yet; it was made by a machine whose clock was ahead: its operators can "
        "issue a new one with 'fedsign deploy renew' and restart the SuperLink."
    ),
    _EXPIRED: (
        "the certificate of {host} has expired{end}; its operators can issue a new one with 'fedsign deploy renew' and "
        "start the SuperLink again."
    ),
    _NAME_MISMATCH: _OTHER_NAME,
    _ADDRESS_MISMATCH: _OTHER_NAME,
}
_FOREIGN = (
    "the certificate of {host} is not signed by this federation's CA ({why}); it is another server, or the "
    "federation was made anew: ask for a new kit."
)
_OLD_KIT = "the CA of this kit, {ca}, has expired: no server can be trusted by it; ask for a new kit."
_TIMEOUT_S = 10.0
HEARTBEAT_S = HEARTBEAT_PATIENCE * HEARTBEAT_DEFAULT_INTERVAL


class ServerError(EngineError):
    """The server cannot be reached, or its certificate is not signed by the federation's CA."""


class AwayError(ServerError):
    """The server cannot be reached; retrying may help."""


class StillThereError(EngineError):
    """The SuperLink believes that the site is connected already, until the former SuperNode's heartbeat expires."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerInfo:
    """The server as a site sees it. `certificate_ends`: None without TLS; `ahead_s`: how far this clock is ahead of
    it.
    """

    certificate_ends: dt.datetime | None
    ahead_s: float


def probe_server(host: str, port: int, *, authority: Path | None) -> ServerInfo:
    """Connect to the server as a SuperNode would.

    Raises:
        ServerError: it does not answer, or its certificate is not trusted.
    """
    connection, ends = HTTPConnection(host, port, timeout=_TIMEOUT_S), None
    if authority is not None:
        connection = HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=_trusting(authority))
    try:
        # sends the handshake; the certificate is read before getresponse, which may close the socket
        connection.request("GET", "/health")
        if isinstance(connection.sock, ssl.SSLSocket):
            ends_s = ssl.cert_time_to_seconds(str((connection.sock.getpeercert() or {})["notAfter"]))
            ends = dt.datetime.fromtimestamp(ends_s, dt.UTC)
        ahead_s = _ahead_s(connection)
    except ssl.SSLCertVerificationError as error:
        ahead_s, end = _untrusted(host, port) if error.verify_code in (_NOT_YET_VALID, _EXPIRED) else (0.0, "")
        is_old = authority is not None and ends_at(authority) < dt.datetime.now(dt.UTC)
        sentence = skewed(ahead_s) or (_OLD_KIT if is_old else _UNTRUSTED.get(error.verify_code, _FOREIGN))
        raise ServerError(sentence.format(host=host, why=error.verify_message, end=end, ca=authority)) from error
    except ssl.SSLError as error:
        raise ServerError(
            f"what answers at {host}, port {port}, does not speak TLS ({error.reason}); is it another program, or a "
            "federation made with --insecure?"
        ) from error
    except (OSError, HTTPException) as error:
        raise AwayError(
            f"nothing answers at {host}, port {port} ({error}); start the SuperLink there, and let the firewall pass "
            "this port."
        ) from error
    finally:
        connection.close()
    return ServerInfo(certificate_ends=ends, ahead_s=ahead_s)


def _ahead_s(connection: HTTPConnection) -> float:
    """How far this machine's clock is ahead of that of the server that answers."""
    date = connection.getresponse().headers["date"]
    # right after the response, whose Date it is compared with
    received_at = dt.datetime.now(dt.UTC)
    # the header truncates to whole seconds, half a second on average
    return (received_at - email.utils.parsedate_to_datetime(date)).total_seconds() - 0.5 if date else 0.0


def _untrusted(host: str, port: int) -> tuple[float, str]:
    """`_ahead_s` of a server that is not trusted, and when its certificate ends, as part of a sentence."""
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    asked: Any = HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=trusting)
    with suppress(OSError, HTTPException, ValueError), closing(asked):
        asked.request("GET", "/health")
        end = x509.load_der_x509_certificate(asked.sock.getpeercert(binary_form=True)).not_valid_after_utc
        return _ahead_s(asked), f", on {end:%Y-%m-%d %H:%M} UTC"
    return 0.0, ""


def _trusting(authority: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=authority)
    except OSError as error:  # ssl.SSLError is a subclass
        raise ServerError(
            f"{authority} is no CA's certificate that can be read ({error.strerror or error}); unpack the kit again."
        ) from error


def check_is_known(kit: StartupKit, *, host: str) -> bool:
    """Whether the SuperLink accepts the site's key; False if that could not be found out.

    The site announces itself as its SuperNode does on start, and leaves at once. The SuperLink refuses a site that it
    believes to be connected, such as one whose SuperNode was killed less than a minute ago. So the site first announces
    that its former node has left, if it knows that node's id.

    Raises:
        ConfigError: the key cannot be used.
        StillThereError: the SuperLink accepts the key, but believes the site to be connected.
        EngineError: the SuperLink refuses the key.
    """
    key, former = load_private(kit.key), kit.folder / "flower" / "node-id"
    former.parent.mkdir(exist_ok=True)
    interceptors = [SignedRequests(key, key.public_key())]
    authority = (kit.folder / AUTHORITY_FILE).read_bytes()
    address = with_port(host, kit.facts["port"])
    try:
        with FleetHttpClient.from_server_address(address, False, authority, interceptors) as client:
            with suppress(httpx.HTTPStatusError, OSError, ValueError):  # there was no such node, or it left cleanly
                client.DeactivateNode(DeactivateNodeRequest(node_id=int(former.read_text(encoding="ascii"))))
            public = public_key_to_bytes(key.public_key())
            here = ActivateNodeRequest(public_key=public, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
            node_id = client.ActivateNode(here).node_id
            # before signing off: if this process is killed in between, the next probe signs the node off
            former.write_text(str(node_id), encoding="ascii")
            client.DeactivateNode(DeactivateNodeRequest(node_id=node_id))
    except httpx.HTTPError as error:
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code == httpx.codes.PRECONDITION_FAILED:
            raise StillThereError(
                "the SuperLink knows this site's key, but believes that its former SuperNode is still connected: for "
                f"{HEARTBEAT_S} s after that was killed, or as long as another machine uses the same key."
            ) from error
        # a proxy or the closed gate answers these: they say nothing about the key
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code not in (502, 503, 504):
            why = error.response.headers.get(REFUSAL_HEADER, UNKNOWN)
            if why != UNKNOWN:
                raise EngineError(f"the SuperLink refuses this site. {why}") from error
            raise EngineError(
                "the SuperLink rejects this site's key: it is revoked or was never registered; "
                "ask the server's operators for a new kit."
            ) from error
        return False
    return True
