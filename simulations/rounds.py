"""The round loop, the same for every engine and every strategy.

[Note: what is written when] Each round appends and flushes its record. At a checkpoint, three things reach the disk in
this order: the record, by fsync; the clients' states that the checkpoint refers to (through `states`, unless they are
on disk already); the checkpoint, atomically.  A checkpoint therefore never knows of a round whose record is missing,
and resuming drops the records after it.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from math import ceil
from typing import Protocol

import numpy as np
import torch
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import Strategy as FlowerStrategy
from torch import Tensor

from clients.working_model import BorrowingModel
from fedsign.errors import ClientStateError, ConfigError, RoundError
from fedsign.extensions import extensions
from fedsign.federation import counters
from fedsign.federation.aggregation import is_finite, norm_of
from fedsign.federation.exchange import ClientLedger, DirectExchange, Exchange, RoundHook, Traffic
from fedsign.flower import foreign, foreign_rules
from fedsign.flower.array import to_record, to_tensors
from fedsign.flower.parameters_only import ParametersOnly, release
from fedsign.flower.partition_grid import PartitionGrid
from fedsign.models.transform import whole_state
from fedsign.numerics import is_inexact, is_low
from fedsign.optim.low_precision import round_stochastically
from fedsign.records import Failure, Role, Tensors
from fedsign.seeding import Purpose, generator, global_stream, torch_generator
from fedsign.storage import checkpoints
from fedsign.storage.checkpoints import Checkpoint
from fedsign.storage.results import Record, RunFolder
from fedsign.workload import Workload
from simulations import signals
from simulations.evaluation import Evaluation, evaluator_for
from strategies.base import COHORT_KEY, SEED_KEY, Strategy

OnRound = Callable[[Record], None]
_OWNERS = "owners"  # which node serves which client, in a checkpoint
_log = logging.getLogger("fedsign")


class ClientStates(Protocol):
    """Client states kept in the server's process; versions are partition -> version."""

    def resume(self, versions: Mapping[int, int], digest: str) -> None:
        """Restore the versions of a checkpoint; `digest` is what `commit` returned, empty if it was not kept."""
        ...

    def commit(self, versions: Mapping[int, int]) -> str:
        """Write the states that the next checkpoint refers to; return their digest."""
        ...


