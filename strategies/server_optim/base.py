"""The base class of server optimizers.

A round's pseudo-gradient is g = served - proposal (Reddi et al. 2021, arXiv 2003.00295, with g = -Delta_t).  If the
proposal is the mean of the clients' models, gradient descent with rate 1 is FedAvg.  Only parameters are optimized;
buffers such as BatchNorm's statistics keep the mean.  Of a complex parameter, each part is optimized by itself, as in
torch's optimizers.

With partial updates only the parameters that some client sent take a step.  The rest keep their optimizer state too:
a missing tensor is not a gradient of zero, which would move it by stale momentum, away from what all clients hold.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fedsign.numerics import as_kind_of, as_real, widened
from fedsign.records import Tensors


class ServerOptimizer:
    """A per-tensor update rule.  `slots` names its state; a second moment starts at `initial`, the rest at 0."""

    prefix = "server_optimizer/"  # of its tensors' names in a checkpoint
    slots: tuple[str, ...] = ()
    initial: float = 0.0

    def __init__(self) -> None:
        self._memory: dict[str, Tensors] = {}

    def update(self, gradient: Tensor, memory: dict[str, Tensor]) -> Tensor:
        """The step to add to a parameter; updates `memory` in place."""
        raise NotImplementedError

    def step(self, served: Mapping[str, Tensor], proposal: Mapping[str, Tensor], names: Iterable[str]) -> Tensors:
        """The next values of the named parameters, in at least float32."""
        stepped = {}
        for name in names:
            # moments of small pseudo-gradients would underflow in half precision
            before = as_real(served[name].to(widened(served[name].dtype)))
            if name not in self._memory:
                # the paper requires v_{-1} >= tau^2
                starts = {slot: self.initial if slot == "second_moment" else 0.0 for slot in self.slots}
                self._memory[name] = {slot: torch.full_like(before, start) for slot, start in starts.items()}
            step = self.update(before - as_real(proposal[name]), self._memory[name])
            stepped[name] = as_kind_of(served[name], before + step)
        return stepped

    def state_dict(self) -> Tensors:
        """All state, as "<slot>/<parameter>"."""
        return {f"{slot}/{name}": tensor for name, memory in self._memory.items() for slot, tensor in memory.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        self._memory = {}
        for key, tensor in state.items():
            slot, _, name = key.partition("/")
            self._memory.setdefault(name, {})[slot] = tensor
