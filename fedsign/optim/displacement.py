"""How far an optimizer moves a parameter whose gradient is 1 in every step.

With SGD each step is a fixed linear combination of the gradients so far, hence the total displacement is a weighted
sum of them.  `unit_displacement` is the sum of these weights: the learning rate times ||a||_1 in FedNova (Wang et al.
2020, arXiv 2007.07481, section 3).
"""

import torch


def is_linear(optimizer: torch.optim.Optimizer) -> bool:
    """Whether steps are fixed linear combinations of the gradients.

    True for torch's SGD, and for a class that sets `is_linear` and has SGD's `momentum` and `nesterov` in its groups.
    """
    return type(optimizer) is torch.optim.SGD or bool(getattr(optimizer, "is_linear", False))


def unit_displacement(optimizer: torch.optim.Optimizer, num_steps: int) -> float | None:
    """lr x num_steps for plain SGD, more with momentum; None if gradients are rescaled or learning rates differ.

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
    # torch sets the first velocity to the gradient, without dampening: from 0, the recursion gives the same
    momentum, velocity, total = group["momentum"], 0.0, 0.0
    for _ in range(num_steps):
        velocity = momentum * velocity + 1
        # Nesterov steps along g + momentum * velocity, with the velocity already updated
        total += 1 + momentum * velocity if group["nesterov"] else velocity
    return float(group["lr"]) * total
