"""Whether the SuperLink takes a site's key: the one question that only Flower's own protocol answers.

The site says that it is there, as its SuperNode does when it starts, and at once that it leaves.  The SuperLink would
not take a site that it believes to be there, such as one whose SuperNode was killed less than a minute ago; so the
site says first that the former one is gone.
"""

from contextlib import suppress

import httpx
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedsign.errors import EngineError
from simulations.deployment.federation import with_port
from simulations.deployment.keys import load_private
from simulations.deployment.kits import AUTHORITY_FILE, Kit


def check_is_known(kit: Kit, *, host: str) -> bool:
    """Whether the SuperLink says that it takes the site's key; False if it could not say.

    Raises:
        ConfigError: the key cannot be used.
        EngineError: the SuperLink refuses it.
    """
    key, former = load_private(kit.key), kit.folder / "flower" / "node-id"
    former.parent.mkdir(exist_ok=True)
    interceptors = [NodeAuthHttpInterceptor(key, key.public_key())]
    authority = (kit.folder / AUTHORITY_FILE).read_bytes()
    address = with_port(host, kit.facts["port"])
    try:
        with FleetHttpClient.from_server_address(address, False, authority, interceptors) as client:
            with suppress(httpx.HTTPStatusError, OSError, ValueError):  # there was none, or it left in good order
                client.DeactivateNode(DeactivateNodeRequest(node_id=int(former.read_text(encoding="ascii"))))
            public = public_key_to_bytes(key.public_key())
            here = ActivateNodeRequest(public_key=public, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
            node_id = client.ActivateNode(here).node_id
            former.write_text(str(node_id), encoding="ascii")
            client.DeactivateNode(DeactivateNodeRequest(node_id=node_id))
    except httpx.HTTPError as error:
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code not in (502, 503, 504):
            raise EngineError(
                "the SuperLink does not take this site's key: it is revoked, was never registered, or is in use on another machine; "
                "ask the server's people for a new kit."
            ) from error
        return False
    return True
