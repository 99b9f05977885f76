"""A model over several devices, one part behind the other: which tensors lie where, and whose turn it is.

Blocks are shared out evenly in their order; what comes before them lies with the first, what comes after with the last.  One
device works at a time, as in the naive model parallelism of the paper (arXiv 2403.17919, section 4.1).  Where a
tensor of the forward or backward pass is made is the place of the block whose turn it is.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from fedsign.errors import ConfigError
from fedsign.memory.live import LiveBytes
from fedsign.optim.blocks import find_blocks


def places_of(model: nn.Module, devices: int) -> dict[nn.Parameter, int]:
    """Parameter -> number of its device.

    Raises:
        ConfigError: there are more devices than blocks.
    """
    if devices == 1:
        return dict.fromkeys(model.parameters(), 0)
    blocks = list(find_blocks(model).values())
    if devices > len(blocks):
        raise ConfigError(
            f"--devices {devices} was given, but the model has {len(blocks)} blocks, each of which lies on one device; expected is "
            f"at most {len(blocks)}."
        )
    of_block = {parameter: place for place, block in _shared_out(blocks, devices) for parameter in block.parameters()}
    found, last = {}, 0
    for parameter in model.parameters():
        last = max(last, of_block.get(parameter, 0))
        found[parameter] = of_block.get(parameter, devices - 1 if last else 0)
    return found


def follow(model: nn.Module, devices: int, live: LiveBytes) -> None:
    """Tell `live` whose turn it is, in both passes, by hooks on the blocks.

    What comes before the first block is the first device's, and after the last one it stays the last one's, until the backward pass
    has come to a block of another.
    """
    if devices == 1:
        return
    blocks = list(_shared_out(list(find_blocks(model).values()), devices))
    for place, block in blocks:
        block.register_forward_pre_hook(_turn_to(live, place))
        block.register_full_backward_pre_hook(_turn_to(live, place))


def _turn_to(live: LiveBytes, place: int) -> Any:
    def turn(*_: object) -> None:
        live.place = place

    return turn


def _shared_out(blocks: list[nn.Module], devices: int) -> Iterator[tuple[int, nn.Module]]:
    for index, block in enumerate(blocks):
        yield index * devices // len(blocks), block
