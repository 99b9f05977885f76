"""A process that is one of the ranks of a client: see clients.sharding.ranks.

In:  what to be, once; then {"train": partition, "round": n, "objective": {"name", "settings"}, "layout": ..., "slot": n} for each client
Out: {"ready": true} once; then for each client {"trained": {...}}, and from rank 0 `layout` besides: what lies in the slot;
     {"failed": sentence, "details": traceback} in place of either
"""

import logging
import os
import sys
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from clients.sharding.devices import agreed_backend
from clients.sharding.ranks import INTERFACE, RENDEZVOUS_S
from clients.sharding.training import ShardedTraining
from clients.workers.shared_data import workload_from
from fedsign.records import ObjectiveSpec, failure_of
from fedsign.sharding.section import ShardingSection
from fedsign.transport.connection import Connection, Message
from fedsign.transport.tensors import Layout, SharedFile
from fedsign.workload import Workload


def main(parent: Connection) -> None:
    """Train what is asked for, to the end."""
    logging.basicConfig(format="%(levelname)s: %(message)s", stream=sys.stderr)
    requests = iter(parent)
    try:
        rank = _Rank(next(requests))
        parent.send({"ready": True})
        for request in requests:
            parent.send(rank.train(request))
    except Exception as error:  # told to the other process, whatever it is
        logging.getLogger("fedsign").exception("a rank cannot go on")
        failure = failure_of(0, error)
        parent.send({"failed": failure.reason, "details": failure.details})
        for _ in requests:
            pass  # to go would make the other ranks complain, too


class _Rank:
    """This process, within its group."""

    def __init__(self, given: Message) -> None:
        self._workload = workload_from(given)
        self._models = SharedFile(*given["models"])
        self._replies = None if given["replies"] is None else SharedFile(*given["replies"])  # rank 0's alone
        _init_process_group(given, self._workload)
        self._training = ShardedTraining(self._workload, rank=given["rank"])

    def train(self, request: Message) -> dict[str, Any]:
        """One client; what is said of it.  Rank 0 writes what was trained into the reply's slot."""
        layout, model = Layout.from_json(request["layout"]), self._models.memory(0)
        trained = self._training.train(
            layout.read(model),
            partition=request["train"],
            round=request["round"],
            objective=ObjectiveSpec(**request["objective"]),
        )
        said = asdict(trained) | {"names": None if trained.names is None else sorted(trained.names)}
        values = self._training.values(trained.names)
        if self._replies is None:
            for _ in values:
                pass  # all ranks take part in gathering what rank 0 writes
            return {"trained": said}
        own = self._training.layout_of(trained.names)
        places = own.read(self._replies.memory(request["slot"]))
        for name, value in values:
            places[name].copy_(value)
        return {"trained": said, "layout": own.as_json()}


def _init_process_group(given: Message, workload: Workload) -> None:
    """Join the process group, whose store listens on a socket that rank 0 was handed; see ranks.StoreAddress."""
    rank, ranks = given["rank"], ShardingSection.of(workload.config).ranks
    host, port, descriptor = given["store"]
    store = dist.TCPStore(  # type: ignore[attr-defined] # torch's stub does not export it
        host,
        port,
        ranks,
        is_master=rank == 0,
        timeout=timedelta(seconds=RENDEZVOUS_S),
        wait_for_workers=False,
        master_listen_fd=descriptor if rank == 0 else None,
    )
    if INTERFACE in os.environ:
        os.environ["NCCL_SOCKET_IFNAME"] = os.environ[INTERFACE]
    if workload.device.type != "cpu":
        torch.cuda.set_device(workload.device)
    backend = agreed_backend(store, given["backend"], rank=rank, ranks=ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
