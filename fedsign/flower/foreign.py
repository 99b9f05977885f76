"""What Flower's own strategies keep between rounds: a snapshot of it for a checkpoint, and back.

[Note: memory of foreign strategies] Flower's strategies have no interface for what they keep between rounds, so
the table `MEMORY` names, for every class of Flower's that was looked at, the attributes that a next
round reads (`kept`) and those that it sets anew before it reads them (`renewed`); all others are
settings.  A subclass may keep more, so only exactly these classes are remembered.  A strategy of a
user's own is, if it has `state_dict` and `load_state_dict`, as ours have.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
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


class Form(Enum):
    """What an attribute holds; None is allowed for each."""

    NAMED = "arrays by name"
    LISTED = "a list of arrays"
    RECORD = "an ArrayRecord"
    NUMBER = "a number"


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """The attributes of a class that change from round to round; see the module's note."""

    kept: Mapping[str, Form] = field(default_factory=dict)
    renewed: frozenset[str] = frozenset()


_ADAPTIVE = Memory(kept={"m_t": Form.NAMED, "v_t": Form.NAMED}, renewed=frozenset({"current_arrays"}))
_CLIPPING_NORM = {"clipping_norm": Form.NUMBER}

MEMORY: Mapping[type[Strategy], Memory] = {
    flower.FedAvg: Memory(),
    flower.FedProx: Memory(),
    flower.FedAdam: _ADAPTIVE,
    flower.FedYogi: _ADAPTIVE,
    flower.FedAdagrad: _ADAPTIVE,
    flower.FedAvgM: Memory(kept={"current_arrays": Form.RECORD, "momentum_vector": Form.LISTED}),
    flower.FedMedian: Memory(),
    flower.FedTrimmedAvg: Memory(),
    flower.Krum: Memory(),
    flower.MultiKrum: Memory(),
    flower.Bulyan: Memory(),
    flower.QFedAvg: Memory(renewed=frozenset({"current_arrays"})),
    flower.DifferentialPrivacyServerSideFixedClipping: Memory(renewed=frozenset({"current_arrays"})),
    flower.DifferentialPrivacyClientSideFixedClipping: Memory(),
    flower.DifferentialPrivacyServerSideAdaptiveClipping: Memory(
        kept=_CLIPPING_NORM, renewed=frozenset({"current_arrays"})
    ),
    flower.DifferentialPrivacyClientSideAdaptiveClipping: Memory(kept=_CLIPPING_NORM),
}


@runtime_checkable
class Remembering(Protocol):
    """A strategy that can say what it keeps between rounds."""

    def state_dict(self) -> Tensors:
        """Its memory."""
        ...

    def load_state_dict(self, state: Tensors) -> None:
        """Take the memory back."""
        ...


def layers(strategy: Strategy) -> list[Strategy]:
    """A strategy and those that it wraps, as differential privacy does, from the outside in."""
    found = [strategy]
    while isinstance(inner := getattr(found[-1], "strategy", None), Strategy):
        found.append(inner)
    return found


def is_remembered(strategy: Strategy) -> bool:
    """Whether a run with this strategy can be resumed."""
    if isinstance(strategy, Remembering):
        return True
    known = all(type(layer) in MEMORY for layer in layers(strategy))
    return known and all(getattr(layer, "accountant", None) is None for layer in layers(strategy))


def snapshot(strategy: Strategy) -> Tensors:
    """What a strategy keeps between rounds; empty where that is not known."""
    if isinstance(strategy, Remembering):
        return dict(strategy.state_dict())
    if not is_remembered(strategy):
        return {}
    return {
        f"{depth}.{attribute}{place}": tensor
        for depth, layer in enumerate(layers(strategy))
        for attribute in MEMORY[type(layer)].kept
        for place, tensor in _packed(getattr(layer, attribute)).items()
    }


def restore(strategy: Strategy, state: Tensors) -> None:
    """Give a strategy its memory back, bit for bit.

    Raises:
        ResumeError: what it keeps is not known, or the checkpoint lacks it.
    """
    if isinstance(strategy, Remembering):
        strategy.load_state_dict(state)
        return
    if not is_remembered(strategy):
        raise ResumeError(
            f"{type(strategy).__name__} keeps a memory that is not checkpointed, so this run cannot be resumed; start it "
            "again, or give the class state_dict() and load_state_dict()."
        )
    for depth, layer in enumerate(layers(strategy)):
        for attribute, form in MEMORY[type(layer)].kept.items():
            whole = f"{depth}.{attribute}"
            places = {
                name.removeprefix(whole): tensor
                for name, tensor in state.items()
                if name == whole or name.startswith(whole + "/")
            }
            if not places:
                raise ResumeError(
                    f"the checkpoint lacks '{attribute}' of {type(layer).__name__}, which another version of fedsign did "
                    "not write; start the run again."
                )
            setattr(layer, attribute, _unpacked(form, places))


def _packed(value: Any) -> Tensors:
    """Place -> tensor.  Places are numbered, since safetensors does not keep an order and strategies rely on one."""
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


def _unpacked(form: Form, places: Tensors) -> Any:
    if "" in places and places[""].dim():
        return None
    if form is Form.NUMBER:
        return places[""].item()
    named = {place.split("/", 2)[2]: tensor for place, tensor in sorted(places.items())}
    match form:
        case Form.NAMED:
            return {name: tensor.numpy() for name, tensor in named.items()}
        case Form.LISTED:
            return [tensor.numpy() for tensor in named.values()]
        case Form.RECORD:
            return to_record(named)
        case _:
            raise ValueError(f"form={form!r}; expected is a member of Form.")


def _tensor(array: Any) -> Tensor:
    return torch.from_numpy(np.array(array))  # a copy: of scalars too, and writable
