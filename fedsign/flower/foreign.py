"""Checkpoint and restore the state that Flower's own strategies keep between rounds.

[Note: memory of foreign strategies] Flower's strategies have no interface for their state between rounds.  The table
`MEMORY` therefore names, for each of Flower's classes that was reviewed, the attributes that the next round reads.  All
others are settings, except `current_arrays`, which most classes set before they read it.  A subclass may keep more, so
only exactly these classes are supported.  A user's own strategy is, if it has `state_dict` and `load_state_dict`, as
ours have.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from flwr.app import ArrayRecord
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from fedsign.errors import ResumeError
from fedsign.flower.array import to_record, to_tensors
from fedsign.records import Tensors


def _by_name(arrays: Tensors) -> Any:
    return {name: array.numpy() for name, array in arrays.items()}


def _listed(arrays: Tensors) -> Any:
    return [array.numpy() for array in arrays.values()]


# attribute -> how to restore it from arrays; numbers and None are restored as they are
_Kept = Mapping[str, Callable[[Tensors], Any]]
_ADAPTIVE: _Kept = {"m_t": _by_name, "v_t": _by_name}
_CLIPPING_NORM: _Kept = {"clipping_norm": _by_name}

MEMORY: Mapping[type[Strategy], _Kept] = {
    flower.FedAvg: {},
    flower.FedProx: {},
    flower.FedAdam: _ADAPTIVE,
    flower.FedYogi: _ADAPTIVE,
    flower.FedAdagrad: _ADAPTIVE,
    # unlike other classes, it keeps current_arrays from round to round, to measure its pseudo-gradient from them
    flower.FedAvgM: {"current_arrays": to_record, "momentum_vector": _listed},
    flower.FedMedian: {},
    flower.FedTrimmedAvg: {},
    flower.Krum: {},
    flower.MultiKrum: {},
    flower.Bulyan: {},
    flower.QFedAvg: {},
    flower.DifferentialPrivacyServerSideFixedClipping: {},
    flower.DifferentialPrivacyClientSideFixedClipping: {},
    flower.DifferentialPrivacyServerSideAdaptiveClipping: _CLIPPING_NORM,
    flower.DifferentialPrivacyClientSideAdaptiveClipping: _CLIPPING_NORM,
}


@runtime_checkable
class Remembering(Protocol):
    """A strategy that can save and restore its state between rounds."""

    def state_dict(self) -> Tensors:
        """The state."""
        ...

    def load_state_dict(self, state: Tensors) -> None:
        """Restore the state."""
        ...


def layers(strategy: Strategy) -> list[Strategy]:
    """A strategy and those that it wraps (as differential privacy does), outermost first."""
    chain = [strategy]
    while isinstance(inner := getattr(chain[-1], "strategy", None), Strategy):
        chain.append(inner)
    return chain


def is_remembered(strategy: Strategy) -> bool:
    """Whether runs with this strategy can be resumed."""
    if isinstance(strategy, Remembering):
        return True
    known = all(type(layer) in MEMORY for layer in layers(strategy))
    return known and all(getattr(layer, "accountant", None) is None for layer in layers(strategy))


def snapshot(strategy: Strategy) -> Tensors:
    """The state of a strategy between rounds; empty if it is unknown."""
    if isinstance(strategy, Remembering):
        return dict(strategy.state_dict())
    if not is_remembered(strategy):
        return {}
    return {
        f"{depth}.{attribute}{key}": tensor
        for depth, layer in enumerate(layers(strategy))
        for attribute in MEMORY[type(layer)]
        for key, tensor in _packed(getattr(layer, attribute)).items()
    }


def restore(strategy: Strategy, state: Tensors) -> None:
    """Restore a strategy's state, bit for bit.

    Raises:
        ResumeError: the strategy's state is unknown, or missing in the checkpoint.
    """
    if isinstance(strategy, Remembering):
        strategy.load_state_dict(state)
        return
    if not is_remembered(strategy):
        raise ResumeError(
            f"{type(strategy).__name__} keeps a memory that is not checkpointed, so this run cannot be resumed; "
            "start it again, or give the class state_dict() and load_state_dict()."
        )
    for depth, layer in enumerate(layers(strategy)):
        for attribute, given_back in MEMORY[type(layer)].items():
            whole = f"{depth}.{attribute}"
            packed = {
                name.removeprefix(whole): tensor
                for name, tensor in state.items()
                if name == whole or name.startswith(whole + "/")
            }
            if not packed:
                raise ResumeError(
                    f"the checkpoint lacks '{attribute}' of {type(layer).__name__}, which another version of fedsign "
                    "did not write; start the run again."
                )
            setattr(layer, attribute, _unpacked(packed, given_back))


def _packed(value: Any) -> Tensors:
    """Name -> tensor.  Names are numbered, since strategies rely on an order that safetensors does not keep."""
    match value:
        case None:
            return {"": torch.empty(0)}
        case int() | float():
            return {"": torch.tensor(value, dtype=torch.float64)}
        case ArrayRecord():
            named = to_tensors(value)
        case list():
            named = {str(index): _tensor(array) for index, array in enumerate(value)}
        case _:
            named = {name: _tensor(array) for name, array in value.items()}
    return {f"/{index:06d}/{name}": tensor for index, (name, tensor) in enumerate(named.items())}


def _unpacked(packed: Tensors, given_back: Callable[[Tensors], Any]) -> Any:
    if "" in packed:
        return None if packed[""].dim() else packed[""].item()  # None was packed as 1-D, a number as 0-d
    return given_back({key.split("/", 2)[2]: tensor for key, tensor in sorted(packed.items())})


def _tensor(array: Any) -> Tensor:
    return torch.from_numpy(np.array(array))  # copies, so it is writable; also accepts scalars
