"""Who may talk to the server: the holder of the token, from a page of this server, under a name of this machine.

- The token comes once in the URL that the command prints, as with Jupyter, and then in a cookie.
- A page of another site cannot use the cookie (SameSite) and is refused by its Origin; a name that another site has
  pointed to this machine is refused by its Host.
- Nothing changes by GET.  A POST needs the token once more, in a header that only the page can set.
"""

import ipaddress
import secrets
import socket
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

TOKEN_HEADER = "x-fedsign-token"
_MAX_BODY = 64 * 1024
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def is_loopback(host: str) -> bool:
    """Whether a name or address can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Guard:
    """The middleware in front of all routes."""

    def __init__(self, app: ASGIApp, *, host: str, port: int, token: str) -> None:
        self._app, self._host, self._token = app, host.lower(), token
        self._cookie = f"fedsign-ui-{port}"  # cookies do not tell ports apart

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, or pass on with the headers of `_HEADERS` added."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        request = Request(scope)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = dict(Headers(raw=message["headers"]))
                added = [(name, value) for name, value in _HEADERS.items() if name not in headers]
                message["headers"] = [*message["headers"], *((n.encode(), v.encode()) for n, v in added)]
            await send(message)

        answer = self._answer(request)
        await (answer or self._app)(scope, receive, guarded)

    def _answer(self, request: Request) -> Response | None:
        """A refusal, or the redirect that turns the token of the URL into a cookie; None: the request may pass."""
        if not self._is_own_host(_name(request.headers.get("host", ""))):
            return _refused("this server is not known under that name; use the URL that 'fedsign ui' printed.", 400)
        origin = request.headers.get("origin")
        if origin is not None and origin != f"{request.url.scheme}://{request.headers.get('host', '')}":
            return _refused("requests from pages of other sites are refused.")
        if request.method == "GET" and "token" in request.query_params:
            if not self._is_token(request.query_params["token"]):
                return _refused("the token is that of another 'fedsign ui'; use the URL that it printed.")
            redirect = RedirectResponse(request.url.path, status_code=303)
            redirect.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
            return redirect
        if not self._is_token(request.cookies.get(self._cookie, "")):
            return _refused("open the URL that 'fedsign ui' printed: it has the token.")
        if request.method not in ("GET", "HEAD"):
            if origin is None or not self._is_token(request.headers.get(TOKEN_HEADER, "")):
                return _refused("changes are made by the page alone.")
            if int(request.headers.get("content-length", _MAX_BODY + 1)) > _MAX_BODY:
                return _refused("the request is too large.", 413)
        return None

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode("utf-8", "replace"), self._token.encode())

    def _is_own_host(self, name: str) -> bool:
        """Only a name can be pointed to this machine by others: with a server for all, any address will do."""
        if is_loopback(self._host):
            return is_loopback(name)
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in {"localhost", self._host, socket.gethostname().lower(), socket.getfqdn().lower()}
        return True


def _name(host: str) -> str:
    """The name in a Host header, without the port; empty if it is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _refused(why: str, status: int = 403) -> Response:
    return PlainTextResponse(f"Refused: {why}\n", status_code=status)
