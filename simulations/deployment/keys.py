"""Keys and certificates: a CA with a certificate for its server, and a key pair for each site.

Sites have no certificates. They trust the CA, and thereby the server; the server knows them by their public keys. The
CA's key is needed only to issue the server's certificate. A site's key has the format of Flower's SuperNodes and
SuperLink: OpenSSH, on the curve P-384.
"""

import base64
import datetime as dt
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedsign.errors import ConfigError
from fedsign.storage.disk import is_private, replace_file
from simulations.deployment.federation import address_of

ALWAYS = ("localhost", "127.0.0.1", "::1")  # local processes connect by these
State = Literal["ok", "warn", "broken"]
_Key = ec.EllipticCurvePrivateKey
RENEW = "make a new one on the server's machine with 'fedsign deploy renew', and start the SuperLink again"
ANEW = "no certificate can outlive it: make the federation anew with 'fedsign deploy init', and send new kits"
_WARN_DAYS = 30
_AUTHORITY_DAYS = 3650
# a site whose clock is behind would find a fresh certificate not valid yet
_CLOCKS_MAY_DIFFER = dt.timedelta(minutes=5)


@dataclass(frozen=True, kw_only=True, slots=True)
class Certified:
    """A certificate and its private key, as PEM."""

    certificate: bytes
    key: bytes

    def write(self, certificate: Path, key: Path) -> None:
        """Write both files; only the owner can read the key."""
        certificate.write_bytes(self.certificate)
        write_secret(key, self.key)


def make_authority(name: str) -> Certified:
    """Create a CA, valid for ten years, that may sign server certificates but no other CA."""
    key, subject = ec.generate_private_key(ec.SECP384R1()), _name(f"FedSign federation {name}")
    builder = _builder(key, subject, issuer=subject, until=_now() + dt.timedelta(days=_AUTHORITY_DAYS))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return _signed(builder.add_extension(_usage(signs_certificates=True), critical=True), key, by=key)


def issue(authority: Certified, hosts: Sequence[str], *, lifetime: dt.timedelta) -> Certified:
    """Issue a server certificate for names and addresses, including this machine's loopback."""
    signer = serialization.load_pem_private_key(authority.key, password=None)
    if not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise ConfigError("the key of the CA is no elliptic-curve key; restore the ca folder that 'deploy init' made.")
    ca, key = x509.load_pem_x509_certificate(authority.certificate), ec.generate_private_key(ec.SECP256R1())
    # a certificate that outlives its CA would fail at the sites while `validity` still calls it fine
    until = min(_now() + lifetime, ca.not_valid_after_utc)
    builder = _builder(key, _name(hosts[0]), issuer=ca.subject, until=until)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    # clients ignore the common name: each host must be an alternative name, addresses as addresses
    names = [general_name(host) for host in dict.fromkeys((*hosts, *ALWAYS))]
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    # Python 3.13 verifies strictly by default (VERIFY_X509_STRICT), and refuses a certificate without it
    public = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    return _signed(builder.add_extension(public, critical=False), key, by=signer)


def with_passphrase(key: bytes, *, old: bytes = b"", new: bytes = b"") -> bytes:
    """Encrypt or decrypt the CA's key, in PEM.

    Raises:
        ConfigError: the old passphrase is wrong.
    """
    form = serialization.BestAvailableEncryption(new) if new else NoEncryption()
    try:
        signer = serialization.load_pem_private_key(key, old or None)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "the CA's key cannot be decrypted: the passphrase is missing or wrong; run this on a terminal, or give "
            "--ca-passphrase-file."
        ) from error
    return signer.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, form)


def general_name(host: str) -> x509.GeneralName:
    """Convert a host to an address or a DNS name of a certificate."""
    address = address_of(host)
    return x509.DNSName(host) if address is None else x509.IPAddress(address)


def ends_at(certificate: Path) -> dt.datetime:
    """Return when a certificate on disk expires.

    Raises:
        ConfigError: it is missing, or cannot be read.
    """
    try:
        return x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{certificate} is no certificate that can be read ({error}); unpack the kit again, or make the "
            "federation's anew with 'fedsign deploy renew'."
        ) from error


