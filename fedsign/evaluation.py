"""Evaluation: loss and metrics of a model, with samples streamed through it in batches.

Only the outputs of a batch are kept, or a reduction of them where they are large (`KeepingTask` of
`fedsign.tasks.base`).  Loss and metrics are computed once over all samples, so they do not depend on the number of
threads.  The batch size must not depend on it either: it changes rounding.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from fedsign.config import ExperimentConfig
from fedsign.data.base import AnySamples, Samples, Tokenizer
from fedsign.errors import ConfigError
from fedsign.metrics.base import Evaluated, MetricInputs
from fedsign.models.outside_state import is_as_made, restore_outside_state
from fedsign.numerics import Numerics
from fedsign.seeding import Purpose, global_stream, globals_seeded, integer
from fedsign.tasks.base import KeepingTask, Task

# of outputs, or of what a KeepingTask keeps of them, and targets; or of what its `MetricInputs` prepares
Metric = Callable[[Any, Any], float]
OnOutputs = Callable[[Tensor, Tensor], None]  # the same, to observe them
_LARGEST_BATCH = 1024  # samples
_LARGE_SAMPLE_BYTES, _SMALLEST_SHARE = 4096, 16
_FEATURE_BYTES = 2**20  # features of a batch on a CPU: activations of larger ones fall out of the cache
_LOGIT_BYTES = {"cpu": 2**22, "cuda": 2**28}  # logits dominate the memory of a batch of text


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """How models are evaluated; `metrics` holds pairs of name and function.

    `text` is None unless the data are text.
    """

    task: Task
    metrics: Sequence[tuple[str, Metric]]
    numerics: Numerics
    text: Tokenizer | None
    config: ExperimentConfig

    def evaluate(
        self,
        model: nn.Module,
        samples: AnySamples,
        *,
        num_threads: int,
        on_outputs: OnOutputs | None = None,
        round: int | None = None,
    ) -> dict[str, float]:
        """Loss and metrics by name, those that are due in a round; `num_threads` applies to CPUs only."""
        # the same draws in every evaluation
        with globals_seeded(integer(self.config.seed, Purpose.MEASURING), device=self.numerics.device):
            return self._values(model, samples, num_threads, on_outputs, round)

    def _values(
        self, model: nn.Module, samples: AnySamples, num_threads: int, on_outputs: OnOutputs | None, round: int | None
    ) -> dict[str, float]:
        targets = samples.targets
        restore_outside_state(model)
        with torch.no_grad(), self.numerics.repeatable():
            found = self._kept(model, samples, num_threads)
            kept = found[0] if len(found) == 1 else torch.cat(found)
            mean = self.task.loss_of if isinstance(self.task, KeepingTask) else self.task.loss
            values = {"loss": mean(kept, targets).item()}
        if on_outputs is not None:
            on_outputs(kept, targets)
        arguments = {id(None): (kept, targets)}  # of the metrics that declare the same inputs
        for name, metric in self.metrics:
            inputs: MetricInputs | None = getattr(metric, "inputs", None)
            if inputs is not None:
                if round is not None and not inputs.is_due(self.config, round):
                    continue
                if id(inputs) not in arguments:
                    arguments[id(inputs)] = self._asked(model, samples, inputs)
            values[name] = _number(name, metric, *arguments[id(inputs)])
        return values

    def _asked(self, model: nn.Module, samples: AnySamples, inputs: MetricInputs) -> tuple[Any, Any]:
        """The arguments of metrics that ask the model."""
        evaluated = Evaluated(model=model, samples=samples, text=self.text, config=self.config, numerics=self.numerics)
        with torch.no_grad(), self.numerics.repeatable():
            return inputs.of(evaluated)

    def _kept(self, model: nn.Module, samples: AnySamples, num_threads: int) -> list[Tensor]:
        """What is kept of each batch, on the CPU, in the order of the batches."""
        numerics, task, device = self.numerics, self.task, self.numerics.device
        channels_last = numerics.takes_channels_last(model)

        def kept_of(batch: tuple[Tensor, Tensor]) -> Tensor:
            with torch.no_grad():  # grad mode is thread-local
                outputs = numerics.outputs(model, batch[0].to(device), channels_last=channels_last)
                if isinstance(task, KeepingTask):
                    outputs = task.kept(outputs, batch[1].to(device))
                return outputs.cpu()

        batches = samples.batches(self.batch_size(samples, model))
        if num_threads > 1 and device.type == "cpu" and isinstance(samples, Samples):
            # set_num_threads is thread-local too: a new thread would otherwise use all cores for its operators
            set_threads = partial(torch.set_num_threads, torch.get_num_threads())
            stream = global_stream(self.config.seed, Purpose.MEASURING)
            # again in one thread if threads shared generators or the model's own state, in no fixed order
            with suppress(Exception), stream as drawn, ThreadPoolExecutor(num_threads, initializer=set_threads) as pool:
                found = list(pool.map(kept_of, batches))
                if not drawn() and is_as_made(model):
                    return found
            restore_outside_state(model)
            batches = samples.batches(self.batch_size(samples, model))
        return [kept_of(batch) for batch in batches]

    def batch_size(self, samples: AnySamples, model: nn.Module) -> int:
        """Samples of a batch."""
        return batch_size(samples, logits=logits_of(model, self.text), device=self.numerics.device.type)


def batch_size(samples: AnySamples, *, logits: int, device: str) -> int:
    """Samples of a batch in an evaluation on this type of device; `logits` of a token, 0 unless the data are text."""
    is_cpu = device == "cpu"
    if logits:
        logit_bytes = 4 * logits * prod(samples.shape)
        return max(1, min(_LARGEST_BATCH, _LOGIT_BYTES["cpu" if is_cpu else "cuda"] // logit_bytes))
    if not is_cpu:
        return _LARGEST_BATCH
    sample_bytes = 4 * max(1, prod(samples.shape))
    batch = min(_LARGEST_BATCH, max(32, _FEATURE_BYTES // sample_bytes))
    # Images take long enough to spread over threads: aim at four batches at least.
    return batch if sample_bytes < _LARGE_SAMPLE_BYTES else min(batch, max(_SMALLEST_SHARE, -(-len(samples) // 4)))


def logits_of(model: nn.Module, text: Tokenizer | None) -> int:
    """A language model's logits of a token, which may be more than its tokenizer has tokens; 0 without text."""
    if text is None:
        return 0
    *_, head = getattr(model, "ends", (None,))
    return max(text.vocabulary_size, len(getattr(head, "weight", ())))


def _number(name: str, metric: Metric, outputs: Any, targets: Any) -> float:
    """A metric's value.

    Raises:
        ConfigError: it is anything but one number.
    """
    value: Any = metric(outputs, targets)
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        shape = f" of shape {list(value.shape)}" if isinstance(value, Tensor) else ""
        raise ConfigError(
            f"metric '{name}' gives a {type(value).__name__}{shape}; expected one number: return a float, and "
            "give each number a metric of its own."
        ) from error