class RoundLoop:
    """Executes a run from its last checkpoint, or from the start, to the last round."""

    def __init__(
        self,
        workload: Workload,
        grid: PartitionGrid,
        folder: RunFolder,
        on_round: OnRound = lambda record: None,
        *,
        direct: DirectExchange | None = None,
        states: ClientStates | None = None,
        evaluation_threads: int = 1,
    ) -> None:
        """`direct` is an in-process shortcut to the same clients, for strategies that need no messages."""
        self.workload, self.grid, self.folder, self.on_round = workload, grid, folder, on_round
        self._states = states
        self.round = 0
        self._is_leaving = False
        self._config = workload.config
        self._model = BorrowingModel(workload.make_model(), workload.numerics)
        self._hooks: list[RoundHook] = []
        self._reported_counters: set[str] = set()
        self._evaluate = evaluator_for(
            workload, self._model, grid, num_threads=evaluation_threads, on_outputs=partial(_observe, self._hooks)
        )
        self._strategy = make_strategy(workload)
        if isinstance(self._strategy, Strategy):
            self._strategy.roles = self._model.roles
        is_direct = isinstance(self._strategy, Strategy) and not self._strategy.needs_messages()
        self._direct = direct if is_direct else None
        self._exchange: Exchange = self._direct or grid
        self._encoding = self._exchange.encoding = workload.make_update_encoding()
        server = self._config.server
        # over-sampling asks more clients than are wanted; the first `cohort_size` replies count
        self._num_sampled = min(
            ceil(server.cohort_size * (1 + server.over_sampling)), self._config.partition.num_clients
        )
        self._exchange.num_wanted = server.cohort_size
        self._exchange.keeps_counters = server.counters != "copied"
        aggregator = self._strategy.aggregator if isinstance(self._strategy, Strategy) else None
        self._takes_substitutes = aggregator is None or aggregator.takes_substitutes
        self._parameters = [name for name, role in self._model.roles.items() if role is Role.PARAMETER]
        unrounded = workload.make_unrounded() if self._model.has_masters else None
        first = self._model if unrounded is None else BorrowingModel(unrounded, workload.numerics)
        sent = first.copies() | self._model.frozen()
        self._evaluated: Tensors = {name: sent[name] for name in self._model.roles}
        self._model.empty()  # it borrows the tensors of each evaluation
        self._served = self._evaluated
        self._resume()
        # after `_resume`: hooks continue from the round of the checkpoint
        hooks = (make(workload, self._strategy, folder, round=self.round) for make in extensions("round_hook"))
        self._hooks += filter(None, hooks)

    def run(self) -> None:
        """Run all remaining rounds, then write the final model."""
        with signals.whole_rounds():
            while not self._is_over:
                if self._is_leaving:
                    raise signals.Ended
                self.round += 1
                self._run_round()
        checkpoints.save_model(self.folder.path / "model.safetensors", whole_state(self._model.module, self._evaluated))

    @property
    def _is_over(self) -> bool:
        return self.round >= self._config.rounds or any(hook.stop for hook in self._hooks)

    def _run_round(self) -> None:
        started_at = time.perf_counter()
        observers = [hook.begin(self.round) for hook in self._hooks]
        self._exchange.observers = [observer for observer in observers if observer is not None]
        if self._takes_substitutes:
            self.grid.substitutes = partial(_substitutes, self._config.seed, self.round)
        # An encoding relates the new model to the one that the clients received.
        before = self._served
        traffic = self._train()
        if self._encoding is not None:
            self._encoding.commit(self.round, traffic.accepted, before=before, after=self._served)
        if not self._exchange.keeps_counters:
            self._warn_of_counters()
        columns = [hook.end(traffic) for hook in self._hooks]
        traffic.dispersion.metrics()  # before the evaluation, because it frees the sums
        trained_at = time.perf_counter()
        evaluated = self._evaluate(self.round, self._evaluated)
        self._report(evaluated.failures)
        traffic.failures += evaluated.failures
        traffic.bytes_down += evaluated.bytes_down
        ended_at = time.perf_counter()
        self._exchange.ledger.commit(self.round, traffic.with_state)
        timings = {"train_s": trained_at - started_at, "evaluate_s": ended_at - trained_at}
        record: Record = {"round": self.round, **evaluated.metrics, **traffic.record()}
        # In single precision, so that a sparse model, whose sum has no zeros, gives the same number.
        record["weight_norm"] = float(np.float32(norm_of(self._evaluated, self._parameters)))
        for metrics in columns:
            record |= metrics
        for hook in self._hooks:
            hook.evaluated(record, partial(whole_state, self._model.module, self._evaluated))
        self._write(record, timings, evaluated)

    def _warn_of_counters(self) -> None:
        """Report each integer buffer that clients change in training, once in a run."""
        moved = self._exchange.moved_counters - self._reported_counters
        known = [record["message"] for record in self.folder.records("findings.jsonl")] if moved else []
        for name in sorted(moved):
            found = {**counters.finding(name, is_read=False), "round": self.round}
            # the rehearsal may have named it
            if not name.endswith(counters.BATCHES) and not any(f"buffer '{name}'" in each for each in known):
                _log.warning("round %d: %s; %s.", self.round, found["message"], found["remedy"])
                self.folder.append("findings.jsonl", found)
        self._reported_counters |= moved

    def _train(self) -> Traffic:
        """Run one round of the strategy, and update the served and the evaluated model."""
        strategy = self._strategy
        served = self._train_ours(strategy) if isinstance(strategy, Strategy) else self._train_foreign(strategy)
        if served is None:
            raise RoundError(
                f"strategy {self._config.strategy.name} made no model of the replies of round {self.round}."
            )
        model = self._checked_model(served, is_served=True)
        if replies := [*self._exchange.traffic.counters.values()]:
            model = model | counters.counted(self._config.server.counters, self._served, replies)
        self._served = model
        evaluated = strategy.evaluated_model if isinstance(strategy, Strategy) else None
        self._evaluated = self._served if evaluated is None else self._checked_model(evaluated)
        return self._exchange.traffic

    def _train_ours(self, strategy: Strategy) -> Tensors | None:
        """Run one round of a FedSign strategy, over messages only if necessary."""
        seed, server = self._config.seed, self._config.server
        if self._direct is not None:
            clients = range(self._config.partition.num_clients)
            request = strategy.request(self.round, self._served, clients, cohort_size=self._num_sampled, seed=seed)
            replies = self._direct.train(request)
            served = strategy.aggregate(self.round, replies)
            deque(replies, maxlen=0)  # a strategy may stop early; the remaining replies are still received and recorded
        else:
            messages = strategy.configure_train(self.round, to_record(self._served), self._entries(), self.grid)
            answers = self.grid.send_and_receive(messages, timeout=server.round_timeout_s)
            arrays, _ = strategy.aggregate_train(self.round, answers)
            deque(answers, maxlen=0)  # likewise
            served = None if arrays is None else to_tensors(arrays)
        self._exchange.traffic.leave_out(strategy.left_out)
        self._judge(self._exchange.traffic)
        return served

    def _entries(self) -> ConfigRecord:
        """Return the configuration that a strategy gets in Flower's format."""
        return ConfigRecord({SEED_KEY: self._config.seed, COHORT_KEY: self._num_sampled})

    def _train_foreign(self, strategy: FlowerStrategy) -> Tensors | None:
        """Run one round of a Flower strategy, with its cohort fixed and the global random generators seeded."""
        seed, name = self._config.seed, self._config.strategy.name
        view = ParametersOnly(
            to_record(self._served), self._model.roles, weighted_by=foreign_rules.weighted_by(strategy)
        )
        cohort = self.grid.showing(self._cohort())
        # two streams per round: what a strategy draws to configure must not shift what it draws to aggregate
        with (
            foreign_rules.calling(name, self.round),
            global_stream(seed, Purpose.FOREIGN, round=2 * self.round),
            cohort,
        ):
            messages = view.completed(strategy.configure_train(self.round, view.parameters, self._entries(), self.grid))
        replies = view.stripped(self.grid.send_and_receive(messages, timeout=self._config.server.round_timeout_s))
        self._judge(self.grid.traffic)
        foreign_rules.check_num_replies(strategy, len(replies), self.round)
        with foreign_rules.calling(name, self.round), global_stream(seed, Purpose.FOREIGN, round=2 * self.round + 1):
            served, _ = strategy.aggregate_train(self.round, replies)  # a list: strategies iterate over it repeatedly
        model = None if served is None else to_tensors(view.model(served))
        # Flower's way of reading replies makes reference cycles: a round's models would wait for the garbage collector
        release(replies)
        return model

    def _checked_model(self, tensors: Tensors, *, is_served: bool = False) -> Tensors:
        """Return a strategy's model in the model's dtypes, rounded as client.low_precision says if it is served next.

        Counters keep the model's values, because Flower's strategies average them.

        Raises:
            RoundError: the tensors differ from the model's, or are not finite.
        """
        model = self._served
        if tensors.keys() != model.keys():
            raise RoundError(
                f"strategy {self._config.strategy.name} made a model with other tensors in round {self.round}: missing "
                f"{sorted(model.keys() - tensors.keys())}, unknown {sorted(tensors.keys() - model.keys())}."
            )
        for name, tensor in tensors.items():
            if not is_finite(tensor):
                raise RoundError(
                    f"strategy {self._config.strategy.name} made NaN or infinite values of finite replies in round "
                    f"{self.round}, tensor '{name}'; lower its step or the clients' learning rate."
                )
        if is_served and self._config.client.low_precision == "stochastic":
            tensors = {**tensors, **self._rounded(tensors)}
        return {
            name: tensor.to(model[name].dtype) if is_inexact(model[name]) else model[name]
            for name, tensor in tensors.items()
        }

    def _rounded(self, tensors: Tensors) -> Tensors:
        """Return the tensors that are float32, but bf16 in the model, rounded stochastically."""
        stream = torch_generator(self._config.seed, Purpose.SERVED_ROUNDING, round=self.round)
        rounded: Tensors = {}
        for name, own in self._served.items():  # in the order of the model, whatever that of the strategy
            if is_low(own) and tensors[name].dtype == torch.float32:
                rounded[name] = torch.empty_like(own)
                round_stochastically(tensors[name].cpu(), into=rounded[name], generator=stream)
        return rounded

    def _cohort(self) -> list[int]:
        """Return the clients that a Flower strategy may choose from, sampled as for our strategies."""
        rng = generator(self._config.seed, Purpose.SAMPLING, round=self.round)
        clients = range(self._config.partition.num_clients)
        return Strategy().sample(self.round, clients, self._num_sampled, rng)

    def _judge(self, traffic: Traffic) -> None:
        """Record failed clients; raise if too few are left, or if one has lost its state, for it can never go on."""
        if traffic.failures and signals.received:
            raise signals.Ended  # the processes that train may have got the signal, too
        self._report(traffic.failures)
        for failure in traffic.failures:
            if f"{ClientStateError.__name__}: " in failure.reason:
                raise ClientStateError(
                    f"round {self.round} cannot go on without the state of client {failure.partition}: {failure.reason}"
                )
        if len(traffic.accepted) < self._config.server.min_replies:
            first = traffic.failures[0] if traffic.failures else None
            why = f" First failure: client {first.partition}: {first.reason}" if first else ""
            raise RoundError(
                f"round {self.round} ended with {len(traffic.accepted)} usable replies of {len(traffic.sent)}, "
                f"expected server.min_replies={self._config.server.min_replies} or more.{why} (in full in "
                f"{self.folder.path / 'failures.jsonl'})"
            )

    def _report(self, failures: Iterable[Failure]) -> None:
        for failure in failures:
            _log.warning("round %d: client %d failed: %s", self.round, failure.partition, failure.reason)
            self.folder.append("failures.jsonl", {"round": self.round, **asdict(failure)})

    def _write(self, record: Record, timings: dict[str, float], evaluated: Evaluation) -> None:
        """Write the round's results, in the order of [Note: what is written when]."""
        results = self._config.results
        self._is_leaving = bool(signals.received)
        is_checkpoint = self.round % results.checkpoint_every == 0 or self._is_over or self._is_leaving
        # Timings have a separate file, so that rounds.jsonl is the same whenever a run is repeated.
        self.folder.append("timings.jsonl", {"round": self.round, **timings})
        for hook in self._hooks:
            record = hook.write(record, durable=is_checkpoint)
        for name, entry in evaluated.records.items():
            self.folder.append(name, entry, durable=is_checkpoint)
        self.folder.append("rounds.jsonl", record, durable=is_checkpoint)
        if is_checkpoint:
            versions = self._exchange.ledger.versions
            states = self._states.commit(versions) if self._states is not None and versions else ""
            own = self._strategy if isinstance(self._strategy, Strategy) else None
            facts, tables = ({}, {}) if self._encoding is None else self._encoding.state()
            # JSON keys are strings
            owners = {str(client): site for client, site in self._exchange.ledger.owners.items()}
            # returns the rounds that are kept: states that none of them refers to may be deleted
            on_disk = checkpoints.save(
                self.folder.checkpoints,
                Checkpoint(
                    round=self.round,
                    served=self._served,
                    evaluated=None if self._evaluated is self._served else self._evaluated,
                    strategy=own.memory() if own else foreign.snapshot(self._strategy),
                    client_versions=versions,
                    facts={**facts, _OWNERS: owners} if owners else facts,
                    tables=tables,
                    records=self.folder.chains(),
                    states=states,
                ),
                keep=results.keep_checkpoints,
            )
            self._exchange.ledger.checkpoint(self.round, on_disk=on_disk)
        self.on_round(record)

    def _resume(self) -> None:
        """Continue after the folder's last checkpoint, if there is one."""
        checkpoint = checkpoints.load_latest(self.folder.checkpoints)
        if checkpoint is None:
            if not isinstance(self._strategy, Strategy) and not foreign.is_remembered(self._strategy):
                _log.warning(
                    "what strategy %s keeps between rounds is not known: this run cannot be resumed",
                    self._config.strategy.name,
                )
            return
        if isinstance(self._strategy, Strategy):
            self._strategy.load_memory(checkpoint.strategy)
        else:
            foreign.restore(self._strategy, checkpoint.strategy)
        self.round = checkpoint.round
        # a run from before client.low_precision may have checkpoints in bf16
        types = {name: tensor.dtype for name, tensor in self._served.items()}
        # nor were tied tensors stored only once
        self._served = {name: tensor.to(types[name]) for name, tensor in checkpoint.served.items() if name in types}
        own = {name: tensor for name, tensor in (checkpoint.evaluated or {}).items() if name in types}
        self._evaluated = own or self._served
        facts = dict(checkpoint.facts)
        owners = {int(client): site for client, site in facts.pop(_OWNERS, {}).items()}
        if self._encoding is not None:
            self._encoding.load_state(facts, checkpoint.tables)
        if self._states is not None:
            self._states.resume(checkpoint.client_versions, checkpoint.states)
        self._exchange.ledger = ClientLedger(
            versions=dict(checkpoint.client_versions),
            owners=owners,
            checkpoints=checkpoints.client_versions_on_disk(self.folder.checkpoints),
        )


