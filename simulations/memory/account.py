"""The memory of a whole run: what the server and a client hold in each phase of a round.

A local step of the experiment's own network, objective, and optimizer runs on the meta device, and so does an
evaluation, while `fedsign.memory.live` counts.  The rest are sums over the model's tensors.  With P the bytes of the
model that is sent, T of what clients train of it in a round, F of frozen weights that are not sent, and U of tensors
that a model holds in another type or layout than they are sent in:

    build       P + F, or the model while it is built
    train       P + F + C + step               C: the client's copy, T, and P where the client's model is small
    aggregate   P + F + 3 T                    the reply, the sum of updates, and the mean
    evaluate    P + F + T + outputs            the former model is held until the next round
    norm        P + F + T + 8 x the largest tensor's elements, for norms in double precision
    checkpoint  P + F + T                      written tensor by tensor

and 2 U in each phase.  With client.low_precision=master, P and T are float32, and U is the model in bf16; otherwise
weights below float32 are sent as such, but sums are float32.  Weights in 4 bits are built in full.

A second client in the cohort trains while the sums of the first exist: 2 T more.  Objectives with client state hold up
to three models more (state, the next state, what the server shares), server optimizers one for each of their slots.
`program` is what a process takes before: modules, libraries, and the data.

[Note: processes that train] Workers (engine.workers) and ranks (client.sharding) get the model, and give replies, in
memory that they share with the server: P + T for each reply that waits (`shared`).  The system counts it in each
process that has touched it.  A worker has F, C, and the step; the server has what is left.  Ranks are in `ranks.py`.

[Note: a GPU] Only the GPU's memory is accounted for, as PyTorch allocates it.  Requests and replies are in the host's:

    train       M + F + masters + references + step
    evaluate    M + F + outputs                          M: the model in its own types; a small one is there twice

The references are the tensors that the objective has read, and its states.  An account needs no GPU.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from clients.trainer import learning_rate
from clients.workers.pool import window_of
from clients.working_model import LARGE_BYTES, WorkingModel
from fedsign import plugins
from fedsign.data.base import Samples
from fedsign.errors import ConfigError
from fedsign.memory.estimate import ACTIVATIONS
from fedsign.memory.live import LiveBytes, cuda_block
from fedsign.memory.step import Device
from fedsign.numerics import device_of
from fedsign.objectives.base import Objective
from fedsign.optim.base import optimizer_of
from fedsign.records import ObjectiveSpec
from fedsign.sharding.section import ShardingSection
from fedsign.workload import Workload
from simulations.memory import program
from simulations.memory.answers import answers_bytes
from simulations.memory.phases import (
    AGGREGATE,
    BUILD,
    COPY,
    EVALUATE,
    GPU,
    MODEL,
    NORM,
    PROGRAM,
    RANK,
    SERVER,
    SHARED,
    STATE,
    SUMS,
    TRAIN,
    WORKER,
    Account,
    Phase,
    Process,
    UnaccountedError,
)
from simulations.memory.ranks import Shards
from simulations.memory.training import SizeOf, Sizes, Step, Trained, active_in, outputs_bytes, step_of, trained_in
from simulations.rounds import make_strategy
from strategies.base import Strategy

# of a GPU, in bytes: cuBLAS in the threads of the forward and the backward pass, 32 MiB each on Hopper, and a bit more
_WORKSPACES = 68_000_000


def account(workload: Workload) -> Account:
    """Account for a run of the in-process engine.

    Raises:
        ConfigError: the experiment runs elsewhere, or its model's shapes depend on values.
    """
    _check(workload)
    kind = kind_of(workload)
    size_of: SizeOf = int
    if kind == "cuda":
        size_of, workload = cuda_block, workload.with_section("engine", device="cpu")  # a GPU need not be here
    config, client = workload.config, workload.config.client
    ranks, workers = ShardingSection.of(config).ranks, config.get("engine.workers", 1)
    strategy = make_strategy(workload)
    spec = strategy.objective(1) if isinstance(strategy, Strategy) else ObjectiveSpec()
    objective: Objective = plugins.build("objective", spec.name, spec.settings)
    of_meta, there = program.import_meta(), _on_meta(workload)
    with _sentence(config.model.name):
        with torch.device("meta"), LiveBytes() as live:
            model = WorkingModel(there.make_model().train(), there.numerics)
        optimizer = optimizer_of(client.optimizer, model.module, learning_rate(workload)(1), client.weight_decay)
        sizes = Sizes.of(model, workload.numerics, size_of)
        trained = trained_in(there, model, optimizer, size_of, is_wide=sizes.has_masters)
        active = active_in(there, model, optimizer)
        step = step_of(there, model, objective, optimizer, kind=kind, share=ranks)
        outputs = max(outputs_bytes(there, model, kind=kind, threads=workers), answers_bytes(there, model.module))
        shards = Shards(there, optimizer, active) if ranks > 1 else None
    run = _Run(
        sizes=sizes,
        trained=trained,
        step=step,
        built=live.peak.total_bytes,
        outputs=outputs,
        kept=_kept(strategy, objective, sizes.sent),
        has_others=config.server.cohort_size > 1,
        has_state=objective.has_state,
    )
    if kind == "cuda":
        processes = [Process(name=GPU, phases=tuple(run.on_gpu(_WORKSPACES + _data_bytes(workload))))]
    else:
        of_server = program.bytes_of_this(optimizer, of_meta)
        processes = list(_processes(workload, run, of_server, objective, shards))
    num_samples, num = len(workload.dataset.train), sum(each.numel() for each in model.module.parameters())
    return Account(
        title=f"{config.model.name} on {config.data.name}, {client.optimizer.name}, {num_samples:,} samples",
        num_parameters=num,
        num_frozen=num - sum(model.sizes.values()),
        num_trained=trained.num,
        processes=tuple(processes),
    )


def _processes(
    workload: Workload, run: "_Run", of_server: int, objective: Objective, shards: Shards | None
) -> Iterator[Process]:
    """The server's process, and those on this machine that train."""
    workers, data = workload.config.get("engine.workers", 1), _data_bytes(workload)
    if shards is not None:
        lent = run.request + shards.constants + run.reply
        # the checks before the run copy the model
        yield Process(name=SERVER, phases=tuple(run.server(of_server, models=2, lent=lent)))
        of_rank = program.bytes_of_another(workload, "clients.sharding.process", outlines=True)
        step = {"states": run.step.states, "activations": run.step.activations}
        phases = shards.phases(objective, program=of_rank, reply=run.reply, data=data, **step)
        yield Process(name=RANK, phases=tuple(phases), count=shards.count)
    elif workers > 1:
        # the most replies that wait for their turn
        slots = min(workload.config.server.cohort_size, window_of(workers, run.sizes.sent))
        lent = run.request + slots * run.reply + (slots - 1) * run.state
        yield Process(name=SERVER, phases=tuple(run.server(of_server, models=1, lent=lent)))
        of_worker = program.bytes_of_another(workload, "clients.workers.process", outlines=False)
        yield Process(name=WORKER, phases=tuple(run.worker(of_worker, lent=lent + data)), count=workers)
    else:
        yield Process(name=SERVER, phases=tuple(run.alone(of_server)))


