"""Addresses as people write them, HOST:PORT, and what this machine knows of them.  IPv4."""

import fcntl
import ipaddress
import socket
import struct
from dataclasses import dataclass
from typing import Self

from fedsign.errors import ConfigError

_ASK_FOR_ADDRESS = 0x8915  # Linux's SIOCGIFADDR, of a `struct ifreq`: 16 bytes of name, then a `sockaddr_in`
_REQUEST = struct.Struct("16s16x")
_MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class Address:
    """Where something listens.

    >>> Address.of("node01:29400", given_as="--join")
    Address(host='node01', port=29400)
    """

    host: str
    port: int

    @classmethod
    def of(cls, text: str, *, given_as: str) -> Self:
        """What a setting or option says.

        Raises:
            ConfigError: it is no HOST:PORT.
        """
        host, _, port = text.rpartition(":")
        if not host or ":" in host or not (port.isascii() and port.isdigit() and 0 < int(port) <= _MAX_PORT):
            raise ConfigError(
                f"{given_as}={text} was given; expected is HOST:PORT with a name or an IPv4 address, such as node01:29400."
            )
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether no other machine can mean this one by it.

        Raises:
            ConfigError: the name is not known here.
        """
        return ipaddress.ip_address(self.resolved()).is_loopback

    def resolved(self) -> str:
        """The host as an IPv4 address.

        Raises:
            ConfigError: the name is not known here.
        """
        try:
            return socket.gethostbyname(self.host)
        except OSError as error:
            raise ConfigError(
                f"the host of {self} is not known here ({error.strerror}); give a name that this machine resolves, or an IPv4 address."
            ) from error


def interface_of(address: str) -> str:
    """The name of the network interface of this machine that has an IPv4 address; empty if none has it as its first.

    >>> interface_of("127.0.0.1"), interface_of("192.0.2.1")
    ('lo', '')
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(asking, _ASK_FOR_ADDRESS, _REQUEST.pack(name.encode()))
            except OSError:
                continue  # it has none
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return ""
