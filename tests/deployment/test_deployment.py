"""A federation's folder: certificates that verify, keys that stay where they belong, sites that join and leave."""

import datetime as dt
import io
import ipaddress
import os
import socket
import ssl
import stat
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError
from flwr.common.config import parse_config_args
from flwr.proto.control_pb2 import ListNodesRequest, ListNodesResponse, RegisterNodeRequest, UnregisterNodeRequest
from flwr.proto.node_pb2 import NodeInfo

from fedsign.errors import ConfigError, ResultsError
from fedsign.flower.signatures import AHEAD_S
from simulations.deployment import check, keys, membership, provision, start
from simulations.deployment.federation import Federation, open_federation
from simulations.deployment.keys import Certified, ends_at, general_name, issue, make_authority, validity
from simulations.deployment.probe import AwayError, ServerError, probe_server
from simulations.deployment.running import end, free_port, is_alive, record_this_process, recorded, with_descendants
from simulations.deployment.startup_kits import open_startup_kit

YEAR = dt.timedelta(days=365)
HOSTS = ("fl.example.org", "192.0.2.10", "2001:db8::1")


@pytest.fixture(scope="module")
def authority() -> Certified:
    return make_authority("hospitals")


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    """Of two sites; berlin's key is in its kit, hamburg's was made there."""
    public = keys.make_key(tmp_path / "hamburg.key", comment="hamburg")
    (tmp_path / "hamburg.pub").write_text(public + "\n", encoding="utf-8")
    asked = Federation(folder=tmp_path / "federation", name="hospitals", hosts=HOSTS)
    return provision.init(asked, [("berlin", None), ("hamburg", tmp_path / "hamburg.pub")], lifetime=YEAR)


@pytest.mark.parametrize("host", [*HOSTS, "localhost", "127.0.0.1"])
def test_an_independent_verifier_accepts_the_chain_for_every_name_and_address(authority: Certified, host: str) -> None:
    verify(issue(authority, HOSTS, lifetime=YEAR), authority, host)


@pytest.mark.parametrize("host", ["other.example.org", "192.0.2.11"])
def test_it_refuses_other_names_and_addresses(authority: Certified, host: str) -> None:
    with pytest.raises(VerificationError):
        verify(issue(authority, HOSTS, lifetime=YEAR), authority, host)


def test_it_refuses_another_ca_and_a_certificate_that_is_over(authority: Certified) -> None:
    with pytest.raises(VerificationError):
        verify(issue(make_authority("hospitals"), HOSTS, lifetime=YEAR), authority, HOSTS[0])
    with pytest.raises(VerificationError):
        verify(issue(authority, HOSTS, lifetime=dt.timedelta(seconds=-1)), authority, HOSTS[0])


def test_a_certificate_does_not_outlive_its_ca(authority: Certified, tmp_path: Path) -> None:
    made = issue(authority, HOSTS, lifetime=20 * YEAR)
    made.write(tmp_path / "server.pem", tmp_path / "server.key")
    assert ends_at(tmp_path / "server.pem") == x509.load_pem_x509_certificate(authority.certificate).not_valid_after_utc


@pytest.mark.parametrize(("days", "state"), [(-1, "broken"), (29, "warn"), (31, "ok")])
def test_a_certificate_that_ends_within_thirty_days_warns(days: int, state: str) -> None:
    assert validity(dt.datetime.now(dt.UTC) + dt.timedelta(days=days))[0] == state


def test_no_kit_and_no_archive_holds_a_key_but_the_sites_own(federation: Federation) -> None:
    secrets = {
        "CA": federation.authority_key.read_bytes(),
        "server": (federation.server / "server.key").read_bytes(),
        "berlin": (federation.kit("berlin") / "key").read_bytes(),
    }
    bodies = {name: key.splitlines()[1] for name, key in secrets.items()}  # a line of the key itself
    for site, own in (("berlin", {"berlin"}), ("hamburg", set())):
        contents = everything(federation.kit(site)) | everything_packed(federation.kit(site).with_suffix(".tar.gz"))
        assert len(contents) > 8
        found = {name for name, body in bodies.items() if any(body in content for content in contents.values())}
        assert found == own
        assert any(b"PRIVATE KEY" in content for content in contents.values()) == bool(own)


