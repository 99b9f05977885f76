"""Small convolutional networks: one with BatchNorm, and three from federated papers and frameworks.

- `mcmahan_cnn`: McMahan et al. 2017 (arXiv 1602.05629), section 3.  Its 1,663,370 parameters on 28x28x1 with 10 classes
  imply "same" padding.
- `niid_cnn`: the simple-cnn of NIID-Bench (Li et al. 2022, arXiv 2102.02079) and MOON (Li et al. 2021, arXiv
  2103.16257), a LeNet-5 with ReLU and max pooling, without padding.
- `pfl_cnn`: the network of pfl-research's framework comparison on CIFAR-10 (Granqvist et al. 2024, arXiv 2404.06430),
  taken from TensorFlow Federated's examples: 1,626,442 parameters on 32x32x3 with 10 classes, with dropout.

All use torch's default initialization.
"""

from typing import Annotated

from pydantic import Field
from torch import nn

from fedsign.models.head import ProjectionDim, Width, head
from fedsign.models.images import image_layers

Dropout = Annotated[float, Field(ge=0, lt=1)]


def cnn(
    input_shape: tuple[int, ...],
    num_outputs: int,
    *,
    channels: tuple[Width, Width] = (16, 32),
    projection_dim: ProjectionDim = 0,
) -> nn.Module:
    """conv3x3 - BatchNorm - ReLU - maxpool, twice, then a linear layer; 4x4 or larger."""
    (width_in, height, width), layers = image_layers(input_shape, model="cnn", smallest=4)
    for width_out in channels:
        layers += [
            nn.Conv2d(width_in, width_out, 3, padding=1, bias=False),  # BatchNorm would cancel a bias
            nn.BatchNorm2d(width_out),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
        width_in = width_out
    num_features = channels[-1] * (height // 4) * (width // 4)
    return nn.Sequential(*layers, nn.Flatten(), *head(num_features, num_outputs, projection_dim))


def mcmahan_cnn(
    input_shape: tuple[int, ...],
    num_outputs: int,
    *,
    channels: tuple[Width, Width] = (32, 64),
    hidden: Width = 512,
    projection_dim: ProjectionDim = 0,
) -> nn.Module:
    """conv5x5 ("same") - ReLU - maxpool, twice, a hidden layer, the classifier; 4x4 or larger."""
    (width_in, height, width), layers = image_layers(input_shape, model="mcmahan_cnn", smallest=4)
    for width_out in channels:
        layers += [nn.Conv2d(width_in, width_out, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
        width_in = width_out
    num_features = channels[-1] * (height // 4) * (width // 4)
    layers += [nn.Flatten(), nn.Linear(num_features, hidden), nn.ReLU()]
    return nn.Sequential(*layers, *head(hidden, num_outputs, projection_dim))


def niid_cnn(
    input_shape: tuple[int, ...],
    num_outputs: int,
    *,
    channels: tuple[Width, Width] = (6, 16),
    hidden: tuple[Width, Width] = (120, 84),
    projection_dim: ProjectionDim = 0,
) -> nn.Module:
    """conv5x5 - ReLU - maxpool, twice, two hidden layers, the classifier; 16x16 or larger."""
    (width_in, height, width), layers = image_layers(input_shape, model="niid_cnn", smallest=16)
    for width_out in channels:
        layers += [nn.Conv2d(width_in, width_out, 5), nn.ReLU(), nn.MaxPool2d(2)]
        width_in, height, width = width_out, (height - 4) // 2, (width - 4) // 2  # 5x5 without padding, then pooled
    layers.append(nn.Flatten())
    num_features = width_in * height * width
    for each in hidden:
        layers += [nn.Linear(num_features, each), nn.ReLU()]
        num_features = each
    return nn.Sequential(*layers, *head(num_features, num_outputs, projection_dim))


def pfl_cnn(
    input_shape: tuple[int, ...],
    num_outputs: int,
    *,
    channels: tuple[Width, Width] = (32, 64),
    hidden: Width = 128,
    dropout: tuple[Dropout, Dropout] = (0.25, 0.5),
    projection_dim: ProjectionDim = 0,
) -> nn.Module:
    """conv3x3 - ReLU, twice, maxpool, dropout, a hidden layer, dropout, the classifier; 6x6 or larger."""
    (width_in, height, width), layers = image_layers(input_shape, model="pfl_cnn", smallest=6)
    for width_out in channels:
        layers += [nn.Conv2d(width_in, width_out, 3), nn.ReLU()]
        width_in = width_out
    num_features = width_in * ((height - 4) // 2) * ((width - 4) // 2)  # two 3x3 without padding, then pooled
    layers += [nn.MaxPool2d(2), nn.Dropout(dropout[0]), nn.Flatten()]
    layers += [nn.Linear(num_features, hidden), nn.ReLU(), nn.Dropout(dropout[1])]
    return nn.Sequential(*layers, *head(hidden, num_outputs, projection_dim))
