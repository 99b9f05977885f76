"""How a client behaves around its training, where an experiment says more than "train and reply".

A `Conduct` is one way to behave: to fail, to lie, to protect what it sends.  `ConductedTrainer` puts those of an experiment
around any trainer, so that they are the same on both paths, with workers and on every engine.  What concerns a client in
a round is drawn from (seed, purpose, round, partition) like everything else.  Without any, there is no wrapper.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from clients.privacy import privacy_of
from clients.robustness.attack import attack_of
from clients.robustness.faults import faults_of
from clients.state.store import ClientStore
from clients.trainer import LocalTrainer
from fedsign.records import Failure, ReplyStack, TrainReply, TrainRequest, failure_of
from fedsign.workload import Workload


class Conduct(Protocol):
    """One way to behave."""

    def concerns(self, request: TrainRequest) -> bool:
        """Whether this client behaves so in this round."""
        ...

    def before(self, request: TrainRequest) -> Failure | None:
        """What happens before it trains; a failure is its answer, and it does not train."""
        ...

    def after(self, request: TrainRequest, reply: TrainReply) -> TrainReply | Failure:
        """What becomes of its reply; its state is saved already.  The reply's tensors are not to be changed in place."""
        ...


class ConductedTrainer:
    """A LocalTrainer whose clients behave; conducts apply in their order."""

    def __init__(self, trainer: LocalTrainer, conducts: Sequence[Conduct]) -> None:
        self._trainer, self._conducts = trainer, conducts

    def train_many(
        self, requests: Iterable[TrainRequest], states: ClientStore
    ) -> Iterator[TrainReply | ReplyStack | Failure]:
        """See LocalTrainer."""
        training, behaving = [], {}
        for request in requests:
            own = [conduct for conduct in self._conducts if conduct.concerns(request)]
            failure = next((said for conduct in own if (said := conduct.before(request)) is not None), None)
            if failure is not None:
                yield failure
                continue
            training.append(request)
            if own:
                behaving[request.partition] = request, own
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


def conducts_of(workload: Workload, *, in_process: bool, folder: Path) -> list[Conduct]:
    """The ways to behave that the experiment asks for, in their order: what is sent, and then whether it arrives.

    `folder` is that of the clients' states.
    """
    config = workload.config
    attack = attack_of(config)
    found: tuple[Conduct | None, ...] = (
        privacy_of(config, folder, is_malicious=attack.is_malicious),
        attack if config.get("attack.name", "none") != "none" else None,
        faults_of(config, waits=not in_process),
    )
    return [each for each in found if each is not None]


def conducted(trainer: LocalTrainer, workload: Workload, *, in_process: bool, folder: Path) -> LocalTrainer:
    """The trainer, with its clients' conduct if there is any."""
    conducts = conducts_of(workload, in_process=in_process, folder=folder)
    return ConductedTrainer(trainer, conducts) if conducts else trainer


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
