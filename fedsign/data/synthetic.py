"""Synthetic(alpha, beta) of FedProx: every client has a softmax model of its own.

Paper: Li et al. 2020 (arXiv 1812.06127), section 5.1 and appendix C.1.  For client k:

    y = argmax softmax(W_k x + b_k),  W_k [10 x 60] and b_k [10] ~ N(u_k, 1),  u_k ~ N(0, alpha),
    x [60] ~ N(v_k, Sigma),  Sigma diagonal with Sigma_jj = j^-1.2,  (v_k)_j ~ N(B_k, 1),  B_k ~ N(0, beta).

alpha: how much the clients' models differ; beta: how much their features differ.  With `iid`, all clients share
W, b ~ N(0, 1), and v = 0.  A client has min_size + floor(exp(N(log_size, log_size_std^2))) samples.

alpha and beta are standard deviations, as in the authors' code.  The paper can also be read as variances, which makes
no difference for the usual values 0 and 1.  Differs: the paper has 30 clients, the default here is that of
`partition.num_clients`.  Each client has its own random stream, so its samples do not depend on the number of clients.
"""

from typing import Annotated

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field

from fedsign.data.base import Dataset, Samples
from fedsign.seeding import Purpose, generator

NUM_FEATURES, NUM_CLASSES = 60, 10
_STD = np.arange(1, NUM_FEATURES + 1) ** -0.6  # sqrt(Sigma_jj)

Array = npt.NDArray[np.float64]


def synthetic(
    seed: int,
    *,
    alpha: Annotated[float, Field(ge=0)] = 1.0,
    beta: Annotated[float, Field(ge=0)] = 1.0,
    iid: bool = False,
    num_owners: Annotated[int, Field(ge=1, le=100_000)] = 50,
    min_size: Annotated[int, Field(ge=2)] = 50,
    log_size: Annotated[float, Field(ge=0, le=8)] = 4.0,
    log_size_std: Annotated[float, Field(ge=0, le=2)] = 2.0,
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1,
) -> Dataset:
    """Features [n, 60], 10 classes; the last `test_fraction` of each owner's samples (at least one) are for testing."""
    shared = _softmax_model(0.0, generator(seed, Purpose.DATA)) if iid else None
    train: list[tuple[Array, npt.NDArray[np.int64]]] = []
    test: list[tuple[Array, npt.NDArray[np.int64]]] = []
    for owner in range(num_owners):
        # from 1: stream 0 draws the shared model
        rng = generator(seed, Purpose.DATA, partition=owner + 1)
        size = min_size + int(rng.lognormal(log_size, log_size_std))
        model_mean, feature_mean = rng.normal(0, alpha), rng.normal(0, beta)
        center = np.zeros(NUM_FEATURES) if iid else rng.normal(feature_mean, 1, NUM_FEATURES)
        weight, bias = _softmax_model(model_mean, rng) if shared is None else shared
        x = center + _STD * rng.standard_normal((size, NUM_FEATURES))  # [n_k, 60]
        y = (x @ weight.T + bias).argmax(axis=1)  # softmax is monotonic
        num_train = size - max(1, int(test_fraction * size))
        train.append((x[:num_train], y[:num_train]))
        test.append((x[num_train:], y[num_train:]))
    return Dataset(
        train=_samples(train), test=_samples(test), class_names=tuple(str(label) for label in range(NUM_CLASSES))
    )


def _softmax_model(mean: float, rng: np.random.Generator) -> tuple[Array, Array]:
    """W [10, 60] and b [10], every element ~ N(mean, 1)."""
    return rng.normal(mean, 1, (NUM_CLASSES, NUM_FEATURES)), rng.normal(mean, 1, NUM_CLASSES)


def _samples(parts: list[tuple[Array, npt.NDArray[np.int64]]]) -> Samples:
    owners = np.repeat(np.arange(len(parts)), [len(y) for _, y in parts])
    return Samples(
        features=torch.from_numpy(np.concatenate([x for x, _ in parts]).astype(np.float32)),
        targets=torch.from_numpy(np.concatenate([y for _, y in parts])),
        owners=torch.from_numpy(owners),
    )
