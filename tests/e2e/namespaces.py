"""Machines of a network, as network namespaces on one bridge, with their own addresses and cables that can be pulled.

Needs root and iproute2; `why_not` says what is missing.  Names have a random part, and everything is removed at the
end, by name.
"""

import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

PREFIX = "10.77.0."


@dataclass
class Network:
    """`hosts`: name -> address."""

    tag: str
    hosts: dict[str, str] = field(default_factory=dict)

    def inside(self, host: str, command: Sequence[str]) -> list[str]:
        """The same command, on that host."""
        return ["ip", "netns", "exec", self._namespace(host), *command]

    def unplug(self, host: str) -> None:
        """Pull the cable at the switch."""
        ip("-n", self._namespace("switch"), "link", "set", host, "down")

    def plug_in(self, host: str) -> None:
        """And put it back."""
        ip("-n", self._namespace("switch"), "link", "set", host, "up")

    def slow_down(self, host: str, rate: str) -> None:
        """A cable of this rate, both ways."""
        for namespace, device in ((self._namespace(host), "eth0"), (self._namespace("switch"), host)):
            limit = ("rate", rate, "burst", "32kb", "latency", "100ms")
            subprocess.run(
                ["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *limit], check=True
            )

    def carried(self, host: str) -> tuple[int, int]:
        """Bytes that a host's cable has carried to it, and from it."""
        command = ["ip", "-n", self._namespace("switch"), "-s", "-j", "link", "show", host]
        found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)[0]["stats64"]
        return found["tx"]["bytes"], found["rx"]["bytes"]

    def _namespace(self, host: str) -> str:
        return f"fedsign-{self.tag}-{host}"

    def build(self, hosts: Mapping[str, str]) -> None:
        """A switch, and each host with one cable to it."""
        switch = self._namespace("switch")
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge0", "up")
        for host, address in hosts.items():
            self.hosts[host] = address
            namespace = self._namespace(host)
            ip("netns", "add", namespace)
            ip("-n", namespace, "link", "set", "lo", "up")
            ip("-n", namespace, "link", "add", "eth0", "type", "veth", "peer", "name", host, "netns", switch)
            ip("-n", switch, "link", "set", host, "master", "bridge0", "up")
            ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", namespace, "link", "set", "eth0", "up")

    def tear_down(self) -> None:
        """Devices go with their namespaces."""
        for host in (*self.hosts, "switch"):
            subprocess.run(["ip", "netns", "del", self._namespace(host)], capture_output=True, check=False)


@contextmanager
def network(*hosts: str) -> Iterator[Network]:
    """Hosts with the addresses 10.77.0.1, .2, ... in the order given."""
    made = Network(tag=uuid.uuid4().hex[:6])
    try:
        made.build({host: f"{PREFIX}{number}" for number, host in enumerate(hosts, start=1)})
        yield made
    finally:
        made.tear_down()


def why_not() -> str:
    """Why no namespaces can be made here, or ""."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the program 'ip' is missing: apt-get install iproute2"
    try:
        with network("probe"):
            return ""
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"


def ip(*arguments: str) -> None:
    """`ip ARGUMENTS`."""
    subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)
