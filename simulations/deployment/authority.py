"""A federation's own certificate authority: one CA, one certificate for its server.

Sites have no certificates: they know the CA and thereby the server, and the server knows them by the public
halves of their keys (`keys`).  So the CA's key is needed to make the server's certificate, and for nothing else.
"""

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedsign.errors import ConfigError
from simulations.deployment.federation import address_of
from simulations.deployment.keys import write_secret

ALWAYS = ("localhost", "127.0.0.1", "::1")  # the server's own processes come this way
State = Literal["ok", "warn", "broken"]
_Key = ec.EllipticCurvePrivateKey
_WARN_DAYS = 30
_AUTHORITY_DAYS = 3650
_CLOCKS_MAY_DIFFER = dt.timedelta(minutes=5)


@dataclass(frozen=True, kw_only=True, slots=True)
class Certified:
    """A certificate and its key, as PEM."""

    certificate: bytes
    key: bytes

    def write(self, certificate: Path, key: Path) -> None:
        """The key for its owner alone."""
        certificate.write_bytes(self.certificate)
        write_secret(key, self.key)


def make_authority(name: str) -> Certified:
    """A CA of ten years, which may sign servers' certificates and no other CA's."""
    key, subject = ec.generate_private_key(ec.SECP384R1()), _name(f"FedSign federation {name}")
    builder = _builder(key, subject, issuer=subject, until=_now() + dt.timedelta(days=_AUTHORITY_DAYS))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return _signed(builder.add_extension(_usage(signs_certificates=True), critical=True), key, by=key)


def issue(authority: Certified, hosts: Sequence[str], *, lifetime: dt.timedelta) -> Certified:
    """A server's certificate for names and addresses, and for this machine's loopback."""
    signer = load_pem_private_key(authority.key, password=None)
    if not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise ConfigError("the key of the CA is no elliptic-curve key; restore the ca folder that 'deploy init' made.")
    ca, key = x509.load_pem_x509_certificate(authority.certificate), ec.generate_private_key(ec.SECP256R1())
    until = min(_now() + lifetime, ca.not_valid_after_utc)
    builder = _builder(key, _name(hosts[0]), issuer=ca.subject, until=until)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    names = [general_name(host) for host in dict.fromkeys((*hosts, *ALWAYS))]
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    public = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    return _signed(builder.add_extension(public, critical=False), key, by=signer)


def general_name(host: str) -> x509.GeneralName:
    """An address, or else a name."""
    address = address_of(host)
    return x509.DNSName(host) if address is None else x509.IPAddress(address)


def ends_at(certificate: Path) -> dt.datetime:
    """When a certificate on disk ends.

    Raises:
        ConfigError: it is not there, or cannot be read.
    """
    try:
        return x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{certificate} is no certificate that can be read ({error}); unpack the kit again, or make the "
            "federation's anew with 'fedsign deploy renew'."
        ) from error


def validity(end: dt.datetime) -> tuple[State, str]:
    """How a certificate is that ends then, and the end of a sentence about it."""
    left = (end - _now()) / dt.timedelta(days=1)
    if left <= 0:
        return "broken", (
            f"ended on {end:%Y-%m-%d %H:%M} UTC; make a new one on the server's machine with 'fedsign deploy renew', and start the "
            "SuperLink again"
        )
    if left <= _WARN_DAYS:
        return "warn", f"ends in {left:.0f} days, on {end:%Y-%m-%d}; make a new one with 'fedsign deploy renew'"
    return "ok", f"until {end:%Y-%m-%d}, {left:.0f} days"


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
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
