"""Two machines and a slow cable: network namespaces joined by a veth pair, both ends shaped by tc's token bucket.

Needs root and iproute2.  Ranks in the same namespace use its fast loopback; traffic between namespaces is limited to
the given rate.  Messages smaller than the bucket's burst pass unshaped.  Everything is removed at the end, by name.
"""

import shutil
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fedsign.errors import EngineError

DEVICE = "eth0"
_BURST_BYTES, _LATENCY_MS = 131_072, 400


@dataclass(frozen=True, slots=True)
class Cable:
    """Both ends of the cable."""

    tag: str

    @property
    def hosts(self) -> tuple[str, str]:
        """The namespaces' names."""
        return f"fedsign-{self.tag}-0", f"fedsign-{self.tag}-1"

    def address(self, host: int) -> str:
        """Return the address of an end."""
        return f"10.78.0.{host + 1}"

    def inside(self, host: int, command: Sequence[str]) -> list[str]:
        """Return a command that runs on that machine."""
        return ["ip", "netns", "exec", self.hosts[host], *command]

    def shape(self, megabits: float) -> None:
        """Limit both directions to a rate."""
        for host in self.hosts:
            bucket = f"rate {megabits}mbit burst {_BURST_BYTES} latency {_LATENCY_MS}ms".split()
            _run("tc", "-n", host, "qdisc", "replace", "dev", DEVICE, "root", "tbf", *bucket)


class Sent(NamedTuple):
    """What a machine has sent over the cable so far, by its kernel's counters."""

    num_bytes: int
    """Bytes including Ethernet, IP and TCP headers, once per segment."""
    num_segments: int
    """Packets as handed to the device, which with segmentation offload exceed the MTU."""

    def since(self, before: "Sent") -> "Sent":
        """Return the difference to an earlier reading."""
        return Sent(self.num_bytes - before.num_bytes, self.num_segments - before.num_segments)


def sent() -> Sent:
    """Read the counters of this process's machine; zeros without a cable."""
    for line in Path("/proc/net/dev").read_text(encoding="utf-8").splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == DEVICE:
            found = numbers.split()
            return Sent(int(found[8]), int(found[9]))
    return Sent(0, 0)


@contextmanager
def cable() -> Iterator[Cable]:
    """Set up a cable, unshaped at first.

    Raises:
        EngineError: network namespaces cannot be created here.
    """
    if shutil.which("ip") is None or shutil.which("tc") is None:
        raise EngineError("the programs 'ip' and 'tc' were not found; install iproute2 (apt-get install iproute2).")
    made = Cable(uuid.uuid4().hex[:6])
    first, second = made.hosts
    try:
        for host in made.hosts:
            _run("ip", "netns", "add", host)
            _run("ip", "-n", host, "link", "set", "lo", "up")
        _run("ip", "-n", first, "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", second)
        for number, host in enumerate(made.hosts):
            _run("ip", "-n", host, "addr", "add", f"{made.address(number)}/24", "dev", DEVICE)
            _run("ip", "-n", host, "link", "set", DEVICE, "up")
        yield made
    finally:
        for host in made.hosts:  # deleting a namespace deletes its devices
            subprocess.run(["ip", "netns", "del", host], capture_output=True, check=False)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EngineError(f"'{' '.join(command)}' failed: {done.stderr.strip()}; network namespaces need root.")