@pytest.mark.parametrize("name", ["paris.tar.gz", "paris/README.md", "paris/start.sh"])
def test_a_kit_replaces_no_file_of_the_user(federation: Federation, name: str) -> None:
    mine = federation.folder / "kits" / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    before = sorted(federation.folder.rglob("*"))
    with pytest.raises(ResultsError, match=f"{mine} is not FedSign's"):
        provision.add_site(federation, "paris", None)
    assert mine.read_text() == "mine" and sorted(federation.folder.rglob("*")) == before
    assert open_federation(federation.folder) == federation  # without the site: it can be added again
    mine.unlink()
    provision.add_site(federation, "paris", None)


@pytest.mark.parametrize("name", ["README.md", ".gitignore", "server/start.sh", "server/fedsign-superlink.service"])
def test_what_the_server_has_may_be_edited(federation: Federation, name: str) -> None:
    edited = federation.folder / name
    edited.write_text("mine")
    provision.revoke(provision.add_site(federation, "paris", None), "berlin")
    assert edited.read_text() == "mine"


def test_keys_are_for_their_owner_alone_also_in_the_archive(federation: Federation) -> None:
    private = [path for path in federation.folder.rglob("*") if path.is_file() and b"PRIVATE KEY" in path.read_bytes()]
    assert len(private) == 3  # the CA's, the server's, berlin's
    private += federation.folder.rglob("*.tar.gz")
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}
    with tarfile.open(federation.folder / "kits" / "berlin.tar.gz") as tar:
        assert tar.getmember("berlin/key").mode == tar.getmember("berlin/site.toml").mode == 0o600
        assert tar.getmember("berlin").mode == tar.getmember("berlin/start.sh").mode == 0o700
        assert not any(member.mode & 0o077 for member in tar.getmembers())


def test_flower_reads_a_sites_key_and_its_public_half_is_the_one_on_record(federation: Federation) -> None:
    path = federation.kit("berlin") / "key"
    load_ssh_private_key(path.read_bytes(), password=None)
    assert (
        keys.public_line(keys.load_private(path).public_key())
        == federation.site("berlin").public_key
        == keys.read_public(path.with_name("key.pub"))
    )


def test_ssh_keygen_prints_the_same_fingerprint(federation: Federation) -> None:
    public = federation.kit("berlin") / "key.pub"
    try:
        done = subprocess.run(["ssh-keygen", "-l", "-f", public], capture_output=True, text=True, check=True)
    except FileNotFoundError:
        pytest.skip("ssh-keygen is not installed")
    assert keys.fingerprint(federation.site("berlin").public_key) in done.stdout


def test_the_folder_is_read_as_it_was_written(federation: Federation) -> None:
    assert open_federation(federation.folder) == federation


def test_a_revoked_sites_partition_goes_to_the_next_and_its_key_and_name_to_nobody(federation: Federation) -> None:
    left = provision.revoke(federation, "berlin")
    assert [(site.name, site.partition) for site in left.active] == [("hamburg", 1)]
    grown = provision.add_site(left, "leipzig", None)
    assert [(site.name, site.partition) for site in grown.active] == [("leipzig", 0), ("hamburg", 1)]
    with pytest.raises(ConfigError, match=r"'berlin' is there already \(revoked\)"):
        provision.add_site(grown, "berlin", None)
    with pytest.raises(ConfigError, match=r"key is that of site 'berlin' \(revoked\)"):
        provision.add_site(grown, "bonn", federation.kit("berlin") / "key.pub")


