"""VGG for images of 32x32, with or without BatchNorm.

Paper: Simonyan and Zisserman 2015 (arXiv 1409.1556), configurations A (11 layers) and D (16).  VGG8 is the shorter
network of the FedPAN and FedSign authors.  Each step is conv3x3 with bias, optional BatchNorm, and ReLU; "M" is a
maxpool.  Five poolings reduce a 32x32 image to 1x1.

Differs: the paper's head with two layers of 4096 is for 224x224.  This is the head of the FedSign authors' public code,
512 -> 512 -> 512 -> classes with dropout 0.5 after each hidden ReLU; `hidden = []` is the single linear layer of their
FedPAN networks.  Initialization as there and in torchvision: He normal (fan out) for convolutions, N(0, 0.01^2) for
linear layers, biases 0.  With torch's default, the deep networks without BatchNorm do not train.
"""

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field
from torch import nn

from fedsign.models.head import ProjectionDim, Width, head
from fedsign.models.images import image_layers
from fedsign.models.initial import he_normal

Dropout = Annotated[float, Field(ge=0, lt=1)]


def _vgg(name: str, *plan: int | Literal["M"]) -> Callable[..., nn.Module]:
    """Make the factory of a network with these widths and poolings."""

    def build(
        input_shape: tuple[int, ...],
        num_outputs: int,
        *,
        batch_norm: bool = False,
        hidden: tuple[Width, ...] = (512, 512),
        dropout: Dropout = 0.5,
        projection_dim: ProjectionDim = 0,
    ) -> nn.Module:
        (width_in, height, width), layers = image_layers(input_shape, model=name, smallest=32)
        for step in plan:
            if step == "M":
                layers.append(nn.MaxPool2d(2))
                continue
            layers.append(nn.Conv2d(width_in, step, 3, padding=1))
            layers += [nn.BatchNorm2d(step)] if batch_norm else []
            layers.append(nn.ReLU())
            width_in = step
        layers.append(nn.Flatten())
        num_features = width_in * (height // 32) * (width // 32)  # five poolings
        for each in hidden:
            layers += [nn.Linear(num_features, each), nn.ReLU()]
            layers += [nn.Dropout(dropout)] if dropout else []
            num_features = each
        model = nn.Sequential(*layers, *head(num_features, num_outputs, projection_dim))
        he_normal(model, linear_std=0.01)
        return model

    return build


vgg8 = _vgg("vgg8", 64, "M", 128, "M", 256, "M", 512, "M", 512, "M")
vgg11 = _vgg("vgg11", 64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M")
vgg16 = _vgg("vgg16", 64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M")
