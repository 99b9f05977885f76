"""Matrix-free curvature of the mean loss: Hessian-vector products, trace, and extreme eigenvalues.

Trace: Hutchinson 1989, E[v^T H v] over random signs v.  Extreme eigenvalues: Lanczos' method, as in
`scipy.sparse.linalg.eigsh`.  BatchNorm uses the model's statistics and dropout is off, so the loss is a function of the
parameters alone.
"""

import copy
from collections.abc import Callable

import numpy as np
import torch
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh
from torch import Tensor, nn
from torch.func import functional_call, grad, vjp

from fedsign.data.base import Samples
from fedsign.errors import ConfigError
from fedsign.landscape.landscape import Array
from fedsign.landscape.vector import Layout
from fedsign.seeding import Purpose, generator
from fedsign.tasks.base import Task, num_terms


class Curvature:
    """The loss of a model on some samples, around its parameters; works on a copy of the model."""

    def __init__(self, model: nn.Module, task: Task, samples: Samples, *, batch: int = 1024) -> None:
        """`batch` limits memory; results depend on it only by rounding."""
        self.layout = Layout.of(model)
        self.center = self.layout.vector(dict(model.named_parameters()))
        # a copy, since eval() would change the caller's model
        self._model, self._task, self._samples, self._batch = copy.deepcopy(model).eval(), task, samples, batch
        self.on_product: Callable[[], None] = lambda: None
        """Called after each Hessian-vector product."""

    def gradient(self) -> Tensor:
        """The gradient of the mean loss, [D]."""
        return self._mean(lambda loss: grad(loss)(self.center))

    def product(self, vector: Tensor) -> Tensor:
        """H v, [D].  Reverse over reverse mode, which more of torch's operators support than forward over reverse."""
        product = self._mean(lambda loss: vjp(grad(loss), self.center)[1](vector)[0])
        self.on_product()
        return product

    def trace(self, *, draws: int = 32, seed: int = 0) -> tuple[float, float | None]:
        """Hutchinson's estimate: the mean over draws, and its standard error (None for a single draw).

        Raises:
            ConfigError: `draws` is below 1.
        """
        if draws < 1:
            raise ConfigError(f"draws={draws} was given for the trace, but expected 1 or more.")
        rng = generator(seed, Purpose.ANALYSIS, round=2)
        estimates = []
        for _ in range(draws):
            # random signs have the smallest variance among vectors of independent elements with E[v v^T] = I
            signs = torch.from_numpy(rng.choice([-1.0, 1.0], size=self.layout.size)).to(self.center)
            # summed in float64: terms of both signs nearly cancel
            estimates.append(float(signs.double() @ self.product(signs).double()))
        error = float(np.std(estimates, ddof=1)) / draws**0.5 if draws > 1 else None
        return float(np.mean(estimates)), error

    def extreme_eigenvalues(self, count: int = 1, *, tolerance: float = 1e-3, seed: int = 0) -> tuple[Array, Array]:
        """The `count` smallest and the `count` largest eigenvalues, ascending.

        Raises:
            ConfigError: the model has too few parameters, or Lanczos' method does not converge.
        """
        size = self.layout.size
        if not 1 <= count < size:
            raise ConfigError(f"{count} eigenvalues were asked for, but expected 1 or more, and less than {size}.")
        # ARPACK would start from a random vector that no seed here determines
        start = generator(seed, Purpose.ANALYSIS, round=3).standard_normal(size)
        operator = LinearOperator((size, size), matvec=self._matvec, dtype=np.float64)
        try:
            low, high = (
                np.sort(eigsh(operator, k=count, which=which, tol=tolerance, v0=start, return_eigenvectors=False))
                for which in ("SA", "LA")
            )
        except ArpackNoConvergence as error:
            raise ConfigError(
                f"Lanczos' method found {len(error.eigenvalues)} of {count} eigenvalues; raise tolerance={tolerance:g}."
            ) from error
        return low, high

    def _matvec(self, vector: Array) -> Array:
        product: Array = self.product(torch.from_numpy(vector.reshape(-1)).to(self.center)).double().cpu().numpy()
        return product

    def _mean(self, of: Callable[[Callable[[Tensor], Tensor]], Tensor]) -> Tensor:
        """The mean over batches of a quantity linear in the loss, weighted by the terms in each batch's loss."""
        total = torch.zeros_like(self.center)
        features, targets = self._samples.features, self._samples.targets
        num = num_terms(self._task, targets)
        for x, y in zip(features.split(self._batch), targets.split(self._batch), strict=True):
            total.add_(of(self._loss(x, y)).detach(), alpha=num_terms(self._task, y) / num)
        return total

    def _loss(self, features: Tensor, targets: Tensor) -> Callable[[Tensor], Tensor]:
        buffers = dict(self._model.named_buffers())

        def loss(point: Tensor) -> Tensor:
            outputs = functional_call(self._model, (self.layout.tensors(point), buffers), (features,))
            return self._task.loss(outputs, targets)

        return loss
