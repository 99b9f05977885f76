"""How far an optimizer moves a parameter whose gradient is 1 in every step.

For SGD every step's displacement is a fixed linear combination of the gradients so far, so that the whole
displacement is a weighted sum of them; this is the sum of the weights, ||a||_1 times the learning rate in
FedNova's terms (Wang et al. 2020, arXiv 2007.07481, section 3).
"""

import torch


def is_linear(optimizer: torch.optim.Optimizer) -> bool:
    """Whether steps are fixed linear combinations of the gradients.

    So are those of torch's SGD, and of a class that sets `is_linear`, with torch SGD's `momentum` and `nesterov` in its groups.
    """
    return type(optimizer) is torch.optim.SGD or bool(getattr(optimizer, "is_linear", False))


def unit_displacement(optimizer: torch.optim.Optimizer, num_steps: int) -> float | None:
    """lr x num_steps for plain SGD, more with momentum; None for optimizers that rescale gradients, or not all alike.

    >>> parameter = torch.nn.Parameter(torch.zeros(1))
    >>> unit_displacement(torch.optim.SGD([parameter], lr=0.5), 4)
    2.0
    >>> unit_displacement(torch.optim.SGD([parameter], lr=1.0, momentum=0.5), 2)  # 1, then 1 + 0.5
    2.5
    """
    if not is_linear(optimizer):
        return None
    group = optimizer.param_groups[0]
    if any(other["lr"] != group["lr"] for other in optimizer.param_groups):
        return None
    momentum, velocity, total = group["momentum"], 0.0, 0.0
    for _ in range(num_steps):
        velocity = momentum * velocity + 1
        total += 1 + momentum * velocity if group["nesterov"] else velocity
    return float(group["lr"]) * total
