"""The contract of a server optimizer.

The pseudo-gradient of a round is g = served - target (Reddi et al. 2021, arXiv 2003.00295, with g = -Delta_t);
with target = mean of the clients' models, plain gradient descent of rate 1 is FedAvg.  Parameters only:
BatchNorm's statistics are not optimized, they stay the mean.

Where clients train parts of the model, only parameters that somebody sent are stepped; of the others the memory stays as it
is too.  Nobody sending a tensor is no gradient of zero: that would move the tensor on by its old momentum, away from what all
clients hold, and let the memory fade by a clock that is not its own.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fedsign.records import Tensors


class ServerOptimizer:
    """A rule for one tensor, with `slots` of memory per tensor; all memory starts at `initial`."""

    prefix = "server_optimizer/"  # before the names of its tensors in a checkpoint
    slots: tuple[str, ...] = ()
    initial: float = 0.0

    def __init__(self) -> None:
        self._memory: dict[str, Tensors] = {}

    def update(self, gradient: Tensor, memory: dict[str, Tensor]) -> Tensor:
        """What is added to a parameter; writes the new memory into `memory`."""
        raise NotImplementedError

    def step(self, served: Mapping[str, Tensor], target: Mapping[str, Tensor], names: Iterable[str]) -> Tensors:
        """The next values of the named parameters, in at least float32 and then in their own type."""
        stepped = {}
        for name in names:
            before = served[name].to(torch.promote_types(served[name].dtype, torch.float32))
            if name not in self._memory:
                starts = {slot: self.initial if slot == "second_moment" else 0.0 for slot in self.slots}
                self._memory[name] = {slot: torch.full_like(before, start) for slot, start in starts.items()}
            stepped[name] = (before + self.update(before - target[name], self._memory[name])).to(served[name].dtype)
        return stepped

    def state_dict(self) -> Tensors:
        """All memory, as "<slot>/<parameter>"."""
        return {f"{slot}/{name}": tensor for name, memory in self._memory.items() for slot, tensor in memory.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the memory back."""
        self._memory = {}
        for key, tensor in state.items():
            slot, _, name = key.partition("/")
            self._memory.setdefault(name, {})[slot] = tensor
