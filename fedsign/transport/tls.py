"""TLS 1.3 between the machines of a silo without a CA: a shared key authenticates the certificate.

The listening end creates a certificate per process.  The connecting end accepts any certificate, and both bind its
SHA-256 digest into the proofs of `fedsign.transport.handshake`.  A man in the middle must present another certificate,
so the proofs do not match.
"""

import datetime
import hashlib
import ssl
import tempfile
from functools import cache

from fedsign.transport.connection import Connection
from fedsign.transport.handshake import HANDSHAKE_S

_VALID = datetime.timedelta(days=3650)  # never checked; a certificate lives as long as its process


def secure(connection: Connection, *, is_listening: bool, timeout_s: float = HANDSHAKE_S) -> bool:
    """Encrypt a connection before the handshake authenticates it; False if the peer does not speak TLS in time."""
    context, certificate = _listening() if is_listening else (_connecting(), "")
    with connection.deadline(timeout_s):
        try:
            connection.encrypt(context, is_listening=is_listening)
        except (OSError, ValueError):  # ValueError: closed by another thread
            return False
    connection.certificate = connection.certificate or certificate
    return True


@cache
def _connecting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the handshake verifies the certificate
    return context


@cache
def _listening() -> tuple[ssl.SSLContext, str]:
    """The listening context, and the digest of its certificate."""
    from cryptography import x509  # not needed on machines that only connect
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name, now = ec.generate_private_key(ec.SECP256R1()), x509.Name([]), datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now + _VALID)
    signed, pem = builder.sign(key, hashes.SHA256()), serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # see [Note: TLS] in fedsign.transport.connection
    with tempfile.NamedTemporaryFile() as file:  # readable by the owner only, deleted right after
        file.write(private + signed.public_bytes(pem))
        file.flush()
        context.load_cert_chain(file.name)
    return context, hashlib.sha256(signed.public_bytes(serialization.Encoding.DER)).hexdigest()
