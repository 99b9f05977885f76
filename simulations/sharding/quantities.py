"""Parse sizes, bandwidths and fractions as people write them."""

import math
import re
from fractions import Fraction

from fedsign.errors import ConfigError

_SIZES = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_BITS = {"bps": 1, "kbps": 10**3, "Mbps": 10**6, "Gbps": 10**9, "Tbps": 10**12}
_BANDWIDTHS = _BITS | {f"{unit}bit/s": size for unit, size in {"k": 10**3, "M": 10**6, "G": 10**9}.items()}
_BANDWIDTHS |= {f"{name}/s": 8 * size for name, size in _SIZES.items()}


def bytes_of(text: str, *, option: str) -> int:
    """Parse a size in bytes.

    >>> bytes_of("80GB", option="--memory"), bytes_of("1.5 KiB", option="--memory")
    (80000000000, 1536)

    Raises:
        ConfigError: it is not a size.
    """
    return round(_quantity(text, _SIZES, option=option, example="80GB or 24GiB"))


def bits_per_second(text: str, *, option: str) -> float:
    """Parse a bandwidth in bits per second.

    >>> bits_per_second("80Gbps", option="--inter"), bits_per_second("10GB/s", option="--inter")
    (80000000000.0, 80000000000.0)

    Raises:
        ConfigError: it is not a bandwidth.
    """
    return _quantity(text, _BANDWIDTHS, option=option, example="80Gbps or 10GB/s")


def fraction(text: str, *, option: str) -> float:
    """Parse a fraction, above 0 and at most 1.

    >>> fraction("1/16", option="--trainable"), fraction("0.003", option="--trainable")
    (0.0625, 0.003)

    Raises:
        ConfigError: it is not such a fraction.
    """
    try:
        # Fraction reads both "1/16" and "0.003"
        value = Fraction(text.replace(" ", ""))
    except (ValueError, ZeroDivisionError):
        value = Fraction(0)
    if not 0 < value <= 1:
        raise ConfigError(f"{option} {text} was given; expected a fraction above 0 and at most 1, such as 1/16.")
    return float(value)


def _quantity(text: str, units: dict[str, int], *, option: str, example: str) -> float:
    match = re.fullmatch(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*(\S+)\s*", text)
    try:
        value = float(match[1]) * units[match[2]] if match else 0.0
    except (KeyError, ValueError):
        value = 0.0
    if not (value > 0 and math.isfinite(value)):
        raise ConfigError(
            f"{option} {text} was given; expected a number above 0 with a unit ({', '.join(units)}), such as {example}."
        )
    return value
