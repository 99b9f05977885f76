"""AdamW with moments in 8 bits: a quarter of the memory.

Paper: Dettmers et al. 2022 (arXiv 2110.02861).  Each block of 256 elements of a moment has a float32 scale and a byte
per element, an index into a table of values that are denser near 0.  A step dequantizes both moments, takes AdamW's
step in float32, and quantizes them again.  The code is that of `bitsandbytes`.
"""

from collections.abc import Iterable
from typing import Annotated

import torch
from pydantic import Field

from fedsign.errors import ConfigError
from fedsign.optim.adamw import Decay, Epsilon
from fedsign.optim.bnb import bitsandbytes
from fedsign.optim.lean import made_lean

_BLOCK = 256  # elements with a scale of their own
_MIN_8BIT_SIZE = 4096


def adamw_8bit(
    parameters: Iterable[torch.nn.Parameter],
    lr: float,
    weight_decay: float,
    *,
    beta1: Decay = 0.9,
    beta2: Decay = 0.999,
    eps: Epsilon = 1e-8,
    min_8bit_size: Annotated[int, Field(ge=0)] = _MIN_8BIT_SIZE,
) -> torch.optim.Optimizer:
    """AdamW whose moments are in 8 bits for tensors of `min_8bit_size` elements or more, else float32.

    Raises:
        ConfigError: `bitsandbytes` is missing, or a parameter has another memory format or is complex.
    """
    library = bitsandbytes("client.optimizer.name=adamw_8bit")
    optimizer: torch.optim.Optimizer = made_lean(
        library.optim.AdamW8bit,
        parameters,
        lr=lr,
        weight_decay=weight_decay,
        betas=(beta1, beta2),
        eps=eps,
        min_8bit_size=min_8bit_size,
    )
    # its step would move such a parameter to other memory
    if not all(parameter.is_contiguous() for group in optimizer.param_groups for parameter in group["params"]):
        raise ConfigError(
            "client.optimizer.name=adamw_8bit was given with weights in channels-last memory; set "
            "engine.channels_last=off."
        )
    if any(parameter.is_complex() for group in optimizer.param_groups for parameter in group["params"]):
        raise ConfigError("client.optimizer.name=adamw_8bit was given with complex weights; use adamw.")
    vars(optimizer)["is_separable"] = True  # for `clients.local_optim`
    return optimizer


def num_scales(num_elements: int, *, min_8bit_size: int = _MIN_8BIT_SIZE) -> int:
    """The float32 scales of a moment in 8 bits; 0 for a tensor whose moments are float32.

    >>> num_scales(100), num_scales(8192)
    (0, 32)
    """
    return 0 if num_elements < min_8bit_size else -(-num_elements // _BLOCK)
