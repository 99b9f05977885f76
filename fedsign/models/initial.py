"""He's initialization for deep networks of ReLU.

Paper: He et al. 2015 (arXiv 1502.01852), eq. 14: std = sqrt(2 / fan_out) keeps the size of gradients from layer to layer.
"""

from torch import nn


def he_normal(model: nn.Module, *, linear_std: float | None = None) -> None:
    """Draw all convolutions anew, biases 0; linear layers too, from N(0, linear_std^2), if it is given.

    The numbers come from torch's global generator, which the program lends (see `fedsign.seeding`).
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
