"""What travels between server and clients, as frozen values; free of any transport.

[Note: versions of client state] A client may keep state between rounds (FedDyn's h_k).  A *version* is
the round that produced it; 0 is the initial state.  For every partition the server knows the version of
the last reply that it accepted (`TrainRequest.state_version`), and which versions it could ask for after
being killed and resumed from one of its checkpoints (`needed_versions`, the present one included).  A
client starts from exactly the version asked for: a newer one belongs to a reply that was lost, or to a
round that a killed server plays again, and does not count.
"""

import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeVar

from torch import Tensor, nn

from fedsign.errors import ReplyError

Tensors = dict[str, Tensor]
OtherT = TypeVar("OtherT")

LATE = "no reply within server.round_timeout_s"  # a failure's reason, the same on every engine


class Role(StrEnum):
    """How the server treats a tensor of the model."""

    PARAMETER = "parameter"  # trained; averaged, regularized, moved by the server's rule
    BUFFER = "buffer"  # not trained, such as BatchNorm's statistics; averaged, integers kept


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveSpec:
    """The local loss to minimize: a name of the registry or "module:Name", and its settings."""

    name: str = "plain"
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRequest:
    """The server asks one client to train from `tensors`, the served model; `shared` is what comes besides.

    `digests`, if there are any, name all tensors of the model: those that `tensors` lacks the client has kept.
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

    `has_state`: a state of this round's version now lies on the client's disk.  `extra`: what the objective
    sends besides the model, tensors named and shaped like parameters.
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
    """What the server asks of a round's clients; a `TrainRequest` for each of them says the same."""

    round: int
    cohort: Sequence[int]  # partitions
    tensors: Tensors
    objective: ObjectiveSpec
    shared: Tensors = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyStack:
    """The replies of K clients of one round as one value: tensors [K, ...], and lists of K."""

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
        """Each client's own; the tensors share memory with the stack."""
        tensors, extra = _unbound(self.tensors, len(self)), _unbound(self.extra, len(self))
        return [
            TrainReply(
                round=self.round,
                partition=partition,
                tensors=tensors[place],
                roles=self.roles,
                num_examples=self.num_examples[place],
                metrics={name: values[place] for name, values in self.metrics.items()},
                has_state=self.has_state,
                extra=extra[place],
            )
            for place, partition in enumerate(self.partitions)
        ]

    def without(self, places: Collection[int]) -> "ReplyStack":
        """The other clients' replies."""
        kept = [place for place in range(len(self)) if place not in places]
        return replace(
            self,
            partitions=[self.partitions[place] for place in kept],
            tensors={name: tensor[kept] for name, tensor in self.tensors.items()},
            num_examples=[self.num_examples[place] for place in kept],
            metrics={name: [values[place] for place in kept] for name, values in self.metrics.items()},
            extra={name: tensor[kept] for name, tensor in self.extra.items()},
        )


Reply = TrainReply | ReplyStack


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateRequest:
    """The server asks a site to test a model on samples of its own."""

    round: int
    partition: int
    tensors: Tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateReply:
    """A site's figures: the loss and the metrics, of validation samples under `validation_...`."""

    round: int
    partition: int
    name: str
    num_train: int
    num_test: int
    num_validation: int
    figures: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A client that gave no usable reply in a round, and why (one sentence; details may be long)."""

    partition: int
    reason: str
    details: str = ""


def one_by_one(results: Iterable[TrainReply | ReplyStack | OtherT]) -> Iterator[TrainReply | OtherT]:
    """The same results, every client's by itself."""
    for result in results:
        if isinstance(result, ReplyStack):
            yield from result.replies()
        else:
            yield result


def failure_of(partition: int, error: Exception) -> Failure:
    """A client's exception as a failure: one line, and the traceback unless the line says it all."""
    is_refused = isinstance(error, ReplyError)
    reason = " ".join(str(error).split() if is_refused else f"{type(error).__name__}: {error}".split())
    details = "" if is_refused and error.__cause__ is None else "".join(traceback.format_exception(error))
    return Failure(partition=partition, reason=reason, details=details)


def printable(text: str, *, limit: int = 300) -> str:
    """A stranger's words on one line, cut, and without what a terminal would obey."""
    line = "".join(letter if letter.isprintable() else " " for letter in text[: limit + 1])
    return line if len(line) <= limit else f"{line[:limit]}..."


def _unbound(stack: Tensors, num: int) -> list[Tensors]:
    columns = [tensor.unbind() for tensor in stack.values()]
    return [dict(zip(stack, row, strict=True)) for row in zip(*columns, strict=True)] if columns else [{}] * num


def roles_of(model: nn.Module) -> dict[str, Role]:
    """The role of every tensor of a model's state_dict, in its order."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: Role.PARAMETER if name in parameters else Role.BUFFER for name in model.state_dict()}


def tensors_of(model: nn.Module) -> Tensors:
    """A copy of a model's tensors, detached."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
