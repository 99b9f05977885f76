"""Inputs of a client, for tests of objectives."""

from collections.abc import Mapping

from torch import Tensor

from fedsign.objectives.base import LocalContext


def local(
    received: Mapping[str, Tensor],
    *,
    state: Mapping[str, Tensor] | None = None,
    shared: Mapping[str, Tensor] | None = None,
    unit_displacement: float | None = None,
) -> LocalContext:
    """A context with nothing kept and nothing sent unless said."""
    return LocalContext(
        received=received,
        state=state or {},
        shared=shared or {},
        unit_displacement=unit_displacement,
        sizes={name: tensor.numel() for name, tensor in received.items()},
    )
