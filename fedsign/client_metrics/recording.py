"""Record the metrics of each round's clients in `clients.jsonl`, from what the round computes anyway.

One record a round, with arrays in one order, that of the accepted replies:

    clients, num_examples, train_loss, drift   drift: norm of the client's update; a loss is null if it was withheld
    class_accuracy                             by class: the evaluated model on the server's test samples; null for a
                                               class without any, and as a whole unless the server evaluates labels

Numbers have seven digits, as many as single precision: a client takes 30 bytes.
"""

import torch
from torch import Tensor

from fedsign.client_metrics import CLIENTS_FILE
from fedsign.federation.exchange import RoundHook, Traffic
from fedsign.storage.results import Record, RunFolder
from fedsign.tasks.base import KeepingTask
from fedsign.workload import Workload


class ClientMetrics(RoundHook):
    """Writes `clients.jsonl`; `num_classes` is 0 unless each sample has one class."""

    def __init__(self, folder: RunFolder, *, num_classes: int) -> None:
        self._folder, self._num_classes = folder, num_classes
        self._record: Record = {}

    def end(self, traffic: Traffic) -> Record:
        """Take the metrics of the accepted replies."""
        self._record = {
            "clients": traffic.accepted,
            "num_examples": traffic.num_examples,
            "train_loss": [None if loss is None else _rounded(loss) for loss in traffic.train_losses],
            "drift": [_rounded(norm) for norm in traffic.dispersion.norms],
            "class_accuracy": None,
        }
        return {}

    def on_outputs(self, outputs: Tensor, targets: Tensor) -> None:
        """Take the accuracy of each class."""
        if self._num_classes and outputs.dim() == 2:
            self._record["class_accuracy"] = class_accuracy(outputs, targets, self._num_classes)

    def write(self, record: Record, *, durable: bool) -> Record:
        """Write the round."""
        self._folder.append(CLIENTS_FILE, {"round": record["round"], **self._record}, durable=durable)
        return record


def round_hook(workload: Workload, strategy: object, folder: RunFolder, *, round: int) -> ClientMetrics | None:
    """The extension point `round_hook`; off with `results.clients=false`, and where [privacy] protects the clients."""
    folder.drop_after(round, CLIENTS_FILE)
    config = workload.config
    if not config.get("results.clients", True) or config.get("privacy.is_chosen", False):
        return None
    has_labels = not workload.is_evaluated_at_clients and not isinstance(workload.task, KeepingTask)
    return ClientMetrics(folder, num_classes=len(workload.dataset.target.class_names) if has_labels else 0)


def class_accuracy(outputs: Tensor, targets: Tensor, num_classes: int) -> list[float | None]:
    """The share of each class's samples whose largest output is that of the class; None without samples.

    >>> from torch import tensor
    >>> class_accuracy(tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [0.0, 3.0, 1.0]]), tensor([0, 1, 0]), 3)
    [0.5, 1.0, None]
    """
    hits = torch.bincount(targets[outputs.argmax(dim=1) == targets], minlength=num_classes).tolist()
    sizes = torch.bincount(targets, minlength=num_classes).tolist()
    return [_rounded(hit / size) if size else None for hit, size in zip(hits, sizes, strict=True)]


def _rounded(value: float) -> float:
    return float(f"{value:.7g}")