class KeyTable:
    """The part of a SuperLink's Control API that keeps keys."""

    def __init__(self) -> None:
        self.nodes: list[NodeInfo] = []

    def __enter__(self) -> "KeyTable":
        return self

    def __exit__(self, *error: object) -> None:
        """Keep the table."""

    def RegisterNode(self, request: RegisterNodeRequest) -> None:
        assert request.public_key.startswith(b"-----BEGIN PUBLIC KEY-----")  # as Flower's handler asks for
        assert request.public_key not in [node.public_key for node in self.nodes]
        node_id = 100 + len(self.nodes)
        self.nodes.append(
            NodeInfo(node_id=node_id, name=request.name, public_key=request.public_key, status="registered")
        )

    def UnregisterNode(self, request: UnregisterNodeRequest) -> None:
        (node,) = (node for node in self.nodes if node.node_id == request.node_id)
        assert node.status == "registered"
        node.status = "unregistered"

    def ListNodes(self, request: ListNodesRequest) -> ListNodesResponse:
        return ListNodesResponse(nodes_info=self.nodes)


def statuses(federation: Federation) -> dict[str, str]:
    return {node.name: node.status for node in membership.nodes_of(federation)}


def test_the_superlink_takes_the_keys_of_active_sites_and_not_that_of_a_revoked_one(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = KeyTable()
    monkeypatch.setattr(membership, "ControlHttpClient", lambda *given, **settings: table)
    membership.register_sites(federation)
    assert statuses(federation) == {"berlin": "registered", "hamburg": "registered"}
    left = provision.revoke(federation, "berlin")
    for _ in range(2):  # the second time there is nothing to do
        membership.register_sites(left)
        assert statuses(left) == {"berlin": "unregistered", "hamburg": "registered"}


def test_a_renewed_certificate_is_of_the_same_ca_and_of_the_new_names_too(federation: Federation) -> None:
    ca = federation.authority.read_bytes()
    renewed = provision.renew(federation, ["new.example.org"], lifetime=YEAR)
    made = Certified(certificate=renewed.certificate.read_bytes(), key=b"")
    for host in (*HOSTS, "new.example.org"):
        verify(made, Certified(certificate=ca, key=b""), host)


@pytest.mark.parametrize(
    ("changes", "sites", "says"),
    [
        ({"hosts": ("fl.example.org:8000",)}, ["a"], "neither a name nor an address"),
        ({"hosts": ("192.0.2.300",)}, ["a"], "neither a name nor an address"),
        ({"bind": "nonsense"}, ["a"], "--bind nonsense is no address"),
        ({}, ["Bad Name"], "cannot be a site's name"),
        ({}, ["a", "a"], "there already"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_no_folder(
    tmp_path: Path, changes: dict[str, Any], sites: list[str], says: str
) -> None:
    asked = replace(Federation(folder=tmp_path / "federation", name="hospitals", hosts=HOSTS), **changes)
    with pytest.raises(ConfigError, match=says):
        provision.init(asked, [(site, None) for site in sites], lifetime=YEAR)
    assert not asked.folder.exists()


def test_a_private_key_is_not_taken_for_a_public_one(tmp_path: Path) -> None:
    keys.make_key(tmp_path / "a.key", comment="a")
    with pytest.raises(ConfigError, match="must stay at its site"):
        keys.read_public(tmp_path / "a.key")


def test_a_damaged_key_or_partition_in_federation_toml_is_refused(federation: Federation) -> None:
    path = federation.folder / "federation.toml"
    text = path.read_text(encoding="utf-8")
    for before, after in (
        ("partition = 1", "partition = 0"),
        ('state = "active"', 'state = "actavo"'),
        ("AAAA", "AABA"),
    ):
        path.write_text(text.replace(before, after, 1), encoding="utf-8")
        with pytest.raises(ConfigError, match=r"site (berlin|hamburg) is not as 'fedsign deploy' wrote it"):
            open_federation(federation.folder)
    path.write_text(text.replace("port = 8000", "port = 8001"), encoding="utf-8")  # what may be edited
    assert open_federation(federation.folder).port == 8001


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_the_files_of_a_federation_are_read_as_editors_save_them(encoding: str, federation: Federation) -> None:
    kit = federation.kit("berlin")
    before = open_startup_kit(kit)
    for path in (federation.folder / "federation.toml", kit / "site.toml"):
        path.write_bytes(path.read_text(encoding="utf-8").replace("\n", "\r\n").encode(encoding))
    assert open_federation(federation.folder) == federation
    assert open_startup_kit(kit) == before


@pytest.mark.parametrize(
    "folder", ["/data/a b", "/data/it's", '/data/"quoted"', "/data/ünïcode#1", "/data/back\\slash"]
)
def test_flower_reads_a_sites_data_folder_as_it_was_given(tmp_path: Path, folder: str) -> None:
    """Through site.toml and the file that the start script gives to flower-supernode."""
    import tomli_w

    asked = Federation(folder=tmp_path / "federation", name="x", hosts=HOSTS)
    made = provision.add_site(provision.init(asked, [], lifetime=YEAR), "a", None, data_root=folder, device="cuda:1")
    config = open_startup_kit(made.kit("a")).node_config()
    (tmp_path / "node.toml").write_text(tomli_w.dumps(config), encoding="utf-8")
    read = parse_config_args([str(tmp_path / "node.toml")])
    assert read == {"partition-id": 0, "site": "a", "data-root": folder, "device": "cuda:1"}


@pytest.mark.parametrize(
    ("lifetime", "host", "foreign", "says"),
    [
        (YEAR, "127.0.0.1", False, ""),
        (
            dt.timedelta(seconds=-1),
            "127.0.0.1",
            False,
            r"has expired, on \d{4}-\d\d-\d\d \d\d:\d\d UTC; .*'fedsign deploy renew'",
        ),
        (YEAR, "127.0.0.2", False, "does not cover 127.0.0.2"),
        (YEAR, "127.0.0.1", True, "not signed by this federation's CA"),
    ],
)
def test_a_site_says_what_is_wrong_with_a_servers_certificate(
    authority: Certified, tmp_path: Path, lifetime: dt.timedelta, host: str, foreign: bool, says: str
) -> None:
    (tmp_path / "ca.pem").write_bytes((make_authority("other") if foreign else authority).certificate)
    with https_server(issue(authority, HOSTS, lifetime=lifetime), tmp_path) as port:
        if says:
            with pytest.raises(ServerError, match=says) as caught:
                probe_server(host, port, authority=tmp_path / "ca.pem")
            assert not isinstance(caught.value, AwayError)
        else:
            seen = probe_server(host, port, authority=tmp_path / "ca.pem")
            assert abs(seen.ahead_s) <= AHEAD_S
            assert seen.certificate_ends is not None


def test_a_certificate_that_ends_while_the_superlink_runs_is_named_on_both_sides(
    authority: Certified, federation: Federation, tmp_path: Path
) -> None:
    federation.authority.write_bytes(authority.certificate)
    says = "the certificate of 127.0.0.1 has expired, on "
    with https_server(issue(authority, HOSTS, lifetime=dt.timedelta(seconds=-1)), tmp_path) as port:
        here = replace(federation, port=port)
        for ask in (membership.nodes_of, membership.register_sites):
            with pytest.raises(ServerError, match=says):
                ask(here)
        command = [sys.executable, "-m", "simulations.deployment.logs", str(tmp_path / "log")]
        server = ["127.0.0.1", str(port), str(federation.authority)]
        lost = "WARNING: Connection attempt failed, retrying in 0.50 seconds\n"
        done = subprocess.run(
            [*command, *server], input=f"hello\n{lost}{lost}", capture_output=True, text=True, check=True
        )
    for said in (done.stdout, (tmp_path / "log").read_text(encoding="utf-8")):
        assert said.count(says) == 1 and said.index(says) > said.index("attempt failed")


def test_a_superlink_that_refuses_this_account_names_the_one_to_use(federation: Federation) -> None:
    class Refuse(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_error(403)

        def log_message(self, format: str, *args: object) -> None:
            """Be quiet."""

    with HTTPServer(("127.0.0.1", 0), Refuse) as server:
        threading.Thread(target=server.handle_request).start()
        with pytest.raises(ConfigError, match=r"federation belongs to \w+, but this is \w+; run this command as"):
            membership.nodes_of(replace(federation, port=server.server_port, insecure=True))


def test_a_server_that_is_not_there_is_worth_another_try(tmp_path: Path, authority: Certified) -> None:
    (tmp_path / "ca.pem").write_bytes(authority.certificate)
    with pytest.raises(AwayError, match="nothing answers"):
        probe_server("127.0.0.1", 1, authority=tmp_path / "ca.pem")


def test_a_server_that_comes_up_late_is_checked_as_well(
    authority: Certified, federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else Flower would retry for ever with an expired certificate."""
    monkeypatch.setattr(start, "_POLL_S", 0.05)
    expired = issue(authority, HOSTS, lifetime=dt.timedelta(seconds=-1))
    said: list[str] = []
    made = open_startup_kit(federation.kit("berlin"))
    facts = {**made.facts, "port": 1}
    kit = replace(made, facts=facts)
    (kit.folder / "ca.pem").write_bytes(authority.certificate)
    with ExitStack() as later:

        def say(text: str) -> None:
            said.append(text)
            facts["port"] = later.enter_context(https_server(expired, tmp_path))

        with pytest.raises(ServerError, match="has expired"):
            start._greet(kit, say, "127.0.0.1")
    assert len(said) == 1 and "nothing answers at 127.0.0.1, port 1" in said[0]


@pytest.mark.needs("sharding")
def test_check_tells_of_what_is_missing_at_a_site(federation: Federation, tmp_path: Path) -> None:
    kit = federation.kit("berlin")
    text = (kit / "site.toml").read_text(encoding="utf-8")
    text = text.replace('data_root = ""', f'data_root = "{tmp_path}/nowhere"').replace(
        'device = ""', 'device = "cuda:99"'
    )
    (kit / "site.toml").write_text(text.replace('host = "fl.example.org"', 'host = "127.0.0.1"').replace("8000", "1"))
    (kit / "key").chmod(0o644)
    own = '\n[sharding]\nmachines = 2\nlisten = "192.0.2.1:29400"\nsecret_file = "silo.secret"\n'
    (kit / "site.toml").write_text((kit / "site.toml").read_text() + own)
    states = {row["what"]: (row["state"], row["detail"]) for row in check.check_site(open_startup_kit(kit))}
    broken = {what for what, (state, _) in states.items() if state == "broken"}
    assert broken == {"data", "device", "key", "berlin/key", "server", "sharding"}
    assert f"={kit / 'silo.secret'} cannot be read (No such file or directory)" in states["sharding"][1]
    assert "chmod 600" in states["key"][1]
    assert states["python"][0] == "ok"


@pytest.mark.parametrize("content", [None, "", "no certificate"])
def test_a_kit_without_the_cas_certificate_is_not_taken_for_a_server_that_is_away(
    federation: Federation, content: str | None
) -> None:
    kit = open_startup_kit(federation.kit("berlin"))
    ca = kit.folder / "ca.pem"
    ca.unlink() if content is None else ca.write_text(content)
    with pytest.raises(
        ServerError, match=r"ca\.pem is no CA's certificate that can be read .* unpack the kit again"
    ) as caught:
        probe_server("127.0.0.1", 1, authority=kit.trusted)
    assert not isinstance(caught.value, AwayError)


def test_what_flower_does_not_answer_is_one_row_of_the_check(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "_PATIENCE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        silent = replace(federation, port=other.getsockname()[1])
        record_this_process(silent.server / "pid")
        rows = {row["what"]: row for row in check.check_server(silent)}
    assert rows["sites"] == {
        "what": "sites",
        "state": "broken",
        "detail": (
            f"the SuperLink gave no answer at {silent.local_address} (ConnectTimeout); see whether it still runs, or "
            "start it again."
        ),
    }
    assert rows["certificate"]["state"] == "ok"


def test_a_superlink_that_cannot_register_its_sites_ends_and_says_why(federation: Federation) -> None:
    """Otherwise its gate would stay closed, and every site would be told for ever to try again."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        replace(federation, port=other.getsockname()[1]).write()
        (federation.server / "state").write_text("a file in the folder's place")
        code = (
            "import sys, threading; from pathlib import Path; from simulations.deployment import gate; "
            "gate._register_when_up(gate.open_federation(Path(sys.argv[1])), threading.Event())"
        )
        command = [sys.executable, "-c", code, str(federation.folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "the sites could not be registered: FileExistsError" in done.stderr


def test_a_free_port_is_none_that_the_system_gives_to_connections() -> None:
    """A connection of any program could take it before the program that was told of it has started."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if first < 32_000:
        pytest.skip(f"this system gives ports from {first} on")
    assert all(free_port() < first for _ in range(20))


def test_a_process_is_found_by_its_record_until_it_ends_and_nobody_else_is_ended(tmp_path: Path) -> None:
    child = subprocess.Popen(["sh", "-c", "sleep 100 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.readline()
    record = tmp_path / "pid"
    record.write_text(str(child.pid))
    process = recorded(record)
    assert process is not None
    assert len(with_descendants([process])) == 2
    before = process.create_time() - 60
    os.utime(record, (before, before))  # of another process that had this id
    assert recorded(record) is None
    threading.Thread(target=child.wait).start()  # its parent has to take note, as init does
    family = with_descendants([process])
    end([process], patience_s=0.5)
    assert not any(map(is_alive, family))
    child.stdout.close()


def test_a_record_is_of_this_process_and_forgotten_with_it(tmp_path: Path) -> None:
    record_this_process(tmp_path / "pid")
    assert recorded(tmp_path / "pid") == psutil.Process()
    code = (
        "import sys, pathlib; from simulations.deployment.running import record_this_process as r; "
        "r(pathlib.Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "other"], check=True)
    assert recorded(tmp_path / "other") is None


def verify(made: Certified, authority: Certified, host: str) -> None:
    """By the rules of the web's PKI, as cryptography implements them."""
    store = Store([x509.load_pem_x509_certificate(authority.certificate)])
    verifier = PolicyBuilder().store(store).time(dt.datetime.now(dt.UTC)).build_server_verifier(subject(host))
    verifier.verify(x509.load_pem_x509_certificate(made.certificate), [])


def subject(host: str) -> x509.DNSName | x509.IPAddress:
    name = general_name(host)
    assert isinstance(name, x509.DNSName | x509.IPAddress)
    assert isinstance(name, x509.IPAddress) == any(host == str(ip) for ip in addresses(host))
    return name


def addresses(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    try:
        return [ipaddress.ip_address(host)]
    except ValueError:
        return []


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def everything_packed(archive: Path) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive.read_bytes())) as tar:
        files = {member.name: tar.extractfile(member) for member in tar.getmembers() if member.isfile()}
        return {name: file.read() for name, file in files.items() if file is not None}


@contextmanager
def https_server(made: Certified, folder: Path) -> Iterator[int]:
    """A server with this certificate, on every address of the loopback."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Be quiet."""

    class Quiet(HTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """A client that turns away is what is tested."""

    made.write(folder / "server.pem", folder / "server.key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    server = Quiet(("", 0), Answer)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        time.sleep(0)
