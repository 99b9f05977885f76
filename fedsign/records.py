"""Requests and replies between server and clients: frozen values, independent of any transport.

[Note: versions of client state] A client may keep state between rounds (FedDyn's h_k).  A *version* is the round that
produced it; 0 is the initial state.  For every partition the server records the version of the last reply it accepted
(`TrainRequest.state_version`).  It also lists the versions that it may ask for after a crash and resume from one of
its checkpoints (`needed_versions`, the current one included).  A client starts from exactly the requested version.  A
newer state is ignored: its reply was lost, or a resumed server replays that round.
"""

import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeVar

from torch import Tensor, nn

from fedsign.errors import ReplyError, shortage_of

Tensors = dict[str, Tensor]
OtherT = TypeVar("OtherT")

LOST_UPDATES = "lost-updates"  # a metric of replies: share of updates that rounding has lost
LATE = "no reply within server.round_timeout_s"  # reason of a failure, the same on every engine


class Role(StrEnum):
    """How the server treats a tensor of the model."""

    PARAMETER = "parameter"  # trained, averaged, regularized, updated by the server's rule
    FROZEN = "frozen"  # a parameter with requires_grad=False: stays, bit for bit, and is in no reply
    BUFFER = "buffer"  # not trained, such as BatchNorm statistics; averaged, but integers are counters


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveSpec:
    """The local loss: a registered objective or "module:Name", and its settings."""

    name: str = "plain"
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRequest:
    """Asks one client to train from `tensors`, the global model; `shared` holds the auxiliary tensors.

    `digests` names the tensors of the model that may be missing in `tensors`: frozen ones, which the client has in its
    own build, or all, of which it has cached some.
    """

    round: int
    partition: int
    tensors: Tensors
    objective: ObjectiveSpec
    state_version: int
    needed_versions: frozenset[int]
    shared: Tensors = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainReply:
    """A client's trained model; `metrics` are plain numbers.

    `has_state`: the client's disk now holds a state of this round's version.  `extra`: auxiliary tensors of the
    objective, with names and shapes of parameters.
    """

    round: int
    partition: int
    tensors: Tensors
    roles: Mapping[str, Role]
    num_examples: int
    metrics: Mapping[str, float]
    has_state: bool = False
    extra: Tensors = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class CohortRequest:
    """Asks a whole cohort to train; equivalent to one `TrainRequest` per client."""

    round: int
    cohort: Sequence[int]  # partitions
    tensors: Tensors
    objective: ObjectiveSpec
    shared: Tensors = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class CohortReply:
    """Replies of K clients of one round, batched: tensors [K, ...], and lists of length K."""

    round: int
    partitions: Sequence[int]
    tensors: Tensors
    roles: Mapping[str, Role]
    num_examples: Sequence[int]
    metrics: Mapping[str, Sequence[float]]
    has_state: bool = False
    extra: Tensors = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.partitions)

    def replies(self) -> list[TrainReply]:
        """One reply per client; tensors are views into the batch."""
        tensors, extra = _unbound(self.tensors, len(self)), _unbound(self.extra, len(self))
        return [
            TrainReply(
                round=self.round,
                partition=partition,
                tensors=tensors[index],
                roles=self.roles,
                num_examples=self.num_examples[index],
                metrics={name: values[index] for name, values in self.metrics.items()},
                has_state=self.has_state,
                extra=extra[index],
            )
            for index, partition in enumerate(self.partitions)
        ]

    def without(self, positions: Collection[int]) -> "CohortReply":
        """The replies without the clients at these positions."""
        kept = [index for index in range(len(self)) if index not in positions]
        return replace(
            self,
            partitions=[self.partitions[index] for index in kept],
            tensors={name: tensor[kept] for name, tensor in self.tensors.items()},
            num_examples=[self.num_examples[index] for index in kept],
            metrics={name: [values[index] for index in kept] for name, values in self.metrics.items()},
            extra={name: tensor[kept] for name, tensor in self.extra.items()},
        )


Reply = TrainReply | CohortReply


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateRequest:
    """Asks a site to evaluate a model on its own samples."""

    round: int
    partition: int
    tensors: Tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateReply:
    """A site's loss and metrics; those of its validation samples are named `validation_...`."""

    round: int
    partition: int
    name: str
    num_train: int
    num_test: int
    num_validation: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A client without a usable reply in a round: the reason in one sentence, and optional details."""

    partition: int
    reason: str
    details: str = ""


def one_by_one(results: Iterable[TrainReply | CohortReply | OtherT]) -> Iterator[TrainReply | OtherT]:
    """Unbatch: one result per client."""
    for result in results:
        if isinstance(result, CohortReply):
            yield from result.replies()
        else:
            yield result


def failure_of(partition: int, error: Exception) -> Failure:
    """A client's exception as a failure: one line, plus the traceback unless the line is enough."""
    is_refused = isinstance(error, ReplyError)
    shortage = shortage_of(error)
    said = str(shortage or error) if shortage or is_refused else f"{type(error).__name__}: {error}"
    reason = " ".join(said.split())
    details = "" if is_refused and error.__cause__ is None else "".join(traceback.format_exception(error))
    return Failure(partition=partition, reason=reason, details=details)


def printable(text: str, *, limit: int = 300) -> str:
    """Untrusted text on one line, truncated, without control characters that a terminal would interpret."""
    line = "".join(letter if letter.isprintable() else " " for letter in text[: limit + 1])
    return line if len(line) <= limit else f"{line[:limit]}..."


def _unbound(stack: Tensors, num: int) -> list[Tensors]:
    columns = [tensor.unbind() for tensor in stack.values()]
    return [dict(zip(stack, row, strict=True)) for row in zip(*columns, strict=True)] if columns else [{}] * num


def ties_of(model: nn.Module) -> dict[str, str]:
    """Further names of tied tensors in the `state_dict` -> the first one, the only one that is sent and stored."""
    named = {
        **dict(model.named_buffers(remove_duplicate=False)),
        **dict(model.named_parameters(remove_duplicate=False)),
    }
    first: dict[int, str] = {}
    own = {name: id(named[name]) for name in model.state_dict() if name in named}
    return {name: kept for name, key in own.items() if (kept := first.setdefault(key, name)) != name}


def roles_of(model: nn.Module) -> dict[str, Role]:
    """The role of every tensor of the model, tied ones once, in `state_dict` order."""
    trains = {name: parameter.requires_grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    ties, of = ties_of(model), {True: Role.PARAMETER, False: Role.FROZEN, None: Role.BUFFER}
    return {name: of[trains.get(name)] for name in model.state_dict() if name not in ties}


def replied(tensors: Mapping[str, OtherT], roles: Mapping[str, Role]) -> dict[str, OtherT]:
    """Those of a model's tensors that a reply may hold: all but frozen ones."""
    return {name: tensor for name, tensor in tensors.items() if roles.get(name) is not Role.FROZEN}


def tensors_of(model: nn.Module) -> Tensors:
    """A detached copy of a model's tensors, tied ones once."""
    ties = ties_of(model)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items() if name not in ties}
