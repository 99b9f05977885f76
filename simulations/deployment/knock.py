"""Whether the SuperLink takes a site's key: the one question that only Flower's own protocol answers.

The site says that it is there, as its SuperNode does when it starts.  The SuperLink forgets it after a minute if
no SuperNode follows.
"""

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedsign.errors import ConfigError
from simulations.deployment.kits import Kit


def is_known(kit: Kit) -> bool | None:
    """True or False as the SuperLink says; None if it could not say.

    Raises:
        ConfigError: the key cannot be read.
    """
    key = load_ssh_private_key(kit.key.read_bytes(), password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{kit.key} is no elliptic-curve key; make one with 'fedsign deploy key'.")
    client = FleetHttpClient.from_server_address(
        kit.address,
        False,
        kit.authority.read_bytes(),
        interceptors=[NodeAuthHttpInterceptor(key, key.public_key())],
    )
    request = ActivateNodeRequest(
        public_key=public_key_to_bytes(key.public_key()), heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL
    )
    try:
        with client:
            client.ActivateNode(request)
    except httpx.HTTPStatusError as error:
        return None if error.response.status_code in (502, 503, 504) else False
    except httpx.HTTPError:
        return None
    return True
