"""Small convolutional networks: one with BatchNorm, and the two that federated papers measure on.

`mcmahan_cnn`: McMahan et al. 2017 (arXiv 1602.05629), section 3: 1,663,370 parameters on 28x28x1 with 10 classes,
which fixes the padding to "same".  `niid_cnn`: the simple-cnn of NIID-Bench (Li et al. 2022, arXiv 2102.02079) and
MOON (Li et al. 2021, arXiv 2103.16257), a LeNet-5 with ReLU and maxpool, without padding.
All three keep torch's default initialisation.
"""

from torch import nn

from fedsign.models.head import ProjectionDim, Width, head
from fedsign.models.images import image_layers


def cnn(
    input_shape: tuple[int, ...],
    num_outputs: int,
    *,
    channels: tuple[Width, Width] = (16, 32),
    projection_dim: ProjectionDim = 0,
) -> nn.Module:
    """conv3x3 - BatchNorm - ReLU - maxpool, twice, then one linear layer; from 4x4 on."""
    (width_in, height, width), layers = image_layers(input_shape, model="cnn", smallest=4)
    for width_out in channels:
        layers += [
            nn.Conv2d(width_in, width_out, 3, padding=1, bias=False),
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
    """conv5x5 ("same") - ReLU - maxpool, twice, one hidden layer, the classifier; from 4x4 on."""
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
    """conv5x5 - ReLU - maxpool, twice, two hidden layers, the classifier; from 16x16 on."""
    (width_in, height, width), layers = image_layers(input_shape, model="niid_cnn", smallest=16)
    for width_out in channels:
        layers += [nn.Conv2d(width_in, width_out, 5), nn.ReLU(), nn.MaxPool2d(2)]
        width_in, height, width = width_out, (height - 4) // 2, (width - 4) // 2
    layers.append(nn.Flatten())
    num_features = width_in * height * width
    for each in hidden:
        layers += [nn.Linear(num_features, each), nn.ReLU()]
        num_features = each
    return nn.Sequential(*layers, *head(num_features, num_outputs, projection_dim))
