"""Format numbers for readers.

A narrow no-break space (U+202F) between a number and its unit keeps them on one line.
"""

import math
from statistics import median
from typing import Any

NARROW_SPACE = "\u202f"
BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
MISSING = "–"


def figure(value: float | None, *, percent: bool = False) -> str:
    """A result with its significant digits.

    >>> figure(0.93344), figure(12.3456), figure(1234.5), figure(None)
    ('0.933', '12.3', '1,234', '–')
    >>> figure(0.93344, percent=True).replace(NARROW_SPACE, " ")
    '93.3 %'
    """
    if value is None or not math.isfinite(value):
        return MISSING
    if percent:
        return f"{100 * value:.1f}{NARROW_SPACE}%"
    size = abs(value)
    if value == 0:
        return "0"
    if size >= 1e6 or size < 1e-4:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    decimals = max(0, 2 - math.floor(math.log10(size))) if size < 100 else 0
    return f"{value:,.{decimals}f}"


def is_share(metric: str) -> bool:
    """Whether a metric is a share of samples, to be shown in percent."""
    return metric == "accuracy" or metric.endswith("_accuracy")


def byte_count(count: int) -> str:
    """Bytes in decimal units.

    >>> byte_count(41_795_200).replace(NARROW_SPACE, " "), byte_count(0).replace(NARROW_SPACE, " ")
    ('41.8 MB', '0 B')
    """
    size, units = float(count), [*reversed(BYTE_UNITS)]
    unit = units.pop()
    # from here on, rounding would show "1,000 kB"
    while size >= 999.5 and units:
        size, unit = size / 1000, units.pop()
    decimals = 0 if unit == "B" or size >= 100 else 1
    return f"{size:,.{decimals}f}{NARROW_SPACE}{unit}"


def duration(seconds: float) -> str:
    """Seconds in the two largest units.

    >>> [duration(value).replace(NARROW_SPACE, " ") for value in (0.0123, 3.46, 272.0, 7384.0, 180000.0)]
    ['12 ms', '3.5 s', '4 min 32 s', '2 h 3 min', '2 d 2 h']
    """
    # each limit is where rounding would reach the next unit: not "1000 ms", not "60.0 s"
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f}{NARROW_SPACE}ms"
    if seconds < 59.95:
        return f"{seconds:.1f}{NARROW_SPACE}s"
    whole = round(seconds)
    for size, unit, smaller, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size}{NARROW_SPACE}{unit}" + (f" {rest}{NARROW_SPACE}{part}" if rest else "")
    return f"{whole}{NARROW_SPACE}s"


def setting(value: Any) -> str:
    """A value of the configuration.

    >>> setting([128, 128]), setting(False), setting(0.05), setting("")
    ('128, 128', 'false', '0.05', '–')
    """
    match value:
        case bool():
            return "true" if value else "false"
        case list():
            return ", ".join(setting(item) for item in value) or MISSING
        case dict():
            return ", ".join(f"{key} = {setting(item)}" for key, item in value.items()) or MISSING
        case _:
            return str(value) or MISSING


def shortened(text: str, longest: int) -> str:
    """A text cut to a maximum length.

    >>> shortened("FedSign", 7), shortened("FedSign", 6)
    ('FedSign', 'FedSi…')
    """
    return text if len(text) <= longest else text[: longest - 1] + "…"


def plural(count: int, noun: str) -> str:
    """A count with its noun.

    >>> plural(1, "client"), plural(1437, "class")
    ('1 client', '1,437 classes')
    """
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{ending}"


def middle(values: list[int]) -> str:
    """The median, with a decimal only if necessary.

    >>> middle([1, 2]), middle([1000, 2000, 2001])
    ('1.5', '2,000')
    """
    return f"{median(values):,.1f}".removesuffix(".0")
