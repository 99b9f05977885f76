"""HOST:PORT addresses, and how this machine resolves them; IPv4 only."""

import ipaddress
import socket
from dataclasses import dataclass
from typing import Self

from fedsign.errors import ConfigError

_MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a listening socket.

    >>> Address.of("node01:29400", given_as="--join")
    Address(host='node01', port=29400)
    """

    host: str
    port: int

    @classmethod
    def of(cls, text: str, *, given_as: str) -> Self:
        """Parse the value of a setting or option.

        Raises:
            ConfigError: it is not of the form HOST:PORT.
        """
        host, _, port = text.rpartition(":")
        if not host or ":" in host or not (port.isascii() and port.isdigit() and 0 < int(port) <= _MAX_PORT):
            raise ConfigError(
                f"{given_as}={text} was given; expected HOST:PORT with a name or an IPv4 address, such as node01:29400."
            )
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it.

        Raises:
            ConfigError: the name does not resolve here.
        """
        return ipaddress.ip_address(self.resolved()).is_loopback

    def resolved(self) -> str:
        """The host as an IPv4 address.

        Raises:
            ConfigError: the name does not resolve here.
        """
        try:
            return socket.gethostbyname(self.host)
        except OSError as error:
            raise ConfigError(
                f"the host of {self} is not known here ({error.strerror}); "
                "give a name that this machine resolves, or an IPv4 address."
            ) from error


def interface_of(address: str) -> str:
    """The network interface whose first IPv4 address this is; empty if there is none.

    >>> interface_of("127.0.0.1"), interface_of("192.0.2.1")
    ('lo', '')
    """
    import psutil  # lazily, to keep reading a configuration fast

    name: str
    for name, found in psutil.net_if_addrs().items():
        if address == next((each.address for each in found if each.family is socket.AF_INET), None):
            return name
    return ""
