"""The contexts that objectives read, for a cohort of clients."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from fedsign.objectives.base import LocalContext
from fedsign.records import Tensors

# K = clients in the stack


@dataclass(frozen=True, kw_only=True, slots=True)
class CohortContext:
    """The clients' `LocalContext`s in one.  `received` and `shared` are stacked only if they differ."""

    received: Tensors
    received_is_stacked: bool
    state: Tensors  # [K, ...]
    shared: Tensors
    shared_is_stacked: bool
    unit_displacement: Sequence[float] | None  # [K]
    sizes: Mapping[str, int]

    def first(self, num: int) -> "CohortContext":
        """The context of the first clients."""

        def cut(tensors: Tensors) -> Tensors:
            return {name: tensor[:num] for name, tensor in tensors.items()}

        return replace(
            self,
            received=cut(self.received) if self.received_is_stacked else self.received,
            state=cut(self.state),
            shared=cut(self.shared) if self.shared_is_stacked else self.shared,
            unit_displacement=None if self.unit_displacement is None else self.unit_displacement[:num],
        )

    def joint(self) -> LocalContext:
        """One context for elementwise functions; tensors that differ between clients have a leading axis K."""
        return LocalContext(
            received=self.received, state=self.state, shared=self.shared, unit_displacement=None, sizes=self.sizes
        )

    def mapped(self, function: Callable[..., tuple[Tensor, ...]], *stacked: object) -> tuple[Tensor, ...]:
        """Map `function(context, *slices of stacked)` over the clients with vmap."""
        displacement = None
        if self.unit_displacement is not None:
            # vmap maps tensors only, so each client's number becomes one
            displacement = next(iter(self.received.values())).new_tensor(self.unit_displacement)

        def of_client(received: Tensors, state: Tensors, shared: Tensors, far: Tensor | None, *own: object) -> object:
            number = cast("float | None", far)
            context = LocalContext(
                received=received, state=state, shared=shared, unit_displacement=number, sizes=self.sizes
            )
            return function(context, *own)

        in_dims = (
            0 if self.received_is_stacked else None,
            0,
            0 if self.shared_is_stacked else None,
            None if displacement is None else 0,
            *[0] * len(stacked),
        )
        results = torch.vmap(of_client, in_dims=in_dims)(self.received, self.state, self.shared, displacement, *stacked)
        return cast("tuple[Tensor, ...]", results)


def cohort_context(contexts: Sequence[LocalContext]) -> CohortContext:
    """Combine the contexts of several clients."""
    first = contexts[0]
    others = [context for context in contexts if context is not first]
    # by identity: a round's clients share one converted model, and comparing values would read all of it
    received_differs = any(context.received is not first.received for context in others)
    shared_differs = any(not same_tensors(context.shared, first.shared) for context in others)
    displacements = [context.unit_displacement for context in contexts if context.unit_displacement is not None]
    return CohortContext(
        received=stacked_tensors([context.received for context in contexts])
        if received_differs
        else dict(first.received),
        received_is_stacked=received_differs,
        state=stacked_tensors([context.state for context in contexts]),
        shared=stacked_tensors([context.shared for context in contexts]) if shared_differs else dict(first.shared),
        shared_is_stacked=shared_differs,
        unit_displacement=None if first.unit_displacement is None else displacements,
        sizes=first.sizes,
    )


def stacked_tensors(trees: Sequence[Mapping[str, Tensor]]) -> Tensors:
    """Stack the tensors [...] of K clients as [K, ...]."""
    return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}


def same_tensors(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether these are identical objects, not merely equal tensors."""
    return one is other or (one.keys() == other.keys() and all(one[name] is other[name] for name in one))
