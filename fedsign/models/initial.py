"""He initialization for deep ReLU networks.

Paper: He et al. 2015 (arXiv 1502.01852), Eq. 14: std = sqrt(2 / fan_out) preserves the scale of gradients across
layers.
"""

from torch import nn


def he_normal(model: nn.Module, *, linear_std: float | None = None) -> None:
    """Initialize all convolutions, and linear layers from N(0, linear_std^2) if given; biases are 0.

    Draws from torch's global generator, which `fedsign.seeding` seeds.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear) and linear_std is not None:
            nn.init.normal_(module.weight, std=linear_std)
        else:
            continue
        if module.bias is not None:
            nn.init.zeros_(module.bias)
