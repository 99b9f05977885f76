"""A site's key pair, in the form that Flower's SuperNodes and SuperLink read: OpenSSH, on the curve P-384."""

import base64
import hashlib
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from fedsign.errors import ConfigError
from fedsign.storage.disk import is_private, replace_file


def make_key(private: Path, *, comment: str) -> str:
    """Write a new private key, 0600, and return its public half as one line.

    Raises:
        ConfigError: there is a key already, which would be lost.
    """
    if private.exists():
        raise ConfigError(f"{private} is there already and would be lost; move it away, or name another file.")
    key = ec.generate_private_key(ec.SECP384R1())
    private_bytes = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    write_secret(private, private_bytes)
    return f"{public_line(key.public_key())} {comment}"


def load_private(private: Path) -> ec.EllipticCurvePrivateKey:
    """A site's key from the disk.

    Raises:
        ConfigError: the file is missing, can be read by others, or holds no such key.
    """
    try:
        key = load_ssh_private_key(private.read_bytes(), password=None)
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
    """The public half that a site has sent, as one line without its comment.

    Raises:
        ConfigError: it is missing, no public key, or the private one.
    """
    try:
        content = path.read_bytes()
        if b"PRIVATE KEY" in content:
            raise ConfigError(
                f"{path} is a private key, which must stay at its site; ask for the file that ends in .pub."
            )
        key = load_ssh_public_key(content)
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(
            f"{path} is no public key that can be read ({error}); name the .pub file that 'fedsign deploy key' wrote."
        ) from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not key.curve.name.startswith("secp"):
        raise ConfigError(f"{path} is no key of a NIST curve, which Flower asks for; 'fedsign deploy key' makes one.")
    return public_line(key)


def fingerprint(public: str) -> str:
    """What people compare over the telephone, as ssh-keygen -l prints it."""
    digest = hashlib.sha256(base64.b64decode(public.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode("ascii").rstrip("=")


def write_secret(path: Path, content: bytes) -> None:
    """Whole or not at all, and never readable by others."""

    def write(partial: Path) -> None:
        partial.unlink(missing_ok=True)
        partial.touch(mode=0o600)
        partial.write_bytes(content)

    replace_file(path, write)


def public_line(key: ec.EllipticCurvePublicKey) -> str:
    """A public half without its comment."""
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode("ascii")
