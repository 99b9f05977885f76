"""TLS 1.3 between machines of a silo, without a CA: the key that both know vouches for the certificate.

The listening end makes a certificate for each process.  The connecting end takes any, and both bind its SHA-256 digest into the
proofs of `fedsign.transport.handshake`.  Who stands between them has to show another certificate, whose digest the proofs do not have.
"""

import datetime
import hashlib
import ssl
import tempfile
from functools import cache

from fedsign.transport.connection import Connection
from fedsign.transport.handshake import HANDSHAKE_S

_VALID = datetime.timedelta(days=3650)  # nobody looks: it lasts as long as its process


def secure(connection: Connection, *, is_listening: bool, timeout_s: float = HANDSHAKE_S) -> bool:
    """Encrypt a connection, before the handshake that authenticates it; False if the peer does not speak TLS in time."""
    context, certificate = _listening() if is_listening else (_connecting(), "")
    with connection.deadline(timeout_s):
        try:
            connection.encrypt(context, is_listening=is_listening)
        except (OSError, ValueError):  # ValueError: another thread has closed it
            return False
    connection.certificate = connection.certificate or certificate
    return True


@cache
def _connecting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the handshake's proofs verify it
    return context


@cache
def _listening() -> tuple[ssl.SSLContext, str]:
    """With the digest of its certificate."""
    from cryptography import x509  # not on machines that only connect
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name, now = ec.generate_private_key(ec.SECP256R1()), x509.Name([]), datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now + _VALID)
    made, pem = builder.sign(key, hashes.SHA256()), serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # see [Note: TLS] in fedsign.transport.connection
    with tempfile.NamedTemporaryFile() as file:  # its owner's alone, and gone at once
        file.write(private + made.public_bytes(pem))
        file.flush()
        context.load_cert_chain(file.name)
    return context, hashlib.sha256(made.public_bytes(serialization.Encoding.DER)).hexdigest()
