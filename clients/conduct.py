"""How a client behaves around its training, where an experiment says more than "train and reply".

A `Conduct` is client middleware: it fails, lies, or protects what a client sends.  Capabilities provide theirs at the extension
point `client_middleware`, a function `(workload, *, in_process, folder) -> list[Conduct]`, where `folder` is that of the clients'
states.  `ConductedTrainer` puts those of an experiment around any trainer, so that they are the same on both paths, with workers and
on every engine.  Without any, there is no wrapper.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from clients.state.store import ClientStore
from clients.trainer import LocalTrainer
from fedsign.extensions import extensions
from fedsign.records import Failure, ReplyStack, TrainReply, TrainRequest, failure_of
from fedsign.workload import Workload


class Conduct(Protocol):
    """One way to behave, drawn from (seed, purpose, round, partition) where it is random."""

    replaces_others: bool = False  # the conducts before it do not apply to the clients that it concerns

    def concerns(self, request: TrainRequest) -> bool:
        """Whether this client behaves so in this round."""
        ...

    def before(self, request: TrainRequest) -> TrainRequest | Failure:
        """The request that it trains on; a failure is its answer, and it does not train."""
        return request

    def after(self, request: TrainRequest, reply: TrainReply) -> TrainReply | Failure:
        """What becomes of its reply; its state is saved already.  The reply's tensors are not to be changed in place."""
        return reply


class ConductedTrainer:
    """A LocalTrainer whose clients behave; conducts apply in their order."""

    def __init__(self, trainer: LocalTrainer, conducts: Sequence[Conduct]) -> None:
        self._trainer, self._conducts = trainer, conducts

    def train_many(
        self, requests: Iterable[TrainRequest], states: ClientStore
    ) -> Iterator[TrainReply | ReplyStack | Failure]:
        """See LocalTrainer."""
        training: list[TrainRequest] = []
        behaving: dict[int, tuple[TrainRequest, list[Conduct]]] = {}
        for request in requests:
            own: list[Conduct] = []
            for conduct in self._conducts:
                if conduct.concerns(request):
                    own = [conduct] if conduct.replaces_others else [*own, conduct]
            told = _told(request, own)
            if isinstance(told, Failure):
                yield told
                continue
            training.append(told)
            if own:
                behaving[told.partition] = told, own
        for result in self._trainer.train_many(training, states):
            if isinstance(result, ReplyStack):
                yield from self._of_stack(result, behaving)
            elif isinstance(result, Failure) or result.partition not in behaving:
                yield result
            else:
                yield _behaved(result, *behaving[result.partition])

    def _of_stack(
        self, stack: ReplyStack, behaving: dict[int, tuple[TrainRequest, list[Conduct]]]
    ) -> Iterator[TrainReply | ReplyStack | Failure]:
        """The replies that somebody changes one by one, the others as the stack that they are."""
        places = [place for place, partition in enumerate(stack.partitions) if partition in behaving]
        if not places:
            yield stack
            return
        replies = stack.replies()
        for place in places:
            yield _behaved(replies[place], *behaving[stack.partitions[place]])
        if len(places) < len(stack):
            yield stack.without(places)


def conducted(trainer: LocalTrainer, workload: Workload, *, in_process: bool, folder: Path) -> LocalTrainer:
    """The trainer, with its clients' conduct if there is any: what is sent, and then whether it arrives."""
    found = [provide(workload, in_process=in_process, folder=folder) for provide in extensions("client_middleware")]
    conducts = [conduct for each in found for conduct in each]
    return ConductedTrainer(trainer, conducts) if conducts else trainer


def _told(request: TrainRequest, conducts: Sequence[Conduct]) -> TrainRequest | Failure:
    for conduct in conducts:
        result = conduct.before(request)
        if isinstance(result, Failure):
            return result
        request = result
    return request


def _behaved(reply: TrainReply, request: TrainRequest, conducts: Sequence[Conduct]) -> TrainReply | Failure:
    try:
        for conduct in conducts:
            result = conduct.after(request, reply)
            if isinstance(result, Failure):
                return result
            reply = result
    except Exception as error:  # noqa: BLE001 - a client's error is an answer, on every engine
        return failure_of(request.partition, error)
    return reply
