"""The workloads' networks in plain PyTorch, for competitors without FedSign's models; FedSign also uses `pfl_cnn`.

Order and shapes of tensors match FedSign's own models, so that all start from the same parameters.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional


def mlp(input_shape: tuple[int, ...], num_outputs: int, *, hidden: Sequence[int] = (64,)) -> nn.Module:
    """Linear layers with ReLU between them."""
    widths = (prod(input_shape), *hidden)
    layers: list[nn.Module] = [nn.Flatten()] if len(input_shape) > 1 else []
    for width_in, width_out in pairwise(widths):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], num_outputs))


def pfl_cnn(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """The CNN of pfl-research's comparison of simulators: 1,626,442 parameters on 32x32x3."""
    channels, height, width = input_shape
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, num_outputs),
    )


class _Block(nn.Module):
    """conv - BatchNorm - ReLU - conv - BatchNorm, plus the shortcut, ReLU; named as in torchvision."""

    def __init__(self, width_in: int, width_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width_out, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width_out)
        self.conv2 = nn.Conv2d(width_out, width_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width_out)
        self.downsample: nn.Module | None = None
        if stride > 1:
            self.downsample = nn.Sequential(
                nn.Conv2d(width_in, width_out, 1, stride=stride, bias=False), nn.BatchNorm2d(width_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        """[n, width_in, h, w] -> [n, width_out, h / stride, w / stride]."""
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet18(nn.Module):
    """He et al. 2016, with a stem for small images: conv3x3 of stride 1, no maxpool."""

    def __init__(self, channels: int, num_outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = nn.Sequential(_Block(64, 64, 1), _Block(64, 64, 1))
        self.layer2 = nn.Sequential(_Block(64, 128, 2), _Block(128, 128, 1))
        self.layer3 = nn.Sequential(_Block(128, 256, 2), _Block(256, 256, 1))
        self.layer4 = nn.Sequential(_Block(256, 512, 2), _Block(512, 512, 1))
        self.fc = nn.Linear(512, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels, h, w] -> [n, num_outputs]."""
        x = functional.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        outputs: Tensor = self.fc(x.mean((2, 3)))
        return outputs


def resnet18(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """ResNet-18 for small images: 11.2 M parameters."""
    return ResNet18(input_shape[0], num_outputs)


class ViT(nn.Module):
    """A vision transformer on patches of 4 x 4, with the mean over patches as its representation."""

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int, *, width: int, depth: int) -> None:
        super().__init__()
        channels, height, side = input_shape
        self.patches = nn.Conv2d(channels, width, 4, stride=4)
        self.positions = nn.Parameter(0.02 * torch.randn(height * side // 16, width))
        self.blocks = nn.ModuleList(_ViTBlock(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels, h, w] -> [n, outputs]."""
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(self.norm(x).mean(1))
        return y


class _ViTBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[n, T, width] -> [n, T, width]; heads of 64."""
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)  # [3, n, heads, T, 64]
        mixed = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2])
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return y


def vit(input_shape: tuple[int, ...], num_outputs: int, *, width: int, depth: int) -> nn.Module:
    """A vision transformer of 12 width^2 parameters a block."""
    return ViT(input_shape, num_outputs, width=width, depth=depth)
