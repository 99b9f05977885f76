"""Version checks between the processes of one run."""

import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

MISSING = "missing"
INSTALLED = " installed"  # after a program's name
_SPEAK_TO_EACH_OTHER = ("fedsign", "flwr")


def versions() -> dict[str, str]:
    """The versions of Python, FedSign, Flower and torch that this process runs."""
    return dict(_AT_START)


def installed_since() -> dict[str, str]:
    """Other versions that have been installed since this process began, by name and `INSTALLED`."""
    return {name + INSTALLED: now for name, now in _installed().items() if now != _AT_START[name]}


def _installed() -> dict[str, str]:
    by_name = {"python": platform.python_version()}
    for name in ("fedsign", "flwr", "torch"):
        try:
            by_name[name] = version(name)
        except PackageNotFoundError:
            by_name[name] = MISSING
    return by_name


_AT_START = _installed()


def compared(
    here: Mapping[str, str], wanted: Mapping[str, str]
) -> Iterator[tuple[str, Literal["ok", "warn", "broken"]]]:
    """Compare local versions with the wanted ones.  Patch releases of FedSign and Flower are compatible.

    >>> list(compared({"flwr": "1.40.0", "torch": "2.13.0"}, {"flwr": "1.41.0", "torch": "2.13.1"}))
    [('flwr', 'broken'), ('torch', 'warn')]
    """
    for name, expected in wanted.items():
        has = here.get(name, MISSING)
        if has == expected:
            yield name, "ok"
        elif has == MISSING or (name in _SPEAK_TO_EACH_OTHER and has.split(".")[:2] != expected.split(".")[:2]):
            yield name, "broken"
        else:
            yield name, "warn"
