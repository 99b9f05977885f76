"""Loss and metrics of a model on samples, which stream through in batches.

What is kept of a batch are its outputs, or, where these are too many (`fedsign.tasks.base.KeepingTask`), what the task keeps of them.
No figure depends on how many threads share the batches out; so neither does the size of a batch.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor, nn

from fedsign.data.base import AnySamples, Samples
from fedsign.numerics import Numerics
from fedsign.tasks.base import KeepingTask, Task

Metric = Callable[[Tensor, Tensor], float]  # of outputs, or of what a KeepingTask keeps of them, and targets
_LARGEST_BATCH = 1024  # samples
_LARGE_SAMPLE_BYTES, _SMALLEST_SHARE = 4096, 16
_FEATURE_BYTES = 2**20  # of a batch's features on a CPU: what layers make of more than that leaves its caches
_LOGIT_BYTES = {"cpu": 2**22, "cuda": 2**28}  # of a batch of text, whose logits are what counts


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """How models are evaluated; `metrics` are pairs of a name and a function.

    `vocabulary_size` is that of text, and None for all other data.
    """

    task: Task
    metrics: Sequence[tuple[str, Metric]]
    numerics: Numerics
    vocabulary_size: int | None

    def figures(self, model: nn.Module, samples: AnySamples, *, num_threads: int) -> dict[str, float]:
        """The loss and every metric; `num_threads` are for a CPU."""
        targets = samples.targets
        with torch.no_grad(), self.numerics.repeatable():
            found = self._kept(model, samples, num_threads)
            kept = found[0] if len(found) == 1 else torch.cat(found)
            mean = self.task.loss_of if isinstance(self.task, KeepingTask) else self.task.loss
            values = {"loss": mean(kept, targets).item()}
        return values | {name: float(metric(kept, targets)) for name, metric in self.metrics}

    def _kept(self, model: nn.Module, samples: AnySamples, num_threads: int) -> list[Tensor]:
        """What is kept of each batch, on the CPU."""
        numerics, task, device = self.numerics, self.task, self.numerics.device
        channels_last = numerics.takes_channels_last(model)

        def kept_of(batch: tuple[Tensor, Tensor]) -> Tensor:
            with torch.no_grad():  # is each thread's own affair
                outputs = numerics.outputs(model, batch[0].to(device), channels_last=channels_last)
                if isinstance(task, KeepingTask):
                    outputs = task.kept(outputs, batch[1].to(device))
                return outputs.cpu()

        batches = samples.batches(self._batch_size(samples))
        if num_threads > 1 and device.type == "cpu" and isinstance(samples, Samples):
            lend = partial(torch.set_num_threads, torch.get_num_threads())
            with ThreadPoolExecutor(num_threads, initializer=lend) as threads:
                return list(threads.map(kept_of, batches))
        return [kept_of(batch) for batch in batches]

    def _batch_size(self, samples: AnySamples) -> int:
        is_cpu = self.numerics.device.type == "cpu"
        if self.vocabulary_size is not None:
            logit_bytes = 4 * self.vocabulary_size * prod(samples.shape)
            return max(1, min(_LARGEST_BATCH, _LOGIT_BYTES["cpu" if is_cpu else "cuda"] // logit_bytes))
        if not is_cpu:
            return _LARGEST_BATCH
        sample_bytes = 4 * max(1, prod(samples.shape))
        batch = min(_LARGEST_BATCH, max(32, _FEATURE_BYTES // sample_bytes))
        # images take long enough for threads to share them out
        return batch if sample_bytes < _LARGE_SAMPLE_BYTES else min(batch, max(_SMALLEST_SHARE, -(-len(samples) // 4)))
