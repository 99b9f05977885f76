"""Residual networks for small images.

Paper: He et al. 2016 (arXiv 1512.03385).  `resnet20` is the CIFAR network of section 4.2: 6n + 2 layers with n = 3,
widths 16, 32, 64, and parameter-free shortcuts (option A: every second pixel, new channels zero); 0.27 M parameters.
`resnet18` is torchvision's with a stem for small images, as is usual for CIFAR: conv3x3 of stride 1 instead of conv7x7
of stride 2, and no maxpool.
"""

from pathlib import Path

from torch import Tensor, nn
from torch.nn import functional

from fedsign.models.head import ProjectionDim, head
from fedsign.models.images import image_layers
from fedsign.models.initial import he_normal
from fedsign.models.weights import load_weights
from fedsign.torchvision_shim import torchvision


class _Block(nn.Module):
    """conv - BatchNorm - ReLU - conv - BatchNorm, plus the shortcut, then ReLU."""

    def __init__(self, width_in: int, width_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width_out, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width_out)
        self.conv2 = nn.Conv2d(width_out, width_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width_out)
        self._stride = stride
        self._num_new = width_out - width_in

    def forward(self, x: Tensor) -> Tensor:
        """[n, width_in, h, w] -> [n, width_out, h / stride, w / stride]."""
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        shortcut = x[..., :: self._stride, :: self._stride]
        before = self._num_new // 2
        # pad() counts from the last dimension: W, H, then channels
        shortcut = functional.pad(shortcut, (0, 0, 0, 0, before, self._num_new - before))
        return functional.relu(y + shortcut)


def resnet20(input_shape: tuple[int, ...], num_outputs: int, *, projection_dim: ProjectionDim = 0) -> nn.Module:
    """conv3x3, three stages of three blocks, global average pooling, the classifier; 8x8 or larger."""
    (channels, _, _), layers = image_layers(input_shape, model="resnet20", smallest=8)
    layers += [nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    width_in = 16
    for width_out in (16, 32, 64):
        for _ in range(3):
            layers.append(_Block(width_in, width_out, stride=width_out // width_in))
            width_in = width_out
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*layers, *head(width_in, num_outputs, projection_dim))
    he_normal(model)
    return model


def resnet18(
    input_shape: tuple[int, ...], num_outputs: int, *, projection_dim: ProjectionDim = 0, weights: str = ""
) -> nn.Module:
    """torchvision's ResNet-18 with a stem for small images; 8x8 or larger.

    `weights` is a local file with torchvision's ResNet-18 (.safetensors, or a state_dict from torch.save).  conv1 and
    the classifier keep their random initialization if their shapes differ.  Nothing is downloaded.

    Raises:
        ConfigError: the samples are not images, or the file is missing or holds another network.
    """
    (channels, _, _), layers = image_layers(input_shape, model="resnet18", smallest=8)
    network: nn.Module = torchvision("torchvision.models").resnet18(weights=None)
    conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    # as torchvision initializes the convolution that this one replaces
    he_normal(conv1)
    classifier = head(512, num_outputs, projection_dim)
    network.conv1, network.maxpool = conv1, nn.Identity()
    network.fc = nn.Sequential(*classifier) if projection_dim else classifier[0]
    if weights:
        load_weights(network, Path(weights), may_differ=("conv1.", "fc."))
    return nn.Sequential(*layers, network) if layers else network
