"""The only file that sends a training's tensors between ranks: rings, counted and timed.

All operations work in place on flat tensors of equal blocks (`fedsign.sharding.layout`): the whole [n blocks] within a group and
over all ranks, a rank's partition [g blocks] between groups.  An all-gather expects a rank's own part in its place; a
reduce-scatter leaves the sum there, and the rest of the tensor is used up.  Blocks stand in the same order whether the
ring is flat or has two levels.

The rings are our own, of sends and receives: gloo's reduce-scatter moves as much as an all-reduce.  A ring of all ranks
goes through them in their order, so that it leaves a group once, whatever the order of the blocks.

Two levels are the paper's PaRO-CC (algorithms 6 and 7).  The levels overlap block by block: while blocks that have arrived
go round within a group, the next ones cross, and the other way round for reduce-scatter.

Gloo's sends and receives take memory of the CPU alone.  So where tensors are on a GPU and the backend is gloo, a collective is carried out
on a copy in pinned memory of the host: what this rank gives is copied there, and what it gets is copied back.  NCCL, which needs a
GPU for each rank, sends from GPU to GPU.

With `overlaps` they are carried out beside the caller, which goes on (`fedsign.sharding.executors`).

Broadcasts of the beginning are the backend's own, which gloo carries out on a GPU's tensors too, and not part of any plan.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from fedsign.errors import ConfigError
from fedsign.sharding.executors import CudaStream, Executor, Inline, Thread, Work
from fedsign.sharding.layout import Granularity, Grouping
from fedsign.sharding.strategy import Collective, Operation, Scope
from fedsign.sharding.traffic import Count, Rings

_MAX_SAID_BYTES = 2**16


class Collectives:
    """The collectives of a rank within a grouping of all ranks of the default process group."""

    def __init__(
        self,
        grouping: Grouping,
        *,
        rings: Rings = Rings.TWO_LEVEL,
        overlaps: bool = False,
        through_host: bool | None = None,
    ) -> None:
        """`through_host`: whether tensors go by way of the host's memory; without it, where the backend needs that.

        Raises:
            ConfigError: no process group was initialized, or one of another size.
        """
        if not dist.is_initialized():
            raise ConfigError("no process group is there; call torch.distributed.init_process_group first.")
        if dist.get_world_size() != grouping.ranks:
            raise ConfigError(
                f"{grouping.groups} groups of {grouping.per_group} ranks were given in a process group of {dist.get_world_size()}; "
                "groups times ranks of a group must be all ranks."
            )
        self.grouping, self.rings, self.rank = grouping, rings, dist.get_rank()
        self._group = grouping.group_ranks(self.rank)
        self._peers = grouping.peer_ranks(self.rank)
        self._sent = Count()
        self._counts: dict[Collective, Count] = {}
        self._overlaps, self._through_host = overlaps, through_host
        self._executor: Executor | None = None
        self._last: Work | None = None

    @property
    def counts(self) -> dict[Collective, Count]:
        """What was done so far, by kind; all that was started is waited for."""
        if self._last is not None:
            self._last.wait()
        return self._counts

    def run(self, collective: Collective, tensor: Tensor) -> None:
        """One collective, in place."""
        self.start([collective], tensor).wait()

    def start(self, collectives: Sequence[Collective], tensor: Tensor, then: Callable[[], None] | None = None) -> Work:
        """Some, one after another, in place, and then something else; the tensor is to be kept until that is waited for."""
        if self._executor is None:
            self._executor = self._make_executor(tensor)
        self._last = self._executor.start(partial(self._carry_out, tuple(collectives), tensor, then))
        return self._last

    def _make_executor(self, tensor: Tensor) -> Executor:
        if not self._overlaps:
            return Inline()
        if tensor.is_cuda and not self._goes_through_host(tensor):
            return CudaStream(tensor.device)
        return Thread(tensor.device)

    def _goes_through_host(self, tensor: Tensor) -> bool:
        if self._through_host is not None:
            return self._through_host
        return tensor.is_cuda and backend_of("cuda") == "gloo"

    def _carry_out(self, collectives: Sequence[Collective], tensor: Tensor, then: Callable[[], None] | None) -> None:
        for collective in collectives if tensor.numel() else ():
            began, self._sent = time.perf_counter(), Count(calls=1)
            if self._goes_through_host(tensor):
                self._run_through_host(collective, tensor)
            else:
                self._run(collective, tensor)
            once = self._sent + Count(elapsed_s=time.perf_counter() - began)
            self._counts[collective] = self._counts.get(collective, Count()) + once
        if then is not None:
            then()

    def _run(self, collective: Collective, tensor: Tensor) -> None:
        """An all-reduce is a reduce-scatter and an all-gather."""
        if collective.scope is Scope.ALL and self.rings is Rings.TWO_LEVEL:
            blocks = self._blocks(tensor)
            reduce, gather = partial(self._two_level_reduce, blocks), partial(self._two_level_gather, blocks)
        else:
            chunks, ring = self._ring(collective.scope, tensor)
            reduce, gather = partial(self._ring_reduce, chunks, ring), partial(self._ring_gather, chunks, ring)
        if collective.operation is not Operation.ALL_GATHER:
            reduce()
        if collective.operation is not Operation.REDUCE_SCATTER:
            gather()

    def _run_through_host(self, collective: Collective, tensor: Tensor) -> None:
        host, scope = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda), collective.scope
        part = partial(own, of=scope.whole, to=scope.part, grouping=self.grouping, rank=self.rank)
        if collective.operation is Operation.ALL_GATHER:
            part(host).copy_(part(tensor))
        else:
            host.copy_(tensor)
        self._run(collective, host)
        if collective.operation is Operation.REDUCE_SCATTER:
            part(tensor).copy_(part(host))
        else:
            tensor.copy_(host)

    def from_first(self, tensor: Tensor) -> None:
        """Copy a tensor of rank 0 to all."""
        dist.broadcast(tensor, src=0)

    def said_by_first(self, text: str) -> str:
        """What rank 0 says, on all ranks: a length, and then UTF-8."""
        device = "cpu" if backend_of("cpu") else "cuda"
        mine = text.encode()[:_MAX_SAID_BYTES]
        length = torch.tensor([len(mine)], device=device)
        self.from_first(length)
        said = torch.tensor([*mine] if self.rank == 0 else [0] * int(length), dtype=torch.uint8, device=device)
        if len(said):
            self.from_first(said)
        return bytes(said.tolist()).decode(errors="replace")

    def _ring(self, scope: Scope, tensor: Tensor) -> tuple[Sequence[Tensor], list[int]]:
        """The ranks of a ring, and what each of them owns."""
        match scope:
            case Scope.INTRA:
                return tensor.chunk(self.grouping.per_group), self._group
            case Scope.INTER:
                return tensor.chunk(self.grouping.groups), self._peers
            case Scope.ALL:
                blocks, ranks = tensor.chunk(self.grouping.ranks), list(range(self.grouping.ranks))
                return [blocks[self.grouping.block_of(rank)] for rank in ranks], ranks

    def _blocks(self, whole: Tensor) -> list[list[Tensor]]:
        """`[group][local]`: the blocks of a group's ranks, in the order of its ring."""
        by_local = whole.view(self.grouping.per_group, self.grouping.groups, -1)
        return [list(by_local[:, group]) for group in range(self.grouping.groups)]

    def _ring_gather(self, chunks: Sequence[Tensor], ring: Sequence[int]) -> None:
        """`chunks[k]` is what `ring[k]` has; afterwards all have all."""
        size, me = len(ring), ring.index(self.rank)
        for step in range(size - 1):
            _wait(self._exchange(chunks[(me - step) % size], chunks[(me - step - 1) % size], ring))

    def _ring_reduce(self, chunks: Sequence[Tensor], ring: Sequence[int]) -> None:
        """Add up the ranks' `chunks[k]` at `ring[k]`."""
        size, me = len(ring), ring.index(self.rank)
        received = torch.empty_like(chunks[0])
        for step in range(size - 1):
            _wait(self._exchange(chunks[(me - step - 1) % size], received, ring))
            chunks[(me - step - 2) % size].add_(received)

    def _two_level_gather(self, blocks: Sequence[Sequence[Tensor]]) -> None:
        groups, local, group = len(blocks), self.grouping.local_of(self.rank), self.grouping.group_of(self.rank)
        for step in range(groups):
            here = (group - step) % groups  # whose blocks have arrived
            crossing: Sequence[dist.Work] = ()
            if step < groups - 1:
                crossing = self._exchange(blocks[here][local], blocks[here - 1][local], self._peers)
            self._ring_gather(blocks[here], self._group)
            _wait(crossing)

    def _two_level_reduce(self, blocks: Sequence[Sequence[Tensor]]) -> None:
        groups, local, group = len(blocks), self.grouping.local_of(self.rank), self.grouping.group_of(self.rank)
        received = torch.empty_like(blocks[0][0])
        crossing: Sequence[dist.Work] = ()
        for step in range(groups):
            here = (group - step - 1) % groups  # whose blocks are added up; at last our own
            self._ring_reduce(blocks[here], self._group)
            _wait(crossing)
            if step > 0:
                blocks[here][local].add_(received)
            if step < groups - 1:
                crossing = self._exchange(blocks[here][local], received, self._peers)

    def _exchange(self, sent: Tensor, received: Tensor, ring: Sequence[int]) -> Sequence[dist.Work]:
        """Start sending to the next and receiving from the one before in a ring."""
        me = ring.index(self.rank)
        target, source = ring[(me + 1) % len(ring)], ring[me - 1]
        size = sent.numel() * sent.element_size()
        crosses = self.grouping.group_of(target) != self.grouping.group_of(self.rank)
        self._sent += Count(inter_bytes=size) if crosses else Count(intra_bytes=size)
        # the receive first: between two ranks, gloo otherwise sends one way after the other, which takes twice as long
        found: Sequence[dist.Work] = dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, received, source), dist.P2POp(dist.isend, sent, target)]
        )
        return found


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def backend_of(device_type: str) -> str:
    """The default process group's backend for tensors of a kind of device; empty if it has none."""
    pairs = (pair.partition(":") for pair in str(dist.get_backend_config()).split(","))
    return {kind: backend for kind, _, backend in pairs}.get(device_type, "")


def own(tensor: Tensor, *, of: Granularity, to: Granularity, grouping: Grouping, rank: int) -> Tensor:
    """What a rank owns under a finer granularity, as a view of what it has under a coarser one."""
    outer, inner = grouping.blocks_of(rank, of), grouping.blocks_of(rank, to)
    block = tensor.numel() // len(outer)
    first = inner.start - outer.start
    return tensor[first * block : (first + len(inner)) * block]
