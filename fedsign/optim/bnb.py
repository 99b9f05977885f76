"""`bitsandbytes`: moments in 8 bits (`adamw_8bit`), and weights in 4 bits (`lora` with quantization=nf4)."""

import logging
from typing import Any

from fedsign.extras import require


def bitsandbytes(feature: str) -> Any:
    """The library.

    Raises:
        ConfigError: it is not installed.
    """
    quiet()
    return require("bitsandbytes", extra="bitsandbytes", feature=feature)


def quiet() -> None:
    """Keep it from warning, when it is imported, of a kernel for inference that is not installed; peft imports it."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
