"""What the gate reads of a request before it trusts it, and what it takes for a site's."""

import asyncio
import datetime as dt
import hashlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest, PullMessagesRequest
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from starlette.types import Receive, Scope, Send

from fedsign.errors import EngineError
from fedsign.flower import door
from fedsign.flower.signatures import REFUSAL_HEADER, SignedRequests
from fedsign.storage.results import RunFolder
from simulations.deployment import gate, keys, probe, provision
from simulations.deployment.admission import RefusedError
from simulations.deployment.federation import Federation, open_federation
from simulations.deployment.gate import MAX_BODY, Gate, Uploads
from simulations.deployment.probe import ServerError, check_is_known, probe_server
from simulations.deployment.progress import Progress
from simulations.deployment.refusals import STRANGERS, refused
from simulations.deployment.status import status_of
from tests.deployment.served import HOST, Served, serving

PULL = "/v1/fleet/pull-messages"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("made") / "federation") as made:
        yield made


class Site:
    """A site that keeps the requests that it sent."""

    def __init__(
        self, served: Served, name: str = "a", *, signs: type[NodeAuthHttpInterceptor] = SignedRequests
    ) -> None:
        self.served, self.sent = served, list[httpx.Request]()
        kit = served.federation.kit(name)
        key = keys.load_private(kit / "key")
        self.public = public_key_to_bytes(key.public_key())
        self.trust = (kit / "ca.pem").read_bytes()
        self.client = FleetHttpClient.from_server_address(
            f"{HOST}:{served.federation.port}", False, self.trust, [signs(key, key.public_key()), self]
        )

    def intercept(self, context: Any, call_next: Callable[[Any], httpx.Response]) -> httpx.Response:
        self.sent.append(context.request)
        return call_next(context)

    def join(self) -> int:
        request = ActivateNodeRequest(public_key=self.public, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
        return self.client.ActivateNode(request).node_id

    def leave(self, node_id: int) -> None:
        self.client.DeactivateNode(DeactivateNodeRequest(node_id=node_id))

    def pull(self, node_id: int) -> None:
        request = PullMessagesRequest()
        request.node.node_id = node_id
        self.client.PullMessages(request)


@pytest.fixture
def sites() -> Iterator[Callable[..., Site]]:
    """Sites whose connections are closed at the end."""
    with ExitStack() as opened:

        def site(served: Served, name: str = "a", **signs: type[NodeAuthHttpInterceptor]) -> Site:
            made = Site(served, name, **signs)
            opened.enter_context(made.client)
            return made

        yield site


def again(served: Served, request: httpx.Request, *, path: str = "", body: bytes | None = None) -> tuple[int, str]:
    """The answer to a request's headers with another path or body."""
    content = request.content if body is None else body
    headers = {
        key: value for key, value in request.headers.items() if key.startswith(("flwr-", "fedsign-", "content-t"))
    }
    trust = ssl.create_default_context(cafile=str(served.federation.authority))
    with httpx.Client(verify=trust, trust_env=False) as client:
        base = f"https://{HOST}:{served.federation.port}"
        answer = client.post(base + (path or request.url.path), content=content, headers=headers)
    return answer.status_code, answer.headers.get(REFUSAL_HEADER, "")


def counts(served: Served) -> dict[tuple[str, str], int]:
    time.sleep(0.6)  # many of a kind are written together
    return dict(refused(served.federation))


def test_a_signed_request_is_taken_once_as_it_is(sites: Callable[..., Site], served: Served) -> None:
    site = sites(served)
    node_id = site.join()
    site.pull(node_id)
    request = site.sent[-1]
    assert again(served, request) == (401, "This request was already received.")
    assert again(served, request, path="/v1/fleet/get-run") == (401, "The signature is not that of the site's key.")
    other = PullMessagesRequest()
    other.node.node_id = 5
    changed = site.client._client.build_request("POST", request.url, content=b"", headers=request.headers)
    changed.headers["fedsign-digest"] = hashlib.sha256(other.SerializeToString()).hexdigest()
    assert again(served, changed, body=other.SerializeToString())[0] == 401
    site.pull(node_id)
    site.leave(node_id)
    counted = counts(served)
    assert counted["a", "requests from 127.0.0.1: This request was already received."] == 1
    forged = "requests with the key of a, from 127.0.0.1: The signature is not that of the site's key."
    assert counted[STRANGERS, forged] == 2  # who knows a site's public key alone does not fill the site's records
    odd = site.client._client.build_request("POST", request.url, content=request.content, headers=request.headers)
    odd.headers["fedsign-nonce"] = "n" * 65
    assert again(served, odd)[0] == 401
    assert again(served, request, path="/v1/fleet/%C3%A9")[0] == 401


def test_a_body_is_the_one_that_was_signed(
    sites: Callable[..., Site], served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever relays a request cannot change its body, though the headers stay."""
    site, kept = sites(served), list[httpx.Request]()
    node_id = site.join()

    def keep(context: Any, call_next: Callable[[Any], httpx.Response]) -> httpx.Response:
        kept.append(context.request)
        return httpx.Response(200, request=context.request)

    monkeypatch.setattr(site, "intercept", keep)
    site.pull(node_id)
    assert again(served, kept[0], body=b"\x0a\x02\x08\x05") == (401, "The body is not the one that was signed.")
    monkeypatch.undo()
    site.leave(node_id)


def test_a_site_that_signs_the_time_alone_is_let_in_only_where_that_was_asked_for(
    sites: Callable[..., Site], served: Served, tmp_path: Path
) -> None:
    with pytest.raises(httpx.HTTPStatusError) as caught:
        sites(served, signs=NodeAuthHttpInterceptor).join()
    assert caught.value.response.status_code == 404
    assert "or allow it with 'deploy init --plain-supernodes'" in caught.value.response.json()["detail"]
    with serving(tmp_path / "federation", plain_supernodes=True) as lenient:
        plain, own = sites(lenient, signs=NodeAuthHttpInterceptor), sites(lenient, "b")
        node_id = plain.join()
        plain.pull(node_id)
        headers = plain.sent[-1].headers
        assert again(lenient, plain.sent[-1])[0] == 200  # as Flower does
        headers["flwr-signature"] = "AAAA"
        assert again(lenient, plain.sent[-1]) == (401, "The signature is not that of the site's key.")
        own.leave(own.join())
        assert again(lenient, own.sent[-1])[0] == 401
        assert open_federation(lenient.federation.folder).plain_supernodes
        for site in (plain, own):
            site.client.close()


@pytest.mark.parametrize(
    ("server_s", "sentence"), [(-3600, "3,600 s ahead of"), (600, "600 s behind"), (-7.2, "7 s ahead of")]
)
def test_a_clock_that_is_off_is_named_with_its_seconds(
    served: Served, monkeypatch: pytest.MonkeyPatch, server_s: float, sentence: str
) -> None:
    monkeypatch.setattr(served.admission, "_clock", lambda: time.time() + server_s)
    with pytest.raises(EngineError) as caught:
        check_is_known(served.kit, host=HOST)
    assert f"The site's clock is {sentence} the server's" in str(caught.value) and "NTP" in str(caught.value)
    assert any(who == "a" and sentence in why for who, why in counts(served))


@pytest.mark.parametrize(("ahead", "expected"), [(0.0, "was made by a machine"), (-600.0, "600 s behind")])
def test_a_certificate_that_is_not_valid_yet_is_no_other_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: float, expected: str
) -> None:
    """To a site whose clock is behind, all certificates of today are of the future."""
    now = dt.datetime.now(dt.UTC) + dt.timedelta(hours=1)
    monkeypatch.setattr(keys, "_now", lambda: now)
    monkeypatch.setattr(probe, "_ahead_s", lambda connection: connection.getresponse() and ahead)
    with serving(tmp_path / "federation") as made, pytest.raises(ServerError) as caught:
        probe_server(HOST, made.federation.port, authority=made.kit.trusted)
    assert expected in str(caught.value) and "another server" not in str(caught.value)


def test_requests_that_were_signed_before_the_server_started_wait(
    sites: Callable[..., Site], served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which nonces it had taken by then is forgotten."""
    monkeypatch.setattr(served.admission, "_began_at", time.time() + 60)
    with pytest.raises(httpx.HTTPStatusError) as caught:
        sites(served).join()
    assert caught.value.response.status_code == 503


def test_two_programs_with_one_key_are_noticed_and_a_restart_is_not(sites: Callable[..., Site], served: Served) -> None:
    first = sites(served)
    node_id = first.join()
    again_started = sites(served)
    with pytest.raises(httpx.HTTPStatusError):
        again_started.join()  # Flower believes that the first is there
    assert not any("two programs" in why for _, why in counts(served))
    first.pull(node_id)
    told = "times its key was used by two programs, at 127.0.0.1 and 127.0.0.1"
    assert counts(served)["a", told] == 1
    first.leave(node_id)


def test_a_strangers_body_is_not_read(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "account_of", lambda client, server: None)
    trust = ssl.create_default_context(cafile=str(served.federation.authority))
    for path, status in ((PULL, b"401"), ("/health", b"413"), ("/v1/fleet/register-node", b"403")):
        raw = socket.create_connection((HOST, served.federation.port), 10)
        with trust.wrap_socket(raw, server_hostname=HOST) as connection:
            connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {2**40}\r\n\r\n".encode())
            answer = connection.recv(2**16)
            assert answer.split(b" ")[1] == status and b"connection: close" in answer.lower(), path
            sent = 0
            with pytest.raises(OSError):
                while sent < 2**40:
                    sent += connection.send(bytes(2**20))
    what = "requests without the key of an active site, from 127.0.0.1"
    assert counts(served)[STRANGERS, what] >= 1
    assert what in [row["what"] for row in status_of(served.federation)["refused"]]


def test_a_site_that_is_revoked_in_the_middle_is_refused_and_a_new_one_let_in(
    sites: Callable[..., Site], tmp_path: Path
) -> None:
    with serving(tmp_path / "federation") as made:
        site = sites(made, "b")
        node_id = site.join()
        provision.revoke(open_federation(made.federation.folder), "b")
        with pytest.raises(httpx.HTTPStatusError, match="401"):
            site.pull(node_id)
        federation = made.federation.folder / "federation.toml"
        kept = federation.read_text(encoding="utf-8")
        federation.write_text("damaged", encoding="utf-8")
        other = sites(made)
        other.leave(other.join())
        federation.write_text(kept, encoding="utf-8")
        for each in (site, other):
            each.client.close()


class Slow:
    """An application that counts the requests it has at a time."""

    def __init__(self) -> None:
        self.now = self.most = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        assert (await receive())["body"] == bytes(2**17)
        await asyncio.sleep(0.05)
        self.now -= 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


class Everyone:
    """Admits all requests as those of one site."""

    federation = Federation(folder=Path(), name="x", hosts=(HOST,))

    def __init__(self) -> None:
        self.counted: list[str] = []

    def digest_of(self, scope: Scope) -> tuple[str, None]:
        return "a", None

    def count(self, site: str, address: str, refusal: RefusedError) -> None:
        self.counted.append(f"{site} {refusal.status}")


class Mat:
    """A door that stays open."""

    def admit(self, site: str) -> None: ...

    def end(self) -> None: ...


def asked(app: Any, parts: list[bytes], headers: dict[str, str], **given: Any) -> Callable[[], Any]:
    """A request to the gate whose body comes in parts; the status of its answer."""
    scope = {"type": "http", "method": "POST", "path": PULL, **given}
    if scope["type"] == "http":
        scope["fedsign.door"] = Mat()

    async def ask() -> int:
        left, answers = [*parts], []

        async def receive() -> dict[str, Any]:
            if not left:
                await asyncio.sleep(3600)
            return {"type": "http.request", "body": left.pop(0), "more_body": bool(left) or "endless" in headers}

        async def send(message: Any) -> None:
            answers.append(message)

        named = [(key.encode(), value.encode()) for key, value in headers.items()]
        await app({**scope, "headers": named}, receive, send)
        return int(answers[0].get("status") or answers[0]["code"])

    return ask


@pytest.mark.parametrize(
    ("kind", "path", "is_own", "is_open", "answer"),
    [
        ("http", "/v1/fleet/pull-messages", False, True, 200),
        ("http", "/health", False, True, 200),
        ("http", "/v1/control/start-run", False, True, 403),
        ("http", "/v1/control/register-node", False, True, 403),
        ("http", "/v1/runtime/push-messages", False, True, 403),
        ("http", "/docs", False, True, 403),
        ("http", "/healthy", False, True, 403),
        ("http", "/v1/control/start-run", True, True, 200),
        ("http", "/v1/fleet/pull-messages", False, False, 503),  # the sites are being registered
        ("http", "/health", False, False, 503),
        ("websocket", "/v1/control/start-run", False, True, 1008),
        ("http", "/v1/control/start-run", True, False, 200),
    ],
)
def test_others_reach_what_a_supernode_needs_and_nothing_else(
    kind: str, path: str, is_own: bool, is_open: bool, answer: int
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    registered, everyone = threading.Event(), Everyone()
    if is_open:
        registered.set()
    guarded = Gate(app, registered, everyone)  # type: ignore[arg-type]
    assert asyncio.run(asked(guarded, [b""], {}, type=kind, path=path, **{door.OWN: is_own})()) == answer


def test_two_large_bodies_of_a_site_are_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "_BODY_S", 0.05)
    is_open, slow = threading.Event(), Slow()
    is_open.set()
    everyone: Any = Everyone()
    guarded = Gate(slow, is_open, everyone)

    async def all_at_once() -> list[int]:
        large = {"content-length": str(2**17)}
        return [*await asyncio.gather(*(asked(guarded, [bytes(2**16)] * 2, large)() for _ in range(6)))]

    assert asyncio.run(all_at_once()) == [200] * 6
    assert slow.most == 2
    too_long = asked(guarded, [bytes(2**20)] * (MAX_BODY // 2**20 + 1), {"transfer-encoding": "chunked"})
    assert asyncio.run(too_long()) == 413
    assert asyncio.run(asked(guarded, [b""], {"content-length": str(MAX_BODY + 1)})()) == 413
    assert asyncio.run(asked(guarded, [b"x"], {"endless": "yes", "content-length": "9"})()) == 408
    assert everyone.counted == ["a 413", "a 413", "a 408"]


def test_a_site_uploads_a_few_models_for_each_message(tmp_path: Path) -> None:
    federation = Federation(folder=tmp_path, name="x", hosts=(HOST,))
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    uploads = Uploads(federation)
    assert uploads.may_add("a", 2**40), "no run is active"
    for model_bytes, most in ((2**20, 8 * 2**20 + 2**26), (0, 2**50)):
        Progress(federation, "run", run.path, num_rounds=1, model_bytes=model_bytes)
        with run.locked():
            uploads = Uploads(federation)
            assert uploads.may_add("a", most) and uploads.may_add("b", most)
            assert uploads.may_add("a", 1) == (model_bytes == 0)

            async def pull(answer: bytes, uploads: Uploads = uploads, status: int = 200) -> None:
                async def send(message: Any) -> None: ...

                watched = uploads.watched("a", send)
                await watched({"type": "http.response.start", "status": status, "headers": []})
                await watched({"type": "http.response.body", "body": answer})

            asyncio.run(pull(b""))  # no message
            asyncio.run(pull(b"error", status=415))
            assert uploads.may_add("a", 1) == (model_bytes == 0)
            asyncio.run(pull(b"message"))
            assert uploads.may_add("a", most)


def test_a_tls_handshake_that_does_not_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "HEAD_S", 0.5)
    with (
        serving(tmp_path / "federation") as made,
        socket.create_connection((HOST, made.federation.port), 20) as connection,
        suppress(ConnectionResetError),
    ):
        assert connection.recv(1) == b""  # 60 s later, by asyncio's own limit


def test_of_many_connections_of_strangers_or_a_site_the_oldest_go(
    sites: Callable[..., Site], served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "account_of", lambda client, server: None)  # as of another machine's connections
    site = sites(served)
    node_id = site.join()
    trust = ssl.create_default_context(cafile=str(served.federation.authority))
    idle = []
    for _ in range(door.MAX_OF_ONE + 5):
        raw = socket.create_connection((HOST, served.federation.port), 10)
        idle.append(trust.wrap_socket(raw, server_hostname=HOST))
    site.pull(node_id)
    for connection in idle[:5]:
        with suppress(ConnectionError):
            assert connection.recv(1) == b""
    for connection in idle:
        connection.close()
    with httpx.Client(verify=trust, trust_env=False) as client:
        assert client.get(f"https://{HOST}:{served.federation.port}/health").status_code == 200
    for _ in range(door.MAX_OF_ONE + 5):
        sites(served).pull(node_id)
    assert [*door.Door._sites.values()].count("a") == door.MAX_OF_ONE
    site.leave(node_id)
