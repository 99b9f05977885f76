"""Loss and error of a model at many points of its parameter space.

Points are `center + coefficients @ directions`.  There are two ways to evaluate them, equal up to rounding:

- stacked: several points at once as one model with parameters [P, ...] (`torch.func`), within a memory budget;
- one by one, in a single working copy of the model: faster for convolutions on a CPU, and for models that
  `torch.func.vmap` does not support.

[Note: BatchNorm] At every point, running statistics are reset and recomputed in one pass over `statistics`, and the
point is evaluated with them (arXiv 2405.12489, section 3.2).  Without `statistics`, the model's own are kept.  The
center therefore differs from the model that a run evaluated, and both are shown.  Statistics are unweighted means over
batches of `statistics_batch` samples, as in BatchNorm with momentum=None.  Dropout is always off.

D = number of parameters, P = points, K = directions.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedsign.data.base import Samples
from fedsign.data.target import TargetKind, kind_of
from fedsign.errors import ConfigError
from fedsign.federation.aggregation import is_finite
from fedsign.landscape.vector import Layout
from fedsign.models.batch_norm import BATCH_NORMS
from fedsign.models.channels_last import laid_out, prepare
from fedsign.tasks.base import KeepingTask, Task

Array = NDArray[np.float64]
_MOST_ON_A_CPU = 32  # points per stack; larger stacks are slower
_CACHE_BYTES = 2**22  # activations beyond that fall out of a CPU's cache


@dataclass(frozen=True)
class Values:
    """Mean loss and error (share of misclassified samples) of points, [P] or [Q, P] each.

    `error` is None for outputs that are not classes.
    """

    loss: Array
    error: Array | None

    def main(self) -> tuple[str, Array]:
        """The metric of valleys with its name: the error, or the loss if there is none."""
        return ("loss", self.loss) if self.error is None else ("error", self.error)

    def arrays(self) -> dict[str, Array]:
        """The available metrics, by name."""
        return {"loss": self.loss} if self.error is None else {"loss": self.loss, "error": self.error}


class Landscape:
    """The surroundings of a model on some samples; works on a copy of the model."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        samples: Samples,
        *,
        statistics: Tensor | None = None,
        statistics_batch: int = 100,
        max_bytes: int = 2**28,
    ) -> None:
        """`statistics` are features [m, ...] for BatchNorm; without them, it keeps the model's statistics.

        `max_bytes` limits the memory of a stack of points, parameters and activations together.

        Raises:
            ConfigError: there are no samples, the model has no parameters, or it has diverged.
        """
        if not len(samples.features):
            raise ConfigError("no samples were given for the landscape, but expected at least one.")
        for name, tensor in model.state_dict().items():
            if not is_finite(tensor):
                raise ConfigError(
                    f"a model with NaN or infinite values in tensor '{name}' was given, but expected one that has "
                    "not diverged."
                )
        self.layout = Layout.of(model)
        self.center = self.layout.vector(dict(model.named_parameters()))
        self._model = copy.deepcopy(model).eval()
        self._task, self._samples, self._max_bytes = task, samples, max_bytes
        self.around: Callable[[Callable[[], Values]], Values] = lambda evaluate: evaluate()
        """Called with each evaluation of some points, in their order; returns its values."""
        norms = [each for each in self._model.modules() if isinstance(each, BATCH_NORMS) and each.track_running_stats]
        self._norms = [] if statistics is None else norms  # modules whose statistics are recomputed
        self._statistics: Sequence[Tensor] = ()
        if statistics is not None and norms:
            # nearly equal batches, because their statistics are averaged without weights
            self._statistics = statistics.tensor_split(-(-len(statistics) // statistics_batch))
        self._bytes_per_sample = _activation_bytes(self._model, samples.features[:1])
        self._is_one_by_one = self._has_slow_convolutions() or not self._can_be_stacked()
        if self._is_one_by_one:
            prepare(self._model)

    @property
    def sizes(self) -> dict[str, int]:
        """Numbers of parameters, of samples per point, and of samples for BatchNorm (0 without)."""
        return {
            "num_parameters": self.layout.size,
            "num_samples": len(self._samples.features),
            "num_statistics": sum(map(len, self._statistics)),
        }

    def along(self, directions: Sequence[Tensor], coefficients: Tensor, *, center: Tensor | None = None) -> Values:
        """Values at center + coefficients [P, K] @ directions (K of [D]); the center defaults to the model."""
        center = self.center if center is None else center
        stack = torch.stack(list(directions)).to(center)
        weights = coefficients.to(center)
        if self._is_one_by_one:
            parts = [
                self.around(partial(self._alone, torch.addmv(center, stack.t(), row)))  # [D, K] @ [K]
                for row in weights
            ]
        else:
            parts = [self.around(partial(self._stacked, center, stack, part)) for part in weights.split(self._chunk())]
        return joined(parts)

    def at(self, points: Tensor) -> Values:
        """Values at points [P, D]."""
        return self.along(
            list(points), torch.eye(len(points), dtype=points.dtype), center=torch.zeros_like(self.center)
        )

    def _has_slow_convolutions(self) -> bool:
        kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
        return self.center.device.type == "cpu" and any(isinstance(module, kinds) for module in self._model.modules())

    def _can_be_stacked(self) -> bool:
        """Whether `vmap` supports the model; both ways give the same values, so there is no need for a warning."""
        try:
            with torch.no_grad():
                points = self.layout.tensors(self.center.expand(2, -1))
                buffers = {name: buffer.expand(2, *buffer.shape) for name, buffer in self._model.named_buffers()}
                self._outputs(points, buffers, self._samples.features[:2])
        except RuntimeError:  # raised by torch.func for anything unsupported
            return False
        return True

    def _alone(self, point: Tensor) -> Values:
        """Evaluate one point in the working copy."""
        with torch.no_grad():
            own = dict(self._model.named_parameters())
            # copy_ keeps the memory format of the parameters, channels last
            torch._foreach_copy_(list(own.values()), list(self.layout.tensors(point).values()))
            for module in self._norms:
                module.reset_running_stats()
            self._collect_statistics(lambda batch: self._model(laid_out(batch)))
            outputs = (self._model(laid_out(batch)).unsqueeze(0) for batch in self._batches(1))
            return self._values(outputs)

    def _collect_statistics(self, forward: Callable[[Tensor], object]) -> None:
        """Recompute BatchNorm's statistics by [Note: BatchNorm]; `forward` runs a batch through the model."""
        for module in self._norms:
            module.train()
        for number, batch in enumerate(self._statistics, start=1):
            for module in self._norms:
                module.momentum = 1 / number  # makes the running statistics the mean over batches so far
            forward(batch)
        for module in self._norms:
            module.eval()

    def _stacked(self, center: Tensor, directions: Tensor, weights: Tensor) -> Values:
        """Evaluate several points at once."""
        with torch.no_grad():
            # one product for all points, in place of a sum of vectors for each
            points = torch.addmm(center, weights, directions)
            parameters = self.layout.tensors(points)
            buffers = self._stacked_statistics(parameters, len(points))
            batches = self._batches(len(points))
            return self._values(self._outputs(parameters, buffers, batch) for batch in batches)

    def _outputs(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], batch: Tensor) -> Tensor:
        """Outputs [P, n, ...] of a batch."""

        def call(own: dict[str, Tensor], state: dict[str, Tensor]) -> Tensor:
            outputs: Tensor = functional_call(self._model, (own, state), (batch,))
            return outputs

        return vmap(call)(parameters, buffers)

    def _stacked_statistics(self, parameters: dict[str, Tensor], num_points: int) -> dict[str, Tensor]:
        """The buffers of each point, [P, ...]; see [Note: BatchNorm]."""
        # cloned, since BatchNorm updates its statistics in place, and expanded views share memory
        buffers = {
            name: buffer.expand(num_points, *buffer.shape).clone() for name, buffer in self._model.named_buffers()
        }
        # modules hold their buffers, vmap needs them by name
        of = {id(buffer): name for name, buffer in self._model.named_buffers()}
        for module in self._norms:
            # the reset state of BatchNorm, as in reset_running_stats
            buffers[of[id(module.running_mean)]].zero_()
            buffers[of[id(module.running_var)]].fill_(1)
        self._collect_statistics(lambda batch: self._outputs(parameters, buffers, batch))  # updates them in place
        return buffers

    def _values(self, batches: Iterable[Tensor]) -> Values:
        """Values from the outputs [P, b, ...] of all batches, reduced per batch where the task supports it."""
        task, targets = self._task, self._samples.targets.to(self.center.device)
        kept: list[Tensor] = []
        start = 0
        for outputs in batches:
            if isinstance(task, KeepingTask):
                batch_targets = targets[start : start + outputs.shape[1]]
                start += outputs.shape[1]
                # reduced before the next batch is computed: a language model's logits would not fit
                outputs = torch.stack([task.kept(each, batch_targets) for each in outputs])
            kept.append(outputs)
        outputs = torch.cat(kept, dim=1)
        mean = task.loss_of if isinstance(task, KeepingTask) else task.loss
        loss = torch.stack([mean(each, targets) for each in outputs])
        is_of_classes = outputs.dim() == 3 and kind_of(targets) is TargetKind.CLASS
        error = (outputs.argmax(2) != targets).double().mean(1).cpu().numpy() if is_of_classes else None
        return Values(loss.double().cpu().numpy(), error)

    def _batches(self, num_points: int) -> Iterator[Tensor]:
        features = self._samples.features
        is_on_cpu = self.center.device.type == "cpu"
        budget = _CACHE_BYTES * min(num_points, 4) if is_on_cpu else self._max_bytes // 2
        yield from features.split(max(32, budget // max(1, num_points * self._bytes_per_sample)))

    def _chunk(self) -> int:
        """Points per stack; half of the budget is for their parameters, up to three copies of them at once."""
        fitting = max(1, self._max_bytes // 2 // (3 * self.center.numel() * self.center.element_size()))
        return min(fitting, _MOST_ON_A_CPU) if self.center.device.type == "cpu" else fitting


def joined(parts: Sequence[Values]) -> Values:
    """Concatenate values [P]."""
    errors = [part.error for part in parts if part.error is not None]
    return Values(np.concatenate([part.loss for part in parts]), np.concatenate(errors) if errors else None)


def grid(*axes: Sequence[float]) -> Tensor:
    """Coefficients [P, K] of all combinations of K axes in float64; the last axis varies fastest.

    >>> grid([0, 1], [5, 6]).tolist()
    [[0.0, 5.0], [0.0, 6.0], [1.0, 5.0], [1.0, 6.0]]
    """
    return torch.cartesian_prod(*(torch.tensor(axis, dtype=torch.float64) for axis in axes)).reshape(-1, len(axes))


def _activation_bytes(model: nn.Module, features: Tensor) -> int:
    """The largest input plus output of any layer, for one sample."""
    sizes = [0]

    def note(module: nn.Module, given: tuple[object, ...], made: object) -> None:
        tensors = [each for each in (*given, made) if isinstance(each, Tensor)]
        sizes.append(sum(each.numel() * each.element_size() for each in tensors))

    with ExitStack() as hooks, torch.no_grad():
        for module in model.modules():
            if not [*module.children()]:
                hooks.enter_context(module.register_forward_hook(note))
        model(features)
    return max(sizes)
