"""A process that is one of the ranks of a client: see clients.sharding.ranks.

In:  the rank's settings, once; then for each client its request (clients.workers.messages), the `layout` of its tensors and
     the `slot` of the reply
Out: {"ready": true} once; then for each client {"nums", "losses"} of the training, and from rank 0 the `layout` of the slot;
     {"failed": ...} in place of either
"""

import logging
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from clients.sharding.devices import agreed_backend
from clients.sharding.ranks import INTERFACE, RENDEZVOUS_S
from clients.sharding.training import ShardedTraining
from clients.workers.messages import request_from, result_message
from clients.workers.shared_data import workload_from
from fedsign.records import failure_of
from fedsign.sharding.section import ShardingSection
from fedsign.transport.connection import Connection, Message
from fedsign.transport.tensors import Layout, SharedFile
from fedsign.workload import Workload


def main(parent: Connection) -> None:
    """Train what is asked for, to the end."""
    requests = iter(parent)
    try:
        given = next(requests)
        workload = workload_from(given)
        _init_process_group(given, workload)
        training = ShardedTraining(workload, rank=given["rank"])
        models, replies = SharedFile(*given["models"]), SharedFile(*given["replies"])
        parent.send({"ready": True})
        for request in requests:
            parent.send(_trained(training, request, models, replies))
    except Exception as error:  # told to the other process, whatever it is
        logging.getLogger("fedsign").exception("a rank cannot go on")
        parent.send(result_message(failure_of(0, error)))
        for _ in requests:
            pass  # to go would make the other ranks complain, too


def _trained(training: ShardedTraining, request: Message, models: SharedFile, replies: SharedFile) -> Message:
    """Train one client and report it.  Rank 0 writes the trained tensors into the reply's slot."""
    tensors = Layout.from_json(request["layout"]).read(models.memory(0))
    trained = training.train(request_from(request, tensors))
    message: Message = {"nums": trained.nums, "losses": trained.losses}
    values = training.values(trained.names)
    if dist.get_rank():
        for _ in values:
            pass  # all ranks take part in gathering what rank 0 writes
        return message
    own = training.layout_of(trained.names)
    places = own.read(replies.memory(request["slot"]))
    for name, value in values:
        places[name].copy_(value)
    return message | {"layout": own.as_json()}


def _init_process_group(given: Message, workload: Workload) -> None:
    """Join the process group, whose store listens on a socket that rank 0 was handed; see ranks.StoreAddress."""
    rank, ranks = given["rank"], ShardingSection.of(workload.config).ranks
    host, port, *descriptors = given["store"]
    store = dist.TCPStore(  # type: ignore[attr-defined] # torch's stub does not export it
        host,
        port,
        ranks,
        is_master=rank == 0,
        timeout=timedelta(seconds=RENDEZVOUS_S),
        wait_for_workers=False,
        master_listen_fd=descriptors[0] if descriptors else None,
    )
    if INTERFACE in os.environ:
        os.environ["NCCL_SOCKET_IFNAME"] = os.environ[INTERFACE]
    if workload.device.type != "cpu":
        torch.cuda.set_device(workload.device)
    backend = agreed_backend(store, given["backend"], rank=rank, ranks=ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
