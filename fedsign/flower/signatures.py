"""A site's signature over a whole request; Flower's SuperNode signs the time alone.

Who overhears, logs, or is handed such a request can use its headers for nothing else: they bind method, path, body and
time, and a nonce that the server takes once.  The nonce begins with a mark of the process that signs, by which the
server notices that two use a key.
"""

import hashlib
import secrets
import sys
from base64 import b64encode
from typing import Any

import httpx
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.supercore.interceptors.http.utils import add_headers
from flwr.supercore.primitives.asymmetric import sign_message
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

DIGEST_HEADER, NONCE_HEADER, SIGNATURE_HEADER = "fedsign-digest", "fedsign-nonce", "fedsign-signature"
REFUSAL_HEADER = "fedsign-refusal"  # of an answer: why
UNKNOWN = "This key is not that of an active site."
AHEAD_S, BEHIND_S = 5.0, 305.0  # Flower 1.41 refuses a site whose clock is off by more


class SignedRequests(NodeAuthHttpInterceptor):
    """Flower's interceptor, which signs the request as well, and prints why the server refuses one."""

    def __init__(self, *keys: Any) -> None:
        super().__init__(*keys)
        self._mark, self._refusal = secrets.token_hex(8), ""

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        """Sign a request and send it."""
        return super().intercept(context, lambda context: self._sent(context, call_next))

    def _sent(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        request = context.request
        digest, nonce = hashlib.sha256(request.content).hexdigest(), f"{self._mark}-{secrets.token_hex(8)}"
        text = signed_text(request.method, request.url.path, request.headers[TIMESTAMP_HEADER], digest, nonce)
        signature = b64encode(sign_message(self._private_key, text)).decode("ascii")
        add_headers(request, {DIGEST_HEADER: digest, NONCE_HEADER: nonce, SIGNATURE_HEADER: signature})
        response = call_next(context)
        refusal = response.headers.get(REFUSAL_HEADER, "")
        # once: a SuperNode repeats its requests
        if refusal and refusal != self._refusal:
            print(f"fedsign: the server refused a request: {refusal}", file=sys.stderr, flush=True)
        self._refusal = refusal
        return response


def signed_text(method: str, path: str, time: str, digest: str, nonce: str) -> bytes:
    """The text that a site signs."""
    return "\n".join((method, path, time, digest, nonce)).encode()


def skewed(ahead_s: float) -> str:
    """A sentence about a clock that is too far from the server's; "" if it is not."""
    if -BEHIND_S < ahead_s < AHEAD_S:
        return ""
    where = f"{abs(ahead_s):,.0f} s {'ahead of' if ahead_s > 0 else 'behind'}"
    return (
        f"The site's clock is {where} the server's, which refuses more than {AHEAD_S:.0f} s ahead or "
        f"{BEHIND_S:.0f} s behind; set it by NTP."
    )
