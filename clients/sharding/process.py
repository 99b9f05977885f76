"""The process of one rank (see clients.sharding.ranks).

In:  the rank's settings, once; then per client its request (clients.workers.messages), the `layout` of its tensors, and
     the `slot` of the reply
Out: {"ready": true} once; then per client {"nums", "losses", "lost"} of the training, and the `layout` of what rank 0
     wrote into the slot; {"failed": ...} instead of either

Tensors are named as in clients.sharding.payload.
"""

import logging
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from clients.sharding.model import Known
from clients.sharding.payload import MODEL, SHARED, STATE, from_payload
from clients.sharding.ranks import RENDEZVOUS_S
from clients.sharding.training import ShardedTraining
from clients.workers.messages import request_from, result_message
from clients.workers.shared_data import workload_from
from fedsign.records import failure_of
from fedsign.sharding.section import ShardingSection
from fedsign.transport.connection import Connection, Message
from fedsign.transport.tensors import Layout, SharedFile
from fedsign.workload import Workload


def main(parent: Connection) -> None:
    """Train clients until the connection ends."""
    requests = iter(parent)
    try:
        given = next(requests)
        workload = workload_from(given)
        _init_process_group(given, workload)
        where = given["constants"]
        constants = Layout.from_json(where["layout"]).read(SharedFile(*where["file"]).memory(0))
        known = Known(constants=constants, types=given["types"])
        training = ShardedTraining(workload, rank=given["rank"], known=known)
        models, replies = SharedFile(*given["models"]), SharedFile(*given["replies"])
        parent.send({"ready": True})
        for request in requests:
            parent.send(_trained(training, request, models, replies))
    except Exception as error:  # any error is reported to the parent
        logging.getLogger("fedsign").exception("a rank cannot go on")
        parent.send(result_message(failure_of(0, error)))
        for _ in requests:
            pass  # exiting now would make the other ranks fail, too


def _trained(training: ShardedTraining, request: Message, models: SharedFile, replies: SharedFile) -> Message:
    """Train a client.  Rank 0 writes the trained tensors into the reply's slot."""
    given = from_payload(Layout.from_json(request["layout"]).read(models.memory(0)))
    nums, losses = training.train(request_from(request, given[MODEL], given[SHARED]), given.get(STATE))
    layout = training.layout()
    targets = {} if dist.get_rank() else layout.read(replies.memory(request["slot"]))
    for name, value in training.values():  # gathering is collective, so all ranks must iterate
        if targets:
            targets[name].copy_(value)
    return {"nums": nums, "losses": losses, "lost": training.lost, "layout": layout.as_json()}


def _init_process_group(given: Message, workload: Workload) -> None:
    """Join the process group through the store on the first machine."""
    rank, ranks = given["rank"], ShardingSection.of(workload.config).ranks
    host, port = given["store"]
    store = TCPStore(host, port, timeout=timedelta(seconds=RENDEZVOUS_S))
    if workload.device.type != "cpu":
        torch.cuda.set_device(workload.device)  # first, since NCCL takes the current device
    backend = agreed_backend(store, given["backend"], rank=rank, ranks=ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)


def agreed_backend(store: Store, wished: str, *, rank: int, ranks: int) -> str:
    """Agree on the backend: machines may prefer different ones, and NCCL requires that all support it."""
    store.set(f"backend-{rank}", wished)
    every = {store.get(f"backend-{each}").decode() for each in range(ranks)}
    return wished if every == {wished} else "gloo"
