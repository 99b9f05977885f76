"""FedPAN's position-aware neurons: a fixed encoding marks each neuron's position in its layer.

Paper: Li et al. 2022, "Federated Learning with Position-Aware Neurons" (arXiv 2203.14666).  A plain network computes
the same function after the neurons of a hidden layer are permuted, so the order may drift apart between clients, and
averaging then mixes unrelated neurons.  The encoding breaks this symmetry.  For channel j of J, before the ReLU,

    e_j = sin(2 pi T j / J),    add: h_j + A e_j,    mul: h_j (1 + A e_j),     j = 0 .. J - 1 (as in the authors' code).

T -> period, A -> amplitude.  The authors' (T, A): add (1, 0.15), (4, 0.25), (8, 0.5); mul (1, 0.05), (4, 0.1),
(8, 0.15).  The encoding is 0 for j = 0 and wherever 2 T j / J is an integer, so T close to J / 2 leaves nothing.

Placement: after every Conv2d and every Linear except the classifier, or after a BatchNorm of the same width that
follows it, since BatchNorm would remove a constant.  As in the authors' ResNet, the second convolution of a block and a
convolution in the shortcut are marked before the sum.

Differs: the authors' ResNet skips the very first convolution, their VGG does not; here no layer is skipped.
"""

from dataclasses import dataclass
from itertools import pairwise
from math import pi
from typing import Literal

import torch
from torch import Tensor, nn

from fedsign.errors import ConfigError
from fedsign.models.features import classifier_of

Mode = Literal["add", "mul"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionEncoding:
    """A forward hook that encodes positions in a layer's output; models with it can be copied and pickled."""

    mode: Mode
    amplitude: float
    period: float
    # from the end, since a Linear's input may have any number of leading dimensions
    dim: int  # of the channels, counted from the end

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """The encoded output, of the same shape."""
        num_channels = output.shape[self.dim]
        mark = self.amplitude * encoding(num_channels, self.period, device=output.device).to(output.dtype)
        mark = mark.view(num_channels, *[1] * (-self.dim - 1))  # [C, 1, 1] behind a Conv2d
        match self.mode:
            case "add":
                return output + mark
            case "mul":
                return output * (1 + mark)
            case _:
                raise ConfigError(f"mode='{self.mode}' was given; expected add or mul.")


def encoding(num_channels: int, period: float, *, device: torch.device | None = None) -> Tensor:
    """e_j for all channels, [num_channels], in float64.

    >>> encoding(4, 1.0).round(decimals=6).abs().tolist()
    [0.0, 1.0, 0.0, 1.0]
    """
    j = torch.arange(num_channels, dtype=torch.float64, device=device)
    return torch.sin(2 * pi * period * j / num_channels)


def attach(model: nn.Module, *, mode: Mode, amplitude: float, period: float) -> None:
    """Make a model's neurons position-aware; amplitude 0 leaves it bitwise unchanged.

    Adds no parameters, buffers, or names to the state_dict.

    Raises:
        ConfigError: there is no hidden layer or no classifier, or the order of the layers is ambiguous.
    """
    if amplitude == 0:
        return
    modules = _encoded_modules(model)
    if not modules:
        raise ConfigError(
            f"the model ({type(model).__name__}) has no convolution and no hidden linear layer, "
            "so there is nothing that "
            "position-aware neurons could mark; choose a model with hidden layers, or amplitude=0."
        )
    for module, dim in modules:
        module.register_forward_hook(PositionEncoding(mode=mode, amplitude=amplitude, period=period, dim=dim))


def _encoded_modules(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """The modules to encode, with the dimension of their channels."""
    classifier = classifier_of(model)
    # in order of registration, the only order that is known without a forward pass; _check_order guards it
    leaves = [module for module in model.modules() if next(module.children(), None) is None]
    modules: list[tuple[nn.Module, int]] = []
    for module, following in pairwise([*leaves, None]):
        if module is classifier or not isinstance(module, nn.Conv2d | nn.Linear):
            continue
        marked = following if following is not None and _normalizes(module, following) else module
        modules.append((marked, -3 if isinstance(module, nn.Conv2d) else -1))
    _check_order(model, {module for module, _ in modules})
    return modules


def _normalizes(layer: nn.Module, following: nn.Module) -> bool:
    match layer, following:
        case nn.Conv2d(), nn.BatchNorm2d():
            return layer.out_channels == following.num_features
        case nn.Linear(), nn.BatchNorm1d():
            return layer.out_features == following.num_features
        case _:
            return False


def _check_order(model: nn.Module, marked: set[nn.Module]) -> None:
    """Refuse registration orders such as conv1, conv2, bn1, bn2: only `forward` shows which BatchNorm follows which."""
    for name, parent in model.named_modules():
        bare = None
        for child_name, child in parent.named_children():
            if isinstance(child, nn.Conv2d) and child in marked:
                bare = child
            elif isinstance(child, nn.BatchNorm2d) and child not in marked and bare is not None:
                raise ConfigError(
                    f"the model registers '{f'{name}.{child_name}'.strip('.')}' apart from its convolution, "
                    "so position-aware "
                    "neurons cannot tell the order; assign each BatchNorm2d directly after its Conv2d in __init__."
                )
