"""What a step of training takes, from shapes alone: weights, gradients, what the optimiser keeps, activations, the peak.

The step is taken on the meta device, where tensors have shapes and no values, and its live bytes are counted
(`fedsign.memory.live`).  The static part is what stays from step to step: the weights, the gradients of those that are trained,
and what the optimizer keeps of each.  Gradients grow in the backward pass while activations go, so that the peak is below the sum of
what each takes at most; where it lies is found and not assumed.

Not in it: what the device's context and libraries take (half a gigabyte on a GPU, or so), and what the allocator cannot use
between its blocks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedsign.errors import ConfigError
from fedsign.memory.live import OTHER, LiveBytes, Peak
from fedsign.memory.methods import Method
from fedsign.memory.places import follow, places_of
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
    Precision,
    galore,
    keep_gradients_in,
    take_step,
    under_kernels,
    warm_up,
)

ACTIVATIONS = "activations"
"""All else that is alive: what the backward pass needs, temporaries, the batch."""

CATEGORIES = (WEIGHTS, STATES, GRADIENTS, ACTIVATIONS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What is trained on what; both are made on the device of the moment, the model in torch's default type, features in the one given."""

    title: str
    make: Callable[[], nn.Module]
    batch: Callable[[torch.dtype], Batch]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """In which types, by which kernels, on how many devices."""

    precision: Precision
    device: Device = "cuda"
    attention: AttentionKind = "fused"
    adam: AdamKind = "fused"
    devices: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Static:
    """What stays from step to step, in bytes, and gradients, which stay for a step."""

    weights: int
    gradients: int
    states: int

    @property
    def total(self) -> int:
        """All three."""
        return self.weights + self.gradients + self.states


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """One method's; `activations` and gradients at their own most, `at_peak` what is there when all is at its most."""

    method: str
    num_parameters: int
    num_trained: int
    static: Static
    activations: int
    peak: Peak
    phases: Mapping[str, int]
    of_devices: tuple[Peak, ...] = field(default=())  # where there are several

    @property
    def largest(self) -> Peak:
        """What has to fit into one device."""
        return max(self.of_devices, key=lambda peak: peak.total_bytes, default=self.peak)

    def as_json(self) -> dict[str, Any]:
        """All of it, for programs."""
        return {
            "method": self.method,
            "num_parameters": self.num_parameters,
            "num_trained": self.num_trained,
            "weights_bytes": self.static.weights,
            "gradients_bytes": self.static.gradients,
            "optimizer_bytes": self.static.states,
            "static_bytes": self.static.total,
            "activations_bytes": self.activations,
            "peak_bytes": self.peak.total_bytes,
            "peak_in": self.peak.phase,
            "at_peak_bytes": dict(self.peak.by_category),
            "peak_of_phases_bytes": dict(self.phases),
            "peak_of_devices_bytes": [peak.total_bytes for peak in self.of_devices],
        }


def estimate(work: Work, method: Method, setting: Setting) -> Estimate:
    """One method's step, on the meta device.

    Raises:
        ConfigError: the method does not fit the model, or the model cannot be played without values.
    """
    precision = setting.precision
    with torch.device("meta"):
        model = work.make().to(precision.weights).train()
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        method.apply(model)
        keep_gradients_in(model, precision.gradients)
        batch = work.batch(precision.weights)
    optimizer = _optimizer(model, method, setting)
    warm_up(model, optimizer)
    live = LiveBytes()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    num_trained = sum(parameter.numel() for parameter in trained)
    static = Static(
        weights=sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())),
        gradients=num_trained * precision.gradients.itemsize,
        states=sum(
            tensor.nbytes for parameter in trained for tensor in _kept_for(optimizer, parameter) if tensor.dim()
        ),
    )
    places = places_of(model, setting.devices)
    for parameter, place in places.items():
        live.name(WEIGHTS, [parameter], place=place)
        live.name(STATES, _kept_for(optimizer, parameter), place=place)
    live.name(WEIGHTS, model.buffers())
    live.name(OTHER, [batch.features, batch.targets])
    follow(model, setting.devices, live)
    under_kernels(model, setting.device, setting.attention)
    try:
        with live:
            take_step(model, batch, optimizer, live)
    except (NotImplementedError, RuntimeError) as error:
        raise ConfigError(
            f"{work.title} cannot be played without values, which is how activations are counted: {_first_line(error)}; models whose "
            "shapes depend on values cannot be estimated."
        ) from error
    for parameter, place in places.items():
        live.name(GRADIENTS, [parameter.grad], place=place)
    several = range(setting.devices) if setting.devices > 1 else ()
    return Estimate(
        method=method.name,
        num_parameters=num_parameters,
        num_trained=num_trained,
        static=static,
        activations=live.most_of(OTHER),
        peak=_renamed(live.peak),
        phases={phase: live.peak_of(phase).total_bytes for phase in (FORWARD, BACKWARD, OPTIMIZER)},
        of_devices=tuple(_renamed(live.peak_of(place=place)) for place in several),
    )


def _kept_for(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> list[Tensor]:
    return [value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, Tensor)]


def _optimizer(model: nn.Module, method: Method, setting: Setting) -> torch.optim.Optimizer:
    """torch's own AdamW where it does more than keep moments."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    precision = setting.precision
    is_plain = not precision.masters and {precision.states, precision.gradients} == {precision.weights}
    if is_plain and method.kind == "galore":
        return galore(model, method.rank)
    if setting.adam == "fused" or method.kind == "galore":
        return Moments(
            trained,
            dtype=precision.states,
            masters=precision.masters,
            projected=method.projected(model),
            rank=method.rank,
        )
    if not is_plain:
        raise ConfigError(
            f"--adamw {setting.adam} was given with types of moments or gradients other than the weights'; torch's AdamW keeps both in "
            "the weights' type: use --adamw fused."
        )
    return torch.optim.AdamW(trained, foreach=setting.adam == "foreach")


def _renamed(peak: Peak) -> Peak:
    found = {ACTIVATIONS if category == OTHER else category: size for category, size in peak.by_category.items()}
    return replace(peak, by_category={category: found.get(category, 0) for category in CATEGORIES})


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
