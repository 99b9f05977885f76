"""Which site a request comes from, by its headers alone: its key, its time, its signature, its nonce."""

import datetime as dt
import time
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.primitives.asymmetric import verify_signature
from starlette.datastructures import Headers
from starlette.types import Scope

from fedsign.errors import FedSignError
from fedsign.flower import signatures
from simulations.deployment.federation import FILE, Federation, open_federation
from simulations.deployment.membership import in_pem
from simulations.deployment.refusals import STRANGERS, Refusals

_UNSIGNED = (
    "Only the time of the request is signed, as by flower-supernode or an older FedSign: update the site and start it "
    "with 'fedsign deploy start' or 'python -m clients.site', or allow it with 'deploy init --plain-supernodes'."
)
_FORGED = "The signature is not that of the site's key."
_TWICE = "This request was already received."
_STARTING = "The request was signed before this server started; try again."
_MAX_INSTANCES, _MAX_NONCE = 16, 64


class RefusedError(Exception):
    """A request is refused: with an HTTP status, and the reason."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class ForgedError(RefusedError):
    """A request has a site's key, but not its signature."""


@dataclass(slots=True)
class _Caller:
    """A site's key, and who signs with it: marks of programs, with the addresses that they were last seen at."""

    name: str
    key: ec.EllipticCurvePublicKey
    nonces: dict[str, float] = field(default_factory=dict)
    seen: dict[str, str] = field(default_factory=dict)
    current: str = ""


class Admission:
    """Admits requests of active sites. The file of the federation is followed; `refusals` counts what is refused."""

    def __init__(self, folder: Path, refusals: Refusals, clock: Callable[[], float] = time.time) -> None:
        self._path, self._refusals, self._clock = folder / FILE, refusals, clock
        self._began_at = clock()
        self._stamp: tuple[int, ...] = ()
        self._callers: dict[str, _Caller] = {}
        self.federation: Federation = open_federation(folder)

    def digest_of(self, scope: Scope) -> tuple[str, str | None]:
        """The site of a request, and the digest that its body must have; None for any.

        Raises:
            RefusedError: it is not a site's, or not as the site sent it.
        """
        self._follow()
        if self.federation.insecure:
            return "", None
        headers, address = Headers(scope=scope), address_of(scope)
        caller = self._callers.get(headers.get(FLEET_HTTP_PUBLIC_KEY_HEADER, ""))
        if caller is None:
            self._refusals.count(STRANGERS, f"requests without the key of an active site, from {address}")
            raise RefusedError(401, signatures.UNKNOWN)
        try:
            return caller.name, self._signed_digest(caller, headers, scope, address)
        except ForgedError as refusal:
            self._refusals.count(STRANGERS, f"requests with the key of {caller.name}, from {address}: {refusal}")
            raise
        except RefusedError as refusal:
            self.count(caller.name, address, refusal)
            raise

    def count(self, site: str, address: str, refusal: RefusedError) -> None:
        """Count a refused request of a site."""
        if refusal.status != 503:
            self._refusals.count(site or STRANGERS, f"requests from {address}: {refusal}")

    def _signed_digest(self, caller: _Caller, headers: Headers, scope: Scope, address: str) -> str | None:
        digest, nonce = headers.get(signatures.DIGEST_HEADER), headers.get(signatures.NONCE_HEADER, "")
        sent_at = headers.get(TIMESTAMP_HEADER, "")
        if is_plain := self.federation.plain_supernodes and digest is None:
            text, signature = sent_at.encode(), headers.get(FLEET_HTTP_SIGNATURE_HEADER, "")
        else:
            signature = headers.get(signatures.SIGNATURE_HEADER, "")
            if digest is None or not 0 < len(nonce) <= _MAX_NONCE:
                raise ForgedError(401, _UNSIGNED)
            text = signatures.signed_text(scope["method"], scope["path"], sent_at, digest, nonce)
        if not _is_signed(caller.key, text, signature):
            raise ForgedError(401, _FORGED)
        signed_at = self._time_of(sent_at)
        if signed_at < self._began_at:  # whose nonces are forgotten
            raise RefusedError(503, _STARTING)
        if not is_plain:
            self._take(caller, nonce)
        self._notice(caller, address if is_plain else nonce.partition("-")[0], address)
        return digest

    def _time_of(self, sent_at: str) -> float:
        try:
            signed_at = dt.datetime.fromisoformat(sent_at).timestamp()
        except ValueError as error:
            raise RefusedError(401, _UNSIGNED) from error
        if why := signatures.skewed(signed_at - self._clock()):
            raise RefusedError(401, why)
        return signed_at

    def _take(self, caller: _Caller, nonce: str) -> None:
        """Take a nonce once, for as long as its time would be accepted."""
        now = self._clock()
        while caller.nonces and next(iter(caller.nonces.values())) < now - signatures.AHEAD_S - signatures.BEHIND_S:
            del caller.nonces[next(iter(caller.nonces))]
        if nonce in caller.nonces:
            raise RefusedError(401, _TWICE)
        caller.nonces[nonce] = now

    def _notice(self, caller: _Caller, mark: str, address: str) -> None:
        """Tell that two programs use a key: the former one speaks again after the latter, as after no restart."""
        if mark != caller.current and mark in caller.seen:
            other = caller.seen[caller.current]
            self._refusals.count(caller.name, f"times its key was used by two programs, at {other} and {address}")
        caller.seen.pop(mark, None)
        caller.seen[mark], caller.current = address, mark
        if len(caller.seen) > _MAX_INSTANCES:
            del caller.seen[next(iter(caller.seen))]

    def _follow(self) -> None:
        """Read the federation again if its file has changed: sites are added and revoked while the SuperLink runs."""
        try:
            found = self._path.stat()
            if (stamp := (found.st_mtime_ns, found.st_ino, found.st_size)) == self._stamp:
                return
            self._stamp = stamp
            self.federation = open_federation(self._path.parent)
        except (OSError, FedSignError) as error:  # no reason to turn all sites away
            self._refusals.say(f"{error} Until then, the sites are those of before.")
            return
        keys = {} if self.federation.insecure else {_header(site.public_key): site for site in self.federation.active}
        self._callers = {
            header: self._callers.get(header) or _Caller(site.name, _loaded(site.public_key))
            for header, site in keys.items()
        }


def address_of(scope: Scope) -> str:
    """The address that a request comes from."""
    return str((scope.get("client") or ("?",))[0])


def _header(public: str) -> str:
    return b64encode(in_pem(public)).decode("ascii")


def _loaded(public: str) -> ec.EllipticCurvePublicKey:
    return cast(ec.EllipticCurvePublicKey, load_ssh_public_key(public.encode()))  # `keys.read_public` lets in no other


def _is_signed(key: ec.EllipticCurvePublicKey, text: bytes, signature: str) -> bool:
    try:
        return verify_signature(key, text, b64decode(signature, validate=True))
    except ValueError:
        return False
