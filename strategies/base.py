"""The base class of strategies.

A strategy answers four questions: which clients to sample, what a client minimizes, how much a reply weighs, and
which model the server proposes next.  For most strategies the proposal is the mean of the clients' models.  A server
optimizer (`strategies.server_optim`) may use `served - proposal` as a gradient instead of adopting the proposal.

`Strategy` implements Flower's `Strategy` interface, so it also runs in your own ServerApp.

[Note: four kinds of state] The *served* model is what clients receive next: the arrays that `aggregate_train`
returns.  The *evaluated* model is tested and saved; only FedDyn's differs from the served model.  The *strategy
state* is the server's memory (`state_dict`).  The *client state* (`fedsign.objectives`) never leaves the client.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy as FlowerStrategy
from pydantic import Field
from torch import nn

from fedsign.errors import ConfigError, RoundError
from fedsign.federation.aggregation import Aggregate as Aggregate  # re-exported for custom strategies
from fedsign.federation.aggregation import Aggregator, Weigh, weighted_mean
from fedsign.flower import wire
from fedsign.flower.array import to_record, to_tensors
from fedsign.records import CohortReply, CohortRequest, ObjectiveSpec, Reply, Role, Tensors, TrainReply
from fedsign.seeding import Purpose, generator
from strategies.server_optim.base import ServerOptimizer

Weighting = Literal["uniform", "examples"]
Weights = tuple[Annotated[float, Field(gt=0)], ...]
SEED_KEY, COHORT_KEY = "seed", "cohort-size"

_log = logging.getLogger("fedsign")


class Strategy(FlowerStrategy):
    """FedAvg; subclasses override what differs.

    Outside `simulations` it samples every node, with seed 0, unless the train config sets `seed` and `cohort-size`.
    """

    proposes_update: ClassVar[bool] = True  # traits, see `fedsign.traits.StrategyTraits`
    takes_parts: ClassVar[bool] = True
    search_space: ClassVar[Mapping[str, str] | None] = None  # for the strategy's own settings
    special_case: ClassVar[Mapping[str, Mapping[str, float]] | None] = None
    roles: Mapping[str, Role] = {}  # of the model's tensors; set by `simulations.rounds`, else empty

    def __init__(self, *, weighting: Weighting = "uniform", weights: Weights = ()) -> None:
        self.weighting = weighting
        self.weights = weights  # one per client, overrides `weighting`
        self.server_optimizer: ServerOptimizer | None = None  # set by `simulations.rounds.make_strategy`
        self.aggregator: Aggregator | None = None  # set by a `strategy_transform`; None means the weighted mean
        self.num_clients = 0  # in the population; set in the first round
        self.kept: Tensors = {}  # a subclass's state across rounds
        self._served: Tensors = {}
        self.left_out: list[int] = []  # clients of the latest round whose replies had weight 0
        self.evaluated_model: Tensors | None = None  # of the latest round; None if it is the served model

    # The four questions

    def sample(self, round: int, clients: Sequence[int], cohort_size: int, rng: np.random.Generator) -> list[int]:
        """Draw `cohort_size` of `clients` without replacement; sorted."""
        # indices: `clients` may be a range of a million
        drawn = rng.choice(len(clients), size=cohort_size, replace=False)
        return sorted(clients[index] for index in drawn)

    def objective(self, round: int) -> ObjectiveSpec:
        """The local objective: the task loss alone."""
        return ObjectiveSpec()

    def weight(self, reply: TrainReply) -> float:
        """A reply's weight in the mean: 1, the client's number of samples, or its entry in `weights`.

        A subclass may return 0: the reply is left out of the mean, and its client's state stays as it was.
        """
        if self.weights:
            return self.weights[reply.partition]
        return 1.0 if self.weighting == "uniform" else float(reply.num_examples)

    def server_update(self, aggregate: Aggregate) -> Tensors:
        """The proposed next served model; a server optimizer takes a step toward it instead."""
        return aggregate.mean

    def evaluated(self, mean: Tensors) -> Tensors | None:
        """The model to test and save, if it is not the served one."""
        return None

    # Optional hooks

    def shared(self) -> Tensors:
        """Auxiliary tensors sent along with the model, named and shaped like parameters."""
        return {}

    @classmethod
    def adapt_model(cls, model: nn.Module, settings: Mapping[str, Any]) -> None:
        """Modify the architecture without adding parameters; called in every process that builds the model."""

    @property
    def own_aggregation(self) -> str:
        """The overridden aggregation method, if any; a trait (`fedsign.traits.StrategyTraits`)."""
        names = ("aggregate", "aggregate_train")
        return next((name for name in names if getattr(type(self), name) is not getattr(Strategy, name)), "")

    @property
    def own_update(self) -> str:
        """The overridden method that changes the mean, if any; a trait (`fedsign.traits.StrategyTraits`)."""
        names = ("server_update", "evaluated")
        return next((name for name in names if getattr(type(self), name) is not getattr(Strategy, name)), "")

    @property
    def weights_replies(self) -> bool:
        """Whether replies may have unequal weights; a trait (`fedsign.traits.StrategyTraits`)."""
        return type(self).weight is not Strategy.weight or self.weighting != "uniform" or bool(self.weights)

    # State

    def state_dict(self) -> Tensors:
        """The strategy's state, for checkpoints."""
        return dict(self.kept)

    def load_state_dict(self, state: Tensors) -> None:
        """Restore what `state_dict` returned."""
        self.kept = dict(state)

    def memory(self) -> Tensors:
        """The states of the strategy, its server optimizer, and its aggregator in one mapping."""
        memory = dict(self.state_dict())
        for part in (self.server_optimizer, self.aggregator):
            if part is not None:
                memory |= {part.prefix + name: tensor for name, tensor in part.state_dict().items()}
        return memory

    def load_memory(self, memory: Tensors) -> None:
        """Restore what `memory` returned."""
        own = dict(memory)
        for part in (self.server_optimizer, self.aggregator):
            if part is not None:
                names = [name for name in own if name.startswith(part.prefix)]
                part.load_state_dict({name.removeprefix(part.prefix): own.pop(name) for name in names})
        # what is left has no prefix
        self.load_state_dict(own)

    # A round

    def request(
        self, round: int, served: Tensors, clients: Sequence[int], *, cohort_size: int, seed: int
    ) -> CohortRequest:
        """Sample the round's cohort and assemble what it receives."""
        self.num_clients, self._served = len(clients), served
        if self.weights and len(self.weights) != len(clients):
            raise ConfigError(
                f"strategy.weights with {len(self.weights)} numbers was given for {len(clients)} clients; "
                "expected one for each."
            )
        # central privacy may draw the cohort by a secret: only then does sampling amplify privacy
        rng = None if self.aggregator is None else self.aggregator.sampler(round)
        rng = rng or generator(seed, Purpose.SAMPLING, round=round)
        cohort = [int(client) for client in self.sample(round, clients, cohort_size, rng)]
        return CohortRequest(
            round=round, cohort=cohort, tensors=served, objective=self.objective(round), shared=self.shared()
        )

    def aggregate(self, round: int, replies: Iterable[Reply]) -> Tensors | None:
        """Average the replies as they arrive, then take the server's step; None if there are no replies.

        Raises:
            RoundError: a weight is negative or not finite, all are 0, or only some replies carry auxiliary tensors.
        """
        gather = weighted_mean if self.aggregator is None else self.aggregator.gather
        self.left_out, weights = [], dict[int, float]()
        weigh: Weigh = None  # equal weights, for which a stack of replies need not be taken apart
        if self.weights_replies:
            replies, weigh = self._weighed(replies, weights), partial(_weights_in, weights)
        aggregate = gather(replies, weigh, round=round, served=self._served, num_clients=self.num_clients)
        if aggregate is None:
            if self.left_out:
                raise RoundError(
                    f"{type(self).__name__}.weight gave 0 for all {len(self.left_out)} replies of round {round}; "
                    "expected a weight above 0 for one at least."
                )
            return None
        self.evaluated_model = self.evaluated(aggregate.mean)
        proposal = self.server_update(aggregate)
        if self.server_optimizer is not None:
            stepped = self.server_optimizer.step(self._served, proposal, aggregate.parameters)
            # buffers have no step and stay at the mean
            proposal = {**proposal, **stepped}
        # Partial updates: a tensor that no client sent keeps its served value, whatever the strategy proposes for it.
        unsent = {name: self._served[name] for name, num in aggregate.num_sent.items() if not num}
        return {**proposal, **unsent} if unsent else proposal

    # Flower's interface

    @classmethod
    def needs_messages(cls) -> bool:
        """Whether a subclass overrides how messages are built or read, so that rounds must use real messages."""
        methods = (cls.configure_train, cls.aggregate_train)
        return methods != (Strategy.configure_train, Strategy.aggregate_train)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One train message per sampled node."""
        nodes = grid.get_node_ids()
        clients = nodes if isinstance(nodes, range) else sorted(nodes)  # do not materialize a million ids
        cohort_size = int(cast(int, config.get(COHORT_KEY, len(clients))))
        seed = int(cast(int, config.get(SEED_KEY, 0)))
        request = self.request(server_round, to_tensors(arrays), clients, cohort_size=cohort_size, seed=seed)
        spec = wire.objective_entry(request.objective)
        entries = ConfigRecord({**config, wire.ROUND_KEY: server_round, wire.OBJECTIVE_KEY: spec})
        # one content for all messages, so that the model is in memory once
        content = RecordDict({wire.ARRAYS: arrays, wire.CONFIG: entries})
        if request.shared:
            content[wire.AUXILIARY] = to_record(request.shared)
        return [Message(content, node_id, MessageType.TRAIN) for node_id in request.cohort]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the messages without errors; (None, None) if there are none."""
        model = self.aggregate(server_round, _unpacked(replies))
        return None if model is None else to_record(model), None

    def _weighed(self, replies: Iterable[Reply], weights: dict[int, float]) -> Iterator[Reply]:
        """The replies with a weight above 0; `weights` takes in the weight of each client."""
        for reply in replies:
            own = self._weights(reply)
            weights |= own
            zeros = {index for index, weight in enumerate(own.values()) if not weight}
            self.left_out += [partition for partition, weight in own.items() if not weight]
            if isinstance(reply, CohortReply) and zeros:
                reply = reply.without(zeros)
            if len(zeros) < len(own):
                yield reply
            del reply  # before the next client trains

    def _weights(self, reply: Reply) -> dict[int, float]:
        """The weight of each client in a reply."""
        weights: dict[int, float] = {}
        for each in reply.replies() if isinstance(reply, CohortReply) else [reply]:
            weights[each.partition] = weight = float(self.weight(each))
            if not 0 <= weight < float("inf"):
                raise RoundError(
                    f"{type(self).__name__}.weight gave {weight} for client {each.partition}; "
                    "expected a finite number above 0, or 0 to leave its reply out."
                )
        return weights

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """No federated evaluation: the server evaluates centrally."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Nothing to aggregate."""
        return None

    def summary(self) -> None:
        """Log one line about the strategy."""
        _log.debug("%s, %s weights", type(self).__name__, self.weighting)


def _weights_in(weights: Mapping[int, float], reply: Reply) -> list[float]:
    return [weights[each] for each in (reply.partitions if isinstance(reply, CohortReply) else [reply.partition])]


def _unpacked(messages: Iterable[Message]) -> Iterator[TrainReply]:
    for message in messages:
        if message.has_error():
            _log.warning("node %s failed: %s", message.metadata.src_node_id, message.error.reason)
        else:
            yield wire.unpack_reply(message)
