"""The SuperLink's Control API: register the sites of federation.toml, and read the state of their nodes.

Flower keeps the key of an unregistered site and never accepts it again, as long as its database is kept.
"""

import fcntl
import socket
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from flwr.cli.cli_client_interceptor import CliClientHttpInterceptor
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, UnregisterNodeRequest
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

from fedsign.errors import EngineError, LinkLostError
from simulations.deployment.federation import Federation, whose
from simulations.deployment.probe import probe_server
from simulations.deployment.running import recorded

_GONE = ("unregistered", "deleted")
_PATIENCE_S = 120.0


def process_of(federation: Federation) -> psutil.Process | None:
    """Return the SuperLink's process, if it was started here and is alive."""
    return recorded(federation.server / "pid")


def answers_at(host: str, port: int) -> bool:
    """Whether something listens at this address."""
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False


def answers(federation: Federation) -> bool:
    """Whether something listens on the server's port."""
    return answers_at(federation.local_host, federation.port)


@contextmanager
def control(address: str, *, authority: Path | None) -> Iterator[ControlHttpClient]:
    """Connect to the Control API as `flwr` does. `authority`: the CA of its certificate, or None without TLS.

    Raises:
        EngineError: the SuperLink refuses a request.
        LinkLostError: it does not answer.
    """
    url, version = f"{'https' if authority else 'http'}://{address}", RuntimeVersionHttpInterceptor("flwr CLI")
    with ControlHttpClient(url, interceptors=[CliClientHttpInterceptor(), version]) as client:
        trust = ssl.create_default_context(cafile=authority) if authority else False
        # in place of Flower's, which would take the environment's proxies: they do not reach this machine
        client._client = httpx.Client(verify=trust, timeout=_PATIENCE_S, trust_env=False)
        try:
            yield client
        except httpx.HTTPStatusError as error:
            raise EngineError(f"the SuperLink refused: {error.response.text[-500:]}") from error
        except httpx.HTTPError as error:
            raise LinkLostError(
                f"the SuperLink gave no answer at {address} ({type(error).__name__}); see whether it still runs, or "
                "start it again."
            ) from error


@contextmanager
def asking(federation: Federation) -> Iterator[ControlHttpClient]:
    """Connect to the Control API from the SuperLink's machine; see `control`.

    Raises:
        ServerError: its certificate has expired meanwhile, or is another CA's.
        ConfigError: it runs as another account.
    """
    try:
        with control(federation.local_address, authority=federation.trusted) as link:
            yield link
    except EngineError as error:
        cause = error.__cause__
        if "CERTIFICATE_VERIFY_FAILED" in f"{error} {cause}":
            probe_server(federation.local_host, federation.port, authority=federation.trusted)
        if isinstance(cause, httpx.HTTPStatusError) and cause.response.status_code == httpx.codes.FORBIDDEN:
            raise whose(federation.folder) from error
        raise


def register_sites(federation: Federation) -> None:
    """Register active sites and unregister revoked ones; leave the others alone.

    Raises:
        EngineError: the SuperLink refuses.
    """
    if federation.insecure:
        return  # every SuperNode is accepted, with or without a key
    lock = federation.server / "state" / "lock"
    lock.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with lock.open("w") as file, asking(federation) as link:
        fcntl.flock(file, fcntl.LOCK_EX)  # one command at a time
        # inside the lock: two commands would both miss a site and register its key twice
        nodes = link.ListNodes(ListNodesRequest()).nodes_info
        # Flower keeps unregistered nodes on its list, with their names
        taken = {node.name: node.node_id for node in nodes if node.status not in _GONE}
        for site in federation.sites:
            if site.is_active and site.name not in taken:
                link.RegisterNode(RegisterNodeRequest(public_key=in_pem(site.public_key), name=site.name))
            elif not site.is_active and site.name in taken:
                link.UnregisterNode(UnregisterNodeRequest(node_id=taken[site.name]))


def in_pem(public: str) -> bytes:
    """Convert a site's public key to Flower's format."""
    return load_ssh_public_key(public.encode()).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def nodes_of(federation: Federation) -> Sequence[NodeInfo]:
    """Return the SuperNodes; `status` is registered (never seen), online, offline or unregistered.

    A crashed SuperNode still counts as online for a minute or two, even by a SuperLink that was down meanwhile.
    """
    with asking(federation) as link:
        nodes: Sequence[NodeInfo] = link.ListNodes(ListNodesRequest()).nodes_info
    return nodes