def make_strategy(workload: Workload) -> FlowerStrategy:
    """Make the configured strategy, ours or Flower's.

    Functions `(workload, strategy) -> None` of the extension point `strategy_transform` may set its aggregator.

    Raises:
        ConfigError: it is not a strategy, or it cannot work in this experiment.
    """
    part = workload.config.strategy
    strategy = part.build()
    if isinstance(strategy, foreign_rules.Deferred):
        strategy = strategy.strategy_for(part.name, workload.config)
    if not isinstance(strategy, FlowerStrategy):
        raise ConfigError(
            f"strategy.name={part.name} gives a {type(strategy).__name__}; expected a subclass of "
            "strategies.base.Strategy or of Flower's Strategy."
        )
    for prepare in extensions("strategy_transform"):
        prepare(workload, strategy)
    if isinstance(strategy, Strategy):
        strategy.server_optimizer = workload.config.server.optimizer.build()
    else:
        foreign_rules.warn_of_trimming(strategy, workload.config.server.cohort_size)
    return strategy


def _observe(hooks: Sequence[RoundHook], outputs: Tensor, targets: Tensor) -> None:
    for hook in hooks:
        hook.on_outputs(outputs, targets)


def _substitutes(seed: int, round: int, clients: Sequence[int], num: int) -> list[int]:
    """Return the clients asked in place of sampled ones that are absent."""
    rng = generator(seed, Purpose.SUBSTITUTES, round=round)
    return [int(each) for each in rng.choice(clients, size=min(num, len(clients)), replace=False)] if clients else []
