"""What a site sees of its server: the TLS handshake, the certificate's end, the clock.

By Python's own library alone, so that its answer does not depend on Flower's.
"""

import datetime as dt
import email.utils
import ssl
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path

from fedsign.errors import FedSignError

_EXPIRED, _NAME_MISMATCH, _ADDRESS_MISMATCH = 10, 62, 64  # of OpenSSL's X509_V_ERR_...
_OTHER_NAME = "the certificate of the server is not made out to {host}; its people make one that is with 'fedsign deploy renew --host {host}'."
_UNTRUSTED = {
    _EXPIRED: "the certificate of {host} has expired; its people make a new one with 'fedsign deploy renew' and start the SuperLink "
    "again (if it has not, this machine's clock is wrong).",
    _NAME_MISMATCH: _OTHER_NAME,
    _ADDRESS_MISMATCH: _OTHER_NAME,
}
_FOREIGN = (
    "the certificate of {host} is not signed by this federation's CA ({why}); it is another server, or the federation was made anew: "
    "ask for a new kit."
)
_TIMEOUT_S = 5.0


class ServerError(FedSignError):
    """The server cannot be reached, or is not the one that the CA vouches for."""

    def __init__(self, message: str, *, is_final: bool) -> None:
        super().__init__(message)
        self.is_final = is_final  # trying again does not help


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """`certificate_ends`: None without TLS; `ahead_s`: how far this machine's clock is before the server's."""

    certificate_ends: dt.datetime | None
    ahead_s: float


def look_at_server(host: str, port: int, *, authority: Path | None) -> Seen:
    """Ask the server how it is, as a SuperNode would.

    Raises:
        ServerError: there is no answer, or its certificate is not to be trusted.
    """
    connection, ends = HTTPConnection(host, port, timeout=_TIMEOUT_S), None
    if authority is not None:
        connection = HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=_trusting(authority))
    try:
        connection.request("GET", "/health")
        if isinstance(connection.sock, ssl.SSLSocket):
            ends_s = ssl.cert_time_to_seconds(str((connection.sock.getpeercert() or {})["notAfter"]))
            ends = dt.datetime.fromtimestamp(ends_s, dt.UTC)
        date = connection.getresponse().headers["date"]
        seen_at = dt.datetime.now(dt.UTC)
    except ssl.SSLCertVerificationError as error:
        sentence = _UNTRUSTED.get(error.verify_code, _FOREIGN)
        raise ServerError(sentence.format(host=host, why=error.verify_message), is_final=True) from error
    except ssl.SSLError as error:
        raise ServerError(
            f"what answers at {host}, port {port}, does not speak TLS ({error.reason}); is it another program, or a federation "
            "made with --insecure?",
            is_final=True,
        ) from error
    except (OSError, HTTPException) as error:
        raise ServerError(
            f"nothing answers at {host}, port {port} ({error}); start the SuperLink there, and let the firewall pass this port.",
            is_final=False,
        ) from error
    finally:
        connection.close()
    # the header counts whole seconds, cut off: half a second is added on average
    ahead = seen_at - email.utils.parsedate_to_datetime(date) if date else dt.timedelta(seconds=0.5)
    return Seen(certificate_ends=ends, ahead_s=ahead.total_seconds() - 0.5)


def _trusting(authority: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=authority)
    except OSError as error:  # which ssl.SSLError is, too
        raise ServerError(
            f"{authority} is no CA's certificate that can be read ({error.strerror or error}); unpack the kit again.",
            is_final=True,
        ) from error
