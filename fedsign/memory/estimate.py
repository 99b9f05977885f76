"""Estimate the memory of a training step from shapes alone: weights, gradients, optimizer state, activations, peak.

The step runs on the meta device, where tensors have shapes but no values, while `fedsign.memory.live` counts the live
bytes.  Gradients grow in the backward pass while activations are freed, so the peak is below the sum of the maxima;
counting finds it instead of assuming where it lies.

[Note: several devices] The model is cut into consecutive stages, as in the naive model parallelism of the LISA paper
(arXiv 2403.17919, section 4.1): one device works at a time.  Blocks are distributed evenly in order; what precedes
them goes to the first device, what follows to the last.  A tensor belongs to the device of the block that runs when
it is created.  After the last block that stays the last device, until the backward pass enters a block of another.

The estimate excludes the device context and libraries (about half a gigabyte on a GPU) and allocator fragmentation.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedsign.errors import ConfigError
from fedsign.memory.live import OTHER, LiveBytes, Peak
from fedsign.memory.methods import Method
from fedsign.memory.step import (
    BACKWARD,
    FORWARD,
    GRADIENTS,
    OPTIMIZER,
    STATES,
    WEIGHTS,
    AdamKind,
    AttentionKind,
    Batch,
    Device,
    Moments,
    galore,
    keep_gradients_in,
    take_step,
    under_kernels,
    warm_up,
)
from fedsign.optim.blocks import find_blocks

ACTIVATIONS = "activations"
"""Everything else: tensors saved for the backward pass, temporaries, the batch."""

CATEGORIES = (WEIGHTS, STATES, GRADIENTS, ACTIVATIONS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """A model and a batch.  Both factories use the current default device; `make` also the default dtype."""

    title: str
    make: Callable[[], nn.Module]
    batch: Callable[[torch.dtype], Batch]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Dtypes, kernels, and the number of devices.

    `masters`: the optimizer updates copies of the trained weights, in the dtype of its moments.
    """

    weights: torch.dtype
    gradients: torch.dtype
    states: torch.dtype
    masters: bool = False
    device: Device = "cuda"
    attention: AttentionKind = "fused"
    adam: AdamKind = "fused"
    devices: int = 1

    @property
    def is_plain(self) -> bool:
        """Whether gradients and moments have the weights' dtype, as in torch's optimizers."""
        return not self.masters and {self.states, self.gradients} == {self.weights}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Bytes of a real step; `static` is what remains after it, except the batch: weights, gradients, moments."""

    static: int = 0
    peak: int = 0
    refused: str = ""  # why it was not measured

    def as_json(self) -> dict[str, Any]:
        """The JSON representation."""
        return (
            {"not_measured": self.refused} if self.refused else {"static_bytes": self.static, "peak_bytes": self.peak}
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """The memory of one method.

    Activations and gradients are their own maxima; `peak` is the composition at the moment of the total's maximum.
    `static_bytes` is the sum of weights, moments, and gradients.
    """

    method: str
    num_parameters: int
    num_trained: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    static_bytes: int
    activations_bytes: int
    peak: Peak
    phases: Mapping[str, int]
    of_devices: tuple[Peak, ...]  # empty for a single device
    fits: bool | None = None  # into the given card, if any
    measured: Measured | None = None  # if a real step was requested

    @property
    def largest(self) -> Peak:
        """The largest peak of any device."""
        return max(self.of_devices, key=lambda peak: peak.total_bytes, default=self.peak)

    def as_json(self) -> dict[str, Any]:
        """The JSON representation."""
        # exact types: `fits` is a bool, which is also an int
        facts = {name: value for name, value in asdict(self).items() if type(value) in (int, str)}
        facts |= {
            "peak_bytes": self.peak.total_bytes,
            "peak_in": self.peak.phase,
            "at_peak_bytes": dict(self.peak.by_category),
            "peak_of_phases_bytes": dict(self.phases),
            "peak_of_devices_bytes": [peak.total_bytes for peak in self.of_devices],
        }
        if self.fits is not None:
            facts["fits"] = self.fits
        if self.measured is not None:
            facts["measured"] = self.measured.as_json()
        return facts


def estimate(work: Work, method: Method, setting: Setting) -> Estimate:
    """Run one step of a method on the meta device.

    Raises:
        ConfigError: the method does not fit the model, or the model's shapes depend on values.
    """
    with torch.device("meta"):
        model = work.make().to(setting.weights).train()
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        method.apply(model)
        keep_gradients_in(model, setting.gradients)
        batch = work.batch(setting.weights)
    optimizer = _optimizer(model, method, setting)
    warm_up(model, optimizer)  # allocates the moments, which must not appear as new in the counted step
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    num_trained = sum(parameter.numel() for parameter in trained)
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    gradients = num_trained * setting.gradients.itemsize
    # without scalars, which are step counts
    states = sum(tensor.nbytes for parameter in trained for tensor in _kept_for(optimizer, parameter) if tensor.dim())
    live = LiveBytes()
    device_of = _placed(model, setting.devices, live)
    for parameter, device in device_of.items():
        live.name(WEIGHTS, [parameter], device=device)
        live.name(STATES, _kept_for(optimizer, parameter), device=device)
    live.name(WEIGHTS, model.buffers())
    # named although it is the default: only named storages count if they existed before the block
    live.name(OTHER, [batch.features, batch.targets])
    under_kernels(model, setting.device, setting.attention)
    try:
        with live:
            take_step(model, batch, optimizer, live)
    except (NotImplementedError, RuntimeError) as error:
        raise ConfigError(
            f"{work.title} cannot be run without values, which is how activations are counted: "
            f"{_first_line(error)}; "
            "models whose shapes depend on values cannot be estimated."
        ) from error
    for parameter, device in device_of.items():
        # afterwards: a name holds for a storage's whole life
        live.name(GRADIENTS, [parameter.grad], device=device)
    several = range(setting.devices) if setting.devices > 1 else ()
    return Estimate(
        method=method.name,
        num_parameters=num_parameters,
        num_trained=num_trained,
        weights_bytes=weights,
        gradients_bytes=gradients,
        optimizer_bytes=states,
        static_bytes=weights + gradients + states,
        activations_bytes=live.most_of(OTHER),
        peak=_renamed(live.peak),
        phases={phase: live.peak_of(phase).total_bytes for phase in (FORWARD, BACKWARD, OPTIMIZER)},
        of_devices=tuple(_renamed(live.peak_of(device=device)) for device in several),
    )


def _placed(model: nn.Module, devices: int, live: LiveBytes) -> dict[nn.Parameter, int]:
    """Map each parameter to its device; hooks on the blocks update `live.device`.  See [Note: several devices].

    Raises:
        ConfigError: there are more devices than blocks.
    """
    if devices == 1:
        return dict.fromkeys(model.parameters(), 0)
    blocks = list(find_blocks(model).values())
    if devices > len(blocks):
        raise ConfigError(
            f"--devices {devices} was given, but the model has {len(blocks)} blocks, each of which lies on one device; "
            f"expected at most {len(blocks)}."
        )
    of_block: dict[nn.Parameter, int] = {}
    for index, block in enumerate(blocks):
        device = index * devices // len(blocks)
        of_block |= dict.fromkeys(block.parameters(), device)
        block.register_forward_pre_hook(_turn_to(live, device))
        # the backward pass returns to the earlier devices
        block.register_full_backward_pre_hook(_turn_to(live, device))
    device_of, last = {}, 0
    # Parameters outside the blocks: device 0 until a block of a later device was seen, then the last device.
    for parameter in model.parameters():
        last = max(last, of_block.get(parameter, 0))
        device_of[parameter] = of_block.get(parameter, devices - 1 if last else 0)
    return device_of


def _turn_to(live: LiveBytes, device: int) -> Any:
    def turn(*_: object) -> None:
        live.device = device

    return turn


def _kept_for(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> list[Tensor]:
    return [value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, Tensor)]


def _optimizer(model: nn.Module, method: Method, setting: Setting) -> torch.optim.Optimizer:
    """The optimizer to simulate; torch's own AdamW where its kernels need temporaries."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if setting.is_plain and method.kind == "galore":
        return galore(model, method.rank)
    if setting.adam == "fused" or method.kind == "galore":
        return Moments(
            trained,
            dtype=setting.states,
            masters=setting.masters,
            projected=method.projected(model),
            rank=method.rank,
        )
    if not setting.is_plain:
        raise ConfigError(
            f"--adamw {setting.adam} was given with types of moments or gradients other than the weights'; "
            "torch's AdamW keeps both in the weights' type: use --adamw fused."
        )
    # a real one, since foreach and the loop allocate temporaries that have to be counted
    return torch.optim.AdamW(trained, foreach=setting.adam == "foreach")


def _renamed(peak: Peak) -> Peak:
    by_category = {ACTIVATIONS if category == OTHER else category: size for category, size in peak.by_category.items()}
    return replace(peak, by_category={category: by_category.get(category, 0) for category in CATEGORIES})


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
