"""Flower's programs: how their speed is set, and how the SuperLink is asked."""

import os
import random
import socket
import ssl
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
from flwr.cli.cli_client_interceptor import CliClientHttpInterceptor
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

from fedsign.errors import EngineError

_LOOPBACK = "localhost,127.0.0.1,::1"
_PATIENCE_S = 120.0
_PORTS = (20_000, 32_000)


def flower_environment(home: Path) -> dict[str, str]:
    """This process's environment, with a home of its own for Flower, and as fast as its settings allow."""
    beside = str(Path(sys.executable).parent)  # Flower starts further programs of its own by their names
    direct = ",".join(filter(None, [os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), _LOOPBACK]))
    return {
        **os.environ,
        "PATH": os.pathsep.join([beside, *os.environ.get("PATH", "").split(os.pathsep)]),
        "NO_PROXY": direct,  # programs of one machine talk to each other by HTTP
        "no_proxy": direct,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # Flower's default is one second
        "PYTHONUNBUFFERED": "1",
    }


@contextmanager
def control(address: str, *, authority: Path | None) -> Iterator[ControlHttpClient]:
    """The SuperLink's Control API, as `flwr` speaks to it; `authority`: the CA that vouches for it, None: without TLS.

    Raises:
        EngineError: it refuses what it is asked for, or gives no answer.
    """
    url, version = f"{'https' if authority else 'http'}://{address}", RuntimeVersionHttpInterceptor("flwr CLI")
    with ControlHttpClient(url, interceptors=[CliClientHttpInterceptor(), version]) as client:
        trust = ssl.create_default_context(cafile=authority) if authority else False
        client._client = httpx.Client(verify=trust, timeout=_PATIENCE_S, trust_env=False)  # past any proxy
        try:
            yield client
        except httpx.HTTPStatusError as error:
            raise EngineError(f"the SuperLink refused: {error.response.text[-500:]}") from error
        except httpx.HTTPError as error:
            raise EngineError(
                f"the SuperLink gave no answer at {address} ({type(error).__name__}); see whether it still runs, or start it again."
            ) from error


def free_port() -> int:
    """A port of the loopback that nobody has now.

    Below those that the system hands out by itself, since a connection of any program may take one of these before the program
    that is told of it has started.
    """
    while True:
        port = random.SystemRandom().randrange(*_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def answers_at(host: str, port: int) -> bool:
    """Whether something listens there."""
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False