def kind_of(workload: Workload) -> Device:
    """The kind of device that a run is for, which need not be here."""
    device = workload.config.engine.device
    return "cuda" if re.fullmatch("cuda(:[0-9]+)?", device) or device_of(device).type == "cuda" else "cpu"


def _check(workload: Workload) -> None:
    config = workload.config
    if config.engine.name != "in_process" or config.get("client.path", "") == "cohort":
        raise ConfigError(
            f"engine.name={config.engine.name} and client.path={config.get('client.path', 'sequential')} were given, "
            "but a whole run is accounted for in process, one client after another; use --methods full,lora,lisa for a "
            "training step."
        )
    ranks, workers = ShardingSection.of(config).ranks, config.get("engine.workers", 1)
    if kind_of(workload) == "cuda" and (ranks > 1 or workers > 1):
        raise ConfigError(
            f"engine.device={config.engine.device} was given with client.sharding.ranks={ranks} and "
            f"engine.workers={workers}, but a GPU is accounted for where one process trains; set both to 1 here."
        )
    if config.engine.precision != "float32":
        raise ConfigError(
            f"engine.precision={config.engine.precision} was given, but autocast's copies of the weights are not "
            "accounted for; set engine.precision=float32 here."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """What the phases of the table in the module's docstring are made of."""

    sizes: Sizes
    trained: Trained
    step: Step
    built: int
    outputs: int
    kept: Mapping[str, int]
    has_others: bool
    has_state: bool

    @property
    def state(self) -> int:
        """Bytes of a client's state."""
        return self.sizes.sent * self.has_state

    @property
    def request(self) -> int:
        """Bytes that a client receives: the model, its state, and what the strategy sends along with it."""
        return self.sizes.sent + 2 * self.state

    @property
    def reply(self) -> int:
        """Bytes of a client's reply, with its next state."""
        return self._copy + self.state

    @property
    def _copy(self) -> int:
        return self.trained.copied if self.trained.is_part else self.sizes.replied

    def _phase(self, name: str, stays: Mapping[str, int], **moving: int) -> Phase:
        return Phase.of(name, stays, small=self.trained.small, **moving)

    @property
    def _between(self) -> int:
        """Memory of a client's model between clients: of a small one, or one unlike what is sent."""
        is_small = not self.trained.is_part and not self.sizes.has_masters and self.sizes.sent < LARGE_BYTES
        return self.sizes.sent if is_small else self.sizes.unlike

    def alone(self, program: int) -> Iterator[Phase]:
        """The phases of a process that trains, too."""
        stays = self._between + self.sizes.unlike  # the client's, and the server's
        training = {COPY: self._trains(stays), **self.step.at_peak, STATE: self.kept["client"] + self.kept["server"]}
        return self._phases(program, stays, training, reply=self._copy, models=1, lent=0)

    def server(self, program: int, *, models: int, lent: int) -> Iterator[Phase]:
        """The phases of a process whose clients are elsewhere, in memory that it has lent them."""
        stays = self.sizes.unlike
        training = {COPY: stays, STATE: self.state + self.kept["server"]}
        return self._phases(program, stays, training, reply=0, models=models, lent=lent)

    def worker(self, program: int, *, lent: int) -> Iterator[Phase]:
        """The phases of a process that trains in memory that it has borrowed."""
        stays = {PROGRAM: program, MODEL: self.sizes.frozen}
        built = {**stays, MODEL: max(self.built, self.sizes.frozen)}
        yield self._phase(BUILD, built, **{COPY: self._between})
        training = {COPY: self._trains(self._between), **self.step.at_peak, STATE: self.state}
        yield self._phase(TRAIN, {**stays, SHARED: lent}, **training)

    def on_gpu(self, program: int) -> Iterator[Phase]:
        """The phases of a GPU; see [Note: a GPU]."""
        sizes, references = self.sizes, self.step.references + self.kept["client"]
        fixed = {PROGRAM: program, MODEL: sizes.frozen + sizes.own}
        is_small = not self.trained.is_part and sizes.own < LARGE_BYTES
        masters = self.trained.copied if sizes.has_masters else 0
        yield Phase.exact(TRAIN, {**fixed, COPY: masters, **self.step.at_peak, STATE: references})
        yield Phase.exact(EVALUATE, {**fixed, COPY: sizes.own * is_small, ACTIVATIONS: self.outputs})

    def _trains(self, stays: int) -> int:
        return self._copy + stays if self.sizes.has_masters else max(self._copy, stays)

    def _phases(
        self, program: int, stays: int, training: Mapping[str, int], *, reply: int, models: int, lent: int
    ) -> Iterator[Phase]:
        sizes, summed, state, norms = self.sizes, self.trained.summed, self.kept["server"], 8 * self.sizes.largest
        earlier = 2 * summed if self.has_others else 0  # the sums of the clients before
        model = sizes.frozen + sizes.sent
        fixed = {PROGRAM: program, MODEL: model, SHARED: lent}
        yield self._phase(BUILD, {**fixed, MODEL: max(self.built, models * model), SHARED: 0}, **{COPY: stays})
        yield self._phase(TRAIN, fixed, **{**training, SUMS: earlier})
        aggregated = {COPY: reply + stays, SUMS: 2 * summed, ACTIVATIONS: max(0, norms - reply)}  # it is gone by then
        yield self._phase(AGGREGATE, fixed, **aggregated, **{STATE: state})
        yield self._phase(EVALUATE, fixed, **{COPY: stays, STATE: state, SUMS: summed, ACTIVATIONS: self.outputs})
        yield self._phase(NORM, fixed, **{COPY: stays, STATE: state, SUMS: summed, ACTIVATIONS: norms})


def _data_bytes(workload: Workload) -> int:
    """Of the training samples, where processes share them."""
    train = workload.dataset.train
    return train.features.nbytes + train.targets.nbytes if isinstance(train, Samples) else 0


def _kept(strategy: Any, objective: Objective, sent: int) -> dict[str, int]:
    """Bytes of state beside the model: of a client in training, and of the server at all times."""
    slots = len(getattr(getattr(strategy, "server_optimizer", None), "slots", ()))
    if not objective.has_state:
        return {"client": 0, "server": slots * sent}
    evaluates_another = type(strategy).evaluated is not Strategy.evaluated
    # a client's state, and what the server sends along; the server's state, the evaluated model, and the cached state
    return {"client": 2 * sent, "server": (slots + 2 + evaluates_another) * sent}


def _on_meta(workload: Workload) -> Workload:
    """The same on the meta device, where weights are not read."""
    there = workload.with_section("model", start="")
    vars(there).update(dataset=workload.dataset, split=workload.split)  # made here, with values
    vars(there)["numerics"] = replace(
        workload.numerics, device=torch.device("meta"), channels_last="off", compile=False
    )
    return there


@contextmanager
def _sentence(model: str) -> Iterator[None]:
    """Turn what the meta device cannot do into a sentence."""
    try:
        yield
    except (NotImplementedError, RuntimeError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
        raise UnaccountedError(
            f"model.name={model} cannot be built and trained without values, which is how its memory is counted: "
            f"{reason}; such a run can only be measured, with --measure."
        ) from error
