"""All communication of tensors between ranks: ring collectives, counted and timed.

Operations work in place on flat tensors of equal blocks (`fedsign.sharding.layout`): on the whole tensor [n blocks]
within a group and over all ranks, on a rank's partition [g blocks] between groups.  An all-gather expects a rank's part
at its position.  A reduce-scatter leaves the sum there and clobbers the rest.  The order of blocks does not depend on
whether rings are flat or two-level.

The rings use plain sends and receives, because gloo's reduce-scatter moves as much data as an all-reduce.  A ring over
all ranks visits them in order, so it leaves each group once, whatever the order of the blocks.

Two-level rings are the paper's PaRO-CC (Algorithms 6 and 7).  The levels overlap block by block: while arrived blocks
go around within a group, the next ones cross between groups; reduce-scatter works the other way round.

Gloo sends and receives CPU memory only.  For GPU tensors under gloo, a collective runs on a copy in pinned host memory:
this rank's contribution is copied there, the result back.  NCCL, which needs one GPU per rank, sends from GPU to GPU.

With `overlaps`, collectives run asynchronously (`fedsign.sharding.executors`).  Initial broadcasts use the backend's
own operation, which gloo supports for GPU tensors as well, and are not part of any plan.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from fedsign.errors import ConfigError
from fedsign.sharding.divergence import Trail, watch
from fedsign.sharding.executors import CudaStream, Executor, Inline, Thread, Work
from fedsign.sharding.layout import Granularity, Grouping
from fedsign.sharding.strategy import Collective, Operation, Scope, gather_all
from fedsign.sharding.traffic import Count, Rings

_MAX_TEXT_BYTES = 2**16


class Collectives:
    """A rank's collectives over the default process group."""

    def __init__(
        self,
        grouping: Grouping,
        *,
        rings: Rings = Rings.TWO_LEVEL,
        overlaps: bool = False,
        through_host: bool | None = None,
    ) -> None:
        """Set up collectives; `through_host` stages tensors in host memory, by default only if the backend requires it.

        Raises:
            ConfigError: there is no process group, or it has another size.
        """
        if not dist.is_initialized():
            raise ConfigError("no process group is there; call torch.distributed.init_process_group first.")
        if dist.get_world_size() != grouping.ranks:
            raise ConfigError(
                f"{grouping.groups} groups of {grouping.per_group} ranks were given in a process group of "
                f"{dist.get_world_size()}; groups times ranks of a group must be all ranks."
            )
        self.grouping, self.rings, self.rank = grouping, rings, dist.get_rank()
        self._group = grouping.group_ranks(self.rank)
        self._peers = grouping.peer_ranks(self.rank)
        self.trail = Trail(self.rank, grouping.ranks)
        if grouping.ranks > 1:
            watch(self, self.trail)
        self._sent = Count()
        self._counts: dict[Collective, Count] = {}
        self._overlaps, self._through_host = overlaps, through_host
        self._executor: Executor | None = None
        self._last: Work | None = None

    @property
    def counts(self) -> dict[Collective, Count]:
        """Counts so far by collective; waits for all work in flight."""
        if self._last is not None:  # work runs in order, so the last one ends all
            self._last.wait()
        return self._counts

    def run(self, collective: Collective, tensor: Tensor, *, of: str = "") -> None:
        """Run one collective in place and wait for it."""
        self.start([collective], tensor, of=of).wait()

    def start(
        self, collectives: Sequence[Collective], tensor: Tensor, then: Callable[[], None] | None = None, *, of: str = ""
    ) -> Work:
        """Start collectives in sequence, in place, then call `then`; keep the tensor until the work is done.

        `of` is the unit that the tensor belongs to; ranks that start different collectives raise `DivergedError`.
        """
        if self._executor is None:  # lazy, because the first tensor's device decides
            self._executor = self._make_executor(tensor)
        self._last = self._executor.start(partial(self._carry_out, tuple(collectives), tensor, then, of))
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

    def _carry_out(
        self, collectives: Sequence[Collective], tensor: Tensor, then: Callable[[], None] | None, of: str
    ) -> None:
        for collective in collectives if tensor.numel() else ():
            began, self._sent = time.perf_counter(), Count(calls=1)
            with self.trail.at(f"{collective} of {of}"):
                if self._goes_through_host(tensor):
                    self._run_through_host(collective, tensor)
                else:
                    self._run(collective, tensor)
            once = self._sent + Count(elapsed_s=time.perf_counter() - began)
            self._counts[collective] = self._counts.get(collective, Count()) + once
        if then is not None:
            then()

    def _run(self, collective: Collective, tensor: Tensor) -> None:
        """Run a collective; an all-reduce is a reduce-scatter followed by an all-gather."""
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
        # Copy only what the operation needs: an all-gather reads this rank's part and writes everything, a
        # reduce-scatter the other way round.
        if collective.operation is Operation.ALL_GATHER:
            part(host).copy_(part(tensor))
        else:
            host.copy_(tensor)
        self._run(collective, host)
        if collective.operation is Operation.REDUCE_SCATTER:
            part(tensor).copy_(part(host))
        else:
            tensor.copy_(host)

    def from_all(self, own: Tensor, *, of: str = "") -> Tensor:
        """The vectors [k] of all ranks, [ranks, k]."""
        by_block = own.new_zeros(self.grouping.ranks, len(own))
        by_block[self.grouping.block_of(self.rank)] = own
        for collective in gather_all(Granularity.GLOBAL):
            self.run(collective, by_block.view(-1), of=of)
        return by_block[[self.grouping.block_of(rank) for rank in range(self.grouping.ranks)]]

    def exchange(
        self, sent: Sequence[tuple[int, Tensor]], received: Sequence[tuple[int, Tensor]], *, of: str = ""
    ) -> None:
        """Send tensors to ranks and receive others, in place; all ranks call it, even with none."""
        if self._executor is None:
            self._executor = self._make_executor(next((each for _, each in (*sent, *received)), torch.empty(0)))
        self._last = self._executor.start(partial(self._carry_out_exchange, sent, received, of))
        self._last.wait()

    def _carry_out_exchange(
        self, sent: Sequence[tuple[int, Tensor]], received: Sequence[tuple[int, Tensor]], of: str
    ) -> None:
        kind = Collective(scope=Scope.ALL, operation=Operation.EXCHANGE)
        began, self._sent = time.perf_counter(), Count(calls=1)
        with self.trail.at(f"{kind} of {of}"):
            staged = [(rank, each.cpu() if self._goes_through_host(each) else each) for rank, each in received]
            operations = [dist.P2POp(dist.irecv, each, rank, tag=self.trail.tag) for rank, each in staged]
            for rank, each in sent:
                whole = each.cpu() if self._goes_through_host(each) else each
                operations.append(dist.P2POp(dist.isend, whole, rank, tag=self.trail.tag))
                self._count_sent(rank, each)
            _wait(dist.batch_isend_irecv(operations) if operations else ())
            for (_, each), (_, arrived) in zip(received, staged, strict=True):
                if arrived is not each:
                    each.copy_(arrived)
        once = self._sent + Count(elapsed_s=time.perf_counter() - began)
        self._counts[kind] = self._counts.get(kind, Count()) + once

    def _count_sent(self, target: int, sent: Tensor) -> None:
        size = sent.numel() * sent.element_size()
        crosses = self.grouping.group_of(target) != self.grouping.group_of(self.rank)
        self._sent += Count(inter_bytes=size) if crosses else Count(intra_bytes=size)

    def from_first(self, tensor: Tensor) -> None:
        """Broadcast a tensor from rank 0."""
        dist.broadcast(tensor, src=0)

    def broadcast_text(self, text: str) -> str:
        """Broadcast a text from rank 0, as a length and UTF-8."""
        # NCCL broadcasts GPU tensors only
        device = "cpu" if backend_of("cpu") else "cuda"
        encoded = text.encode()[:_MAX_TEXT_BYTES]
        length = torch.tensor([len(encoded)], device=device)
        self.from_first(length)
        received = torch.tensor([*encoded] if self.rank == 0 else [0] * int(length), dtype=torch.uint8, device=device)
        if len(received):
            self.from_first(received)
        return bytes(received.tolist()).decode(errors="replace")

    def _ring(self, scope: Scope, tensor: Tensor) -> tuple[Sequence[Tensor], list[int]]:
        """The chunks of a tensor and the ranks of the ring that own them."""
        match scope:
            case Scope.INTRA:
                return tensor.chunk(self.grouping.per_group), self._group
            case Scope.INTER:
                return tensor.chunk(self.grouping.groups), self._peers
            case Scope.ALL:
                blocks, ranks = tensor.chunk(self.grouping.ranks), list(range(self.grouping.ranks))
                return [blocks[self.grouping.block_of(rank)] for rank in ranks], ranks

    def _blocks(self, whole: Tensor) -> list[list[Tensor]]:
        """`[group][local]`: blocks by the rank that owns them."""
        by_local = whole.view(self.grouping.per_group, self.grouping.groups, -1)  # block = local * groups + group
        return [list(by_local[:, group]) for group in range(self.grouping.groups)]

    def _ring_gather(self, chunks: Sequence[Tensor], ring: Sequence[int]) -> None:
        """Start with `chunks[k]` at `ring[k]`; end with all chunks at all ranks."""
        size, me = len(ring), ring.index(self.rank)
        for step in range(size - 1):
            # pass on the chunk that arrived in the previous step, at first our own
            _wait(self._exchange(chunks[(me - step) % size], chunks[(me - step - 1) % size], ring))

    def _ring_reduce(self, chunks: Sequence[Tensor], ring: Sequence[int]) -> None:
        """Sum all ranks' `chunks[k]` at `ring[k]`, in the order of the ring, so results are reproducible."""
        size, me = len(ring), ring.index(self.rank)
        received = torch.empty_like(chunks[0])
        for step in range(size - 1):
            # begin with the previous rank's chunk: our own is then the last one to be summed, and complete
            _wait(self._exchange(chunks[(me - step - 1) % size], received, ring))
            chunks[(me - step - 2) % size].add_(received)

    def _two_level_gather(self, blocks: Sequence[Sequence[Tensor]]) -> None:
        groups, local, group = len(blocks), self.grouping.local_of(self.rank), self.grouping.group_of(self.rank)
        # Start the next exchange between groups before gathering within the group: slow and fast links then work in
        # parallel, and the slow one is waited for only when its blocks are needed.
        for step in range(groups):
            here = (group - step) % groups  # the group whose blocks have arrived
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
            # Sum the blocks of the farthest group first and our own last: a partial sum then crosses one link per step
            # and has passed every group when it arrives.
            here = (group - step - 1) % groups
            self._ring_reduce(blocks[here], self._group)
            _wait(crossing)
            if step > 0:
                blocks[here][local].add_(received)
            if step < groups - 1:
                crossing = self._exchange(blocks[here][local], received, self._peers)

    def _exchange(self, sent: Tensor, received: Tensor, ring: Sequence[int]) -> Sequence[dist.Work]:
        """Start sending to the next rank of a ring and receiving from the previous one."""
        me = ring.index(self.rank)
        target, source = ring[(me + 1) % len(ring)], ring[me - 1]
        self._count_sent(target, sent)
        # Receive first: otherwise gloo serializes the two directions between a pair of ranks, which takes twice as
        # long.
        tag = self.trail.tag
        works: Sequence[dist.Work] = dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, received, source, tag=tag), dist.P2POp(dist.isend, sent, target, tag=tag)]
        )
        return works


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def backend_of(device_type: str) -> str:
    """The default process group's backend for a device type; empty if there is none."""
    pairs = (pair.partition(":") for pair in str(dist.get_backend_config()).split(","))
    return {kind: backend for kind, _, backend in pairs}.get(device_type, "")


def own(tensor: Tensor, *, of: Granularity, to: Granularity, grouping: Grouping, rank: int) -> Tensor:
    """A rank's part under granularity `to`, as a view of its part under the coarser `of`."""
    outer, inner = grouping.blocks_of(rank, of), grouping.blocks_of(rank, to)
    block = tensor.numel() // len(outer)
    first = inner.start - outer.start
    return tensor[first * block : (first + len(inner)) * block]