def validity(end: dt.datetime, remedy: str = RENEW) -> tuple[State, str]:
    """Return the state of a certificate that expires at `end`, and the end of a sentence about it."""
    left = (end - _now()) / dt.timedelta(days=1)
    if left <= 0:
        return "broken", f"ended on {end:%Y-%m-%d %H:%M} UTC; {remedy}"
    if left <= _WARN_DAYS:
        return "warn", f"ends in {left:.0f} days, on {end:%Y-%m-%d}; {remedy}"
    return "ok", f"until {end:%Y-%m-%d}, {left:.0f} days"


def _name(common: str) -> x509.Name:
    # 64: the upper bound of a common name in X.509
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        # the CA's key signs certificates only, the server's only handshakes (ECDHE, so no encipherment)
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _builder(key: _Key, subject: x509.Name, *, issuer: x509.Name, until: dt.datetime) -> x509.CertificateBuilder:
    return x509.CertificateBuilder(
        issuer_name=issuer,
        subject_name=subject,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        # min: tests issue certificates that have expired already
        not_valid_before=min(_now(), until) - _CLOCKS_MAY_DIFFER,
        not_valid_after=until,
    ).add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)


def _signed(builder: x509.CertificateBuilder, key: _Key, *, by: _Key) -> Certified:
    return Certified(
        certificate=builder.sign(by, hashes.SHA256()).public_bytes(Encoding.PEM),
        key=key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


def make_key(private: Path, *, comment: str) -> str:
    """Write a new private key with mode 0600; return the public key as one line.

    Raises:
        ConfigError: there is a key already, which must not be overwritten.
    """
    if private.exists():
        raise ConfigError(f"{private} is there already and would be lost; move it away, or name another file.")
    key = ec.generate_private_key(ec.SECP384R1())
    write_secret(private, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    return f"{public_line(key.public_key())} {comment}"


def load_private(private: Path) -> ec.EllipticCurvePrivateKey:
    """Load a site's private key.

    Raises:
        ConfigError: the file is missing, is readable for others, or holds no such key.
    """
    try:
        key = serialization.load_ssh_private_key(private.read_bytes(), password=None)
        # after reading: a missing file is reported as missing
        if not is_private(private):
            raise ConfigError(f"{private} can be read by others; make it private with 'chmod 600 {private}'.")
        if isinstance(key, ec.EllipticCurvePrivateKey):
            return key
        problem = "it is no elliptic-curve key"
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        problem = str(error)
    raise ConfigError(
        f"{private} is no private key that can be used ({problem}); put the site's there, or make one with "
        "'fedsign deploy key' and send its public half."
    )


def read_public(path: Path) -> str:
    """Read a site's public key file, as one line without its comment.

    Raises:
        ConfigError: the file is missing, or holds no public key but, for example, the private one.
    """
    try:
        content = path.read_bytes()
        # before parsing, whose error would not say that a secret has leaked to the server
        if b"PRIVATE KEY" in content:
            raise ConfigError(
                f"{path} is a private key, which must stay at its site; ask for the file that ends in .pub."
            )
        key = serialization.load_ssh_public_key(content)
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(
            f"{path} is no public key that can be read ({error}); name the .pub file that 'fedsign deploy key' wrote."
        ) from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not key.curve.name.startswith("secp"):
        raise ConfigError(f"{path} is no key of a NIST curve, which Flower asks for; 'fedsign deploy key' makes one.")
    return public_line(key)


def fingerprint(public: str) -> str:
    """Return the fingerprint that people compare, as ssh-keygen -l prints it."""
    digest = hashlib.sha256(base64.b64decode(public.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode("ascii").rstrip("=")


def write_secret(path: Path, content: bytes) -> None:
    """Write a file atomically, never readable by others."""

    def write(partial: Path) -> None:
        # the leftover of a killed process may have another mode, which touch would keep
        partial.unlink(missing_ok=True)
        # before the content: at no moment may others open the file
        partial.touch(mode=0o600)
        partial.write_bytes(content)

    replace_file(path, write)


def public_line(key: ec.EllipticCurvePublicKey) -> str:
    """Return a public key without its comment."""
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode("ascii")
