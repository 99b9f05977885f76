"""A strategy is four answers: who is sampled, what a client minimises, how replies weigh, where the server moves.

Where the server moves is a target, the mean of the clients' models for most strategies.  A server optimiser
(`strategies.server_optim`) may take `served - target` as a gradient instead of going there.

It is a Flower `Strategy`, so it also runs in a ServerApp of your own; the rest of Flower's interface is
answered here once.

[Note: four kinds of state] The *served* model is what clients receive next (the arrays that
`aggregate_train` returns).  The *evaluated* model is what is tested and kept at the end; it differs from
the served one for FedDyn only.  The *strategy state* is the server's memory (`state_dict`).  The *client
state* is the client's (`fedsign.objectives`), and stays there.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy as FlowerStrategy
from pydantic import Field
from torch import nn

from fedsign.aggregation import WeightedMean
from fedsign.errors import ConfigError, RoundError
from fedsign.flower import wire
from fedsign.flower.array import to_record, to_tensors
from fedsign.parts import MeanOfParts
from fedsign.privacy.central import Central
from fedsign.privacy.local import LocalPrivacy
from fedsign.privacy.mechanism import CentralPrivacy
from fedsign.records import CohortRequest, Failure, ObjectiveSpec, ReplyStack, Role, Tensors, TrainReply, one_by_one
from fedsign.seeding import Purpose, generator
from strategies.server_optim.base import ServerOptimizer

Weighting = Literal["uniform", "examples"]
Weights = tuple[Annotated[float, Field(gt=0)], ...]
SEED_KEY, COHORT_KEY = "seed", "cohort-size"

_OPTIMIZER, _PRIVACY = "server_optimizer/", "privacy/"  # before the names of their tensors in a checkpoint

_log = logging.getLogger("fedsign")


@dataclass(frozen=True, kw_only=True, slots=True)
class Aggregate:
    """What a round brought; a server's move reads nothing else."""

    round: int
    served: Tensors  # theta_t, which the clients received
    mean: Tensors  # of the clients' models, by weight
    extra: Tensors  # plain mean of what came besides the models; empty if nothing did
    roles: Mapping[str, Role]
    num_replies: int  # that the mean is of: with central privacy the cohort's size, whoever replied
    num_clients: int  # of the population
    num_sent: Mapping[str, int]  # how many replies hold each tensor: all, unless clients train parts of the model
    weight_sent: Mapping[str, float]  # the sum of their weights

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters that were trained by somebody; the others stay as served."""
        return [name for name, role in self.roles.items() if role is Role.PARAMETER and self.num_sent[name]]


class Strategy(FlowerStrategy):
    """FedAvg's answers; subclasses give their own.

    Used outside `simulations`, it samples all nodes with seed 0 unless the train config says otherwise
    (keys `seed` and `cohort-size`).
    """

    takes_parts: ClassVar[bool] = True  # whether it can do with replies that hold a part of the model

    def __init__(self, *, weighting: Weighting = "uniform", weights: Weights = ()) -> None:
        self.weighting = weighting
        self.weights = weights  # of clients in their order, instead of `weighting`
        self.server_optimizer: ServerOptimizer | None = None  # set by the program
        self.privacy: CentralPrivacy | LocalPrivacy | None = None  # likewise
        self.gets_parts = False  # likewise: replies may hold a part of the model
        self.num_clients = 0  # of the population; known from the first round on
        self._served: Tensors = {}
        self.evaluated_model: Tensors | None = None  # after the last round; None where it is the served one

    # The four answers

    def sample(self, round: int, clients: Sequence[int], cohort_size: int, rng: np.random.Generator) -> list[int]:
        """Who takes part: `cohort_size` of `clients` without replacement, ascending."""
        drawn = rng.choice(len(clients), size=cohort_size, replace=False)
        return sorted(clients[index] for index in drawn)

    def objective(self, round: int) -> ObjectiveSpec:
        """What a client minimises: the task's loss alone."""
        return ObjectiveSpec()

    def weight(self, reply: TrainReply) -> float:
        """A reply's weight in the mean: 1, the client's number of samples, or its own of `weights`."""
        if self.weights:
            return self.weights[reply.partition]
        match self.weighting:
            case "uniform":
                return 1.0
            case "examples":
                return float(reply.num_examples)
            case _:
                raise ValueError(f"weighting={self.weighting!r}; expected uniform or examples.")

    def move(self, round: Aggregate) -> Tensors:
        """The target: the model to serve next, unless a server optimiser goes its own way towards it."""
        return round.mean

    def evaluated(self, mean: Tensors) -> Tensors | None:
        """The model to test and keep, where that is not the served one."""
        return None

    # Rarer questions

    def shared(self) -> Tensors:
        """What the clients get besides the model: tensors named and shaped like parameters."""
        return {}

    @classmethod
    def adapt_model(cls, model: nn.Module, settings: Mapping[str, Any]) -> None:
        """Change the architecture, in every process that makes the model; without new parameters."""

    # State

    def state_dict(self) -> Tensors:
        """The server's memory, to be checkpointed."""
        return {}

    def load_state_dict(self, state: Tensors) -> None:
        """Take the memory back."""

    def memory(self) -> Tensors:
        """`state_dict`, the server optimiser's and that of privacy, as one."""
        memory = dict(self.state_dict())
        for prefix, part in self._parts():
            memory |= {prefix + name: tensor for name, tensor in part.state_dict().items()}
        return memory

    def load_memory(self, memory: Tensors) -> None:
        """Take `memory` back."""
        for prefix, part in self._parts():
            part.load_state_dict(
                {name.removeprefix(prefix): memory[name] for name in memory if name.startswith(prefix)}
            )
        self.load_state_dict({name: memory[name] for name in memory if not name.startswith((_OPTIMIZER, _PRIVACY))})

    def _parts(self) -> Iterator[tuple[str, ServerOptimizer | Central]]:
        """What has a memory of its own, with the prefix of its names."""
        if self.server_optimizer is not None:
            yield _OPTIMIZER, self.server_optimizer
        if isinstance(self.privacy, CentralPrivacy):
            yield _PRIVACY, self.privacy.rule

    # A round

    def request(
        self, round: int, served: Tensors, clients: Sequence[int], *, cohort_size: int, seed: int
    ) -> CohortRequest:
        """Who is asked for what."""
        self.num_clients, self._served = len(clients), served
        if self.weights and len(self.weights) != len(clients):
            raise ConfigError(
                f"strategy.weights with {len(self.weights)} numbers was given for {len(clients)} clients; expected is one for each."
            )
        secret = self.privacy.sampler(round) if isinstance(self.privacy, CentralPrivacy) else None
        rng = generator(seed, Purpose.SAMPLING, round=round) if secret is None else secret
        cohort = [int(client) for client in self.sample(round, clients, cohort_size, rng)]
        return CohortRequest(
            round=round, cohort=cohort, tensors=served, objective=self.objective(round), shared=self.shared()
        )

    def aggregate(self, round: int, replies: Iterable[TrainReply | ReplyStack]) -> Tensors | None:
        """Mean of the replies as they come, then the server's move; None without replies.

        Raises:
            RoundError: a weight is no number above 0, or only some replies carry what travels besides.
        """
        aggregate = (
            self._private_mean(round, self.privacy, replies)
            if isinstance(self.privacy, CentralPrivacy)
            else self._mean(round, replies)
        )
        if aggregate is None:
            return None
        self.evaluated_model = self.evaluated(aggregate.mean)
        target = self.move(aggregate)
        if self.server_optimizer is not None:
            stepped = self.server_optimizer.step(self._served, target, aggregate.parameters)
            target = {**target, **stepped}
        unsent = {name: self._served[name] for name, num in aggregate.num_sent.items() if not num}
        return {**target, **unsent} if unsent else target

    def _mean(self, round: int, replies: Iterable[TrainReply | ReplyStack]) -> Aggregate | None:
        """The replies by their weights."""
        if self.gets_parts:
            return self._mean_of_parts(round, one_by_one(replies))
        total, extra = WeightedMean(), WeightedMean()
        if isinstance(self.privacy, LocalPrivacy):
            replies = self.privacy.seen(replies)
        roles: Mapping[str, Role] = {}
        for reply in replies:
            roles = reply.roles
            if isinstance(reply, ReplyStack):
                total.add_stack(reply.tensors, self._weights(reply))
                extra.add_stack(reply.extra, [1.0] * len(reply) if reply.extra else [])
            else:
                total.add(reply.tensors, self._checked_weight(reply))
                if reply.extra:
                    extra.add(reply.extra, 1.0)
        if not total.count:
            return None
        return Aggregate(
            round=round,
            served=self._served,
            mean=keep_counters(total.result(), self._served),
            extra=_mean_besides(extra, total.count),
            roles=roles,
            num_replies=total.count,
            num_clients=self.num_clients,
            num_sent=dict.fromkeys(roles, total.count),
            weight_sent=dict.fromkeys(roles, total.total_weight),
        )

    def _mean_of_parts(self, round: int, replies: Iterable[TrainReply | Failure]) -> Aggregate | None:
        """Each tensor over those who sent it, by their weights; what nobody sent as it was served."""
        total, extra = MeanOfParts(), WeightedMean()
        roles: Mapping[str, Role] = {}
        for reply in replies:
            if isinstance(reply, TrainReply):
                roles = reply.roles
                total.add(reply.tensors, self._checked_weight(reply))
                if reply.extra:
                    extra.add(reply.extra, 1.0)
        if not total.count:
            return None
        return Aggregate(
            round=round,
            served=self._served,
            mean=keep_counters(total.result(self._served), self._served),
            extra=_mean_besides(extra, total.count),
            roles=roles,
            num_replies=total.count,
            num_clients=self.num_clients,
            num_sent=total.num_sent(roles),
            weight_sent=total.weight_sent(roles),
        )

    def _private_mean(
        self, round: int, privacy: CentralPrivacy, replies: Iterable[TrainReply | ReplyStack]
    ) -> Aggregate | None:
        """Clipped one by one, added up and covered with noise: nothing else of them is looked at."""
        released = privacy.gather(round, self._served, one_by_one(replies))
        if released is None:
            return None
        return Aggregate(
            round=round,
            served=self._served,
            mean=released.mean,
            extra=released.extra,
            roles=released.roles,
            num_replies=privacy.cohort_size,
            num_clients=self.num_clients,
            num_sent=dict.fromkeys(released.roles, privacy.cohort_size),
            weight_sent=dict.fromkeys(released.roles, float(privacy.cohort_size)),
        )

    # Flower's interface

    @classmethod
    def needs_messages(cls) -> bool:
        """Whether a subclass has its own way with Flower's messages, so that a round has to be made of them."""
        mine = (cls.configure_train, cls.aggregate_train)
        return mine != (Strategy.configure_train, Strategy.aggregate_train)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One train message per sampled node."""
        nodes = grid.get_node_ids()
        clients = nodes if isinstance(nodes, range) else sorted(nodes)  # a million nodes are not listed
        cohort_size = int(cast(int, config.get(COHORT_KEY, len(clients))))
        seed = int(cast(int, config.get(SEED_KEY, 0)))
        request = self.request(server_round, to_tensors(arrays), clients, cohort_size=cohort_size, seed=seed)
        spec = wire.objective_entry(request.objective)
        entries = ConfigRecord({**config, wire.ROUND_KEY: server_round, wire.OBJECTIVE_KEY: spec})
        content = RecordDict({wire.ARRAYS: arrays, wire.CONFIG: entries})
        if request.shared:
            content[wire.BESIDES] = to_record(request.shared)
        return [Message(content, node_id, MessageType.TRAIN) for node_id in request.cohort]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """`aggregate` of the messages that are replies; (None, None) without any."""
        model = self.aggregate(server_round, _unpacked(replies))
        return None if model is None else to_record(model), None

    def _weights(self, stack: ReplyStack) -> list[float]:
        is_uniform = self.weighting == "uniform" and not self.weights
        if type(self).weight is Strategy.weight and is_uniform:  # nobody is asked one by one
            return [1.0] * len(stack)
        return [self._checked_weight(reply) for reply in stack.replies()]

    def _checked_weight(self, reply: TrainReply) -> float:
        weight = self.weight(reply)
        if not 0 < weight < float("inf"):
            raise RoundError(
                f"{type(self).__name__}.weight gave {weight} for client {reply.partition}; expected is a finite number above 0."
            )
        return weight

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """No evaluation at the clients: the server has test samples."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Nothing to aggregate."""
        return None

    def summary(self) -> None:
        """One line for Flower's log."""
        _log.info("%s, %s weights", type(self).__name__, self.weighting)


def _unpacked(messages: Iterable[Message]) -> Iterator[TrainReply]:
    for message in messages:
        if message.has_error():
            _log.warning("node %s failed: %s", message.metadata.src_node_id, message.error.reason)
        else:
            yield wire.unpack_reply(message)


def _mean_besides(extra: WeightedMean, num_replies: int) -> Tensors:
    """The mean of what came besides the models; nothing if nothing did.

    Raises:
        RoundError: it came from some of the clients only.
    """
    if extra.count not in (0, num_replies):
        raise RoundError(
            f"{extra.count} of {num_replies} replies carry tensors besides the model; expected are all or none."
        )
    return extra.result() if extra.count else {}


def keep_counters(mean: Tensors, served: Tensors) -> Tensors:
    """The mean with the served model's integer tensors: a counter has no mean."""
    return {name: tensor if served[name].is_floating_point() else served[name] for name, tensor in mean.items()}
