"""Client middleware: changes to requests and replies around a client's training, such as faults, attacks, or noise.

Capabilities add middleware at the extension point `client_middleware`, a function `(workload, *, in_process, folder) ->
list[ClientMiddleware]`, where `folder` holds the client states.  `MiddlewareTrainer` wraps any trainer, so middleware
behaves the same on both paths, with workers, and on every engine.  Without middleware there is no wrapper.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from clients.state.store import ClientStore
from clients.trainer import LocalTrainer
from fedsign.errors import OtherBuildError
from fedsign.extensions import extensions
from fedsign.records import CohortReply, Failure, Role, TrainReply, TrainRequest, failure_of
from fedsign.workload import Workload


class ClientMiddleware(Protocol):
    """A middleware; its random numbers must depend on (seed, purpose, round, partition) only."""

    replaces_others: bool = False  # whether earlier middleware is skipped for the clients that it concerns

    def concerns(self, request: TrainRequest) -> bool:
        """Whether it applies to this client in this round."""
        ...

    def before(self, request: TrainRequest) -> TrainRequest | Failure:
        """The request to train on; a failure replaces the reply, without training."""
        return request

    def after(self, request: TrainRequest, reply: TrainReply) -> TrainReply | Failure:
        """The reply to send, after the state was saved; the reply's tensors must not be modified in place."""
        return reply


class OwnBuild(ClientMiddleware):
    """Completes requests by the frozen tensors of the client's own build, which are not sent."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def concerns(self, request: TrainRequest) -> bool:
        """Requests that may omit tensors."""
        leaves_out = not request.digests.keys() <= request.tensors.keys()
        return leaves_out and Role.FROZEN in self._workload.roles.values()

    def before(self, request: TrainRequest) -> TrainRequest:
        """The request with the frozen tensors.

        Raises:
            OtherBuildError: one has another digest here.
        """
        own, whole = self._workload.frozen, dict(request.tensors)
        for name in own.keys() & request.digests.keys() - request.tensors.keys():
            whole[name], digest = own[name]
            if digest != request.digests[name]:
                raise OtherBuildError(
                    f"client {request.partition} builds the frozen tensor '{name}' with other values than the server, "
                    "for example from another file of model.start or model.path; it is sent the frozen tensors."
                )
        return replace(request, tensors={name: whole[name] for name in self._workload.roles if name in whole})


Applied = tuple[TrainRequest, list[ClientMiddleware]]  # a client's request and its middleware


class MiddlewareTrainer:
    """A LocalTrainer wrapped in middleware, which is applied in order."""

    def __init__(self, trainer: LocalTrainer, middleware: Sequence[ClientMiddleware]) -> None:
        self._trainer, self._middleware = trainer, middleware

    def train_many(
        self, requests: Iterable[TrainRequest], states: ClientStore
    ) -> Iterator[TrainReply | CohortReply | Failure]:
        """Train the clients, with middleware before and after."""
        training: list[TrainRequest] = []
        applied: dict[int, Applied] = {}
        for request in requests:
            own: list[ClientMiddleware] = []
            for each in self._middleware:
                if each.concerns(request):
                    own = [each] if each.replaces_others else [*own, each]
            changed = _before(request, own)
            if isinstance(changed, Failure):
                yield changed
                continue
            training.append(changed)
            if own:
                applied[changed.partition] = changed, own
        # only after every `before`: the trainer needs all requests at once to form stacks or share them out
        for result in self._trainer.train_many(training, states):
            if isinstance(result, CohortReply):
                yield from self._of_stack(result, applied)
            elif isinstance(result, Failure) or result.partition not in applied:
                yield result
            else:
                yield _after(result, *applied[result.partition])

    def _of_stack(
        self, stack: CohortReply, applied: dict[int, Applied]
    ) -> Iterator[TrainReply | CohortReply | Failure]:
        """Unstack the replies that have middleware; keep the others as a stack."""
        indices = [index for index, partition in enumerate(stack.partitions) if partition in applied]
        if not indices:
            yield stack
            return
        replies = stack.replies()
        for index in indices:
            yield _after(replies[index], *applied[stack.partitions[index]])
        if len(indices) < len(stack):
            yield stack.without(indices)


def with_middleware(trainer: LocalTrainer, workload: Workload, *, in_process: bool, folder: Path) -> LocalTrainer:
    """Wrap a trainer in the experiment's middleware, if there is any."""
    found = [provide(workload, in_process=in_process, folder=folder) for provide in extensions("client_middleware")]
    middleware = [each for provided in found for each in provided]
    wrapped: LocalTrainer = MiddlewareTrainer(trainer, middleware) if middleware else trainer
    # around the others, of which an attack skips some
    return wrapped if in_process else MiddlewareTrainer(wrapped, [OwnBuild(workload)])


def _before(request: TrainRequest, middleware: Sequence[ClientMiddleware]) -> TrainRequest | Failure:
    for each in middleware:
        result = each.before(request)
        if isinstance(result, Failure):
            return result
        request = result
    return request


def _after(reply: TrainReply, request: TrainRequest, middleware: Sequence[ClientMiddleware]) -> TrainReply | Failure:
    try:
        for each in middleware:
            result = each.after(request, reply)
            if isinstance(result, Failure):
                return result
            reply = result
    except Exception as error:  # noqa: BLE001 - a client's error is an answer, on every engine
        return failure_of(request.partition, error)
    return reply
