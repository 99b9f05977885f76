"""Users' code that draws from global generators: Python's, NumPy's, torch's.

The data set draws when it is made and whenever a sample is fetched, the model in every pass, evaluations included.
"""

import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset as TorchDataset

from fedsign.data.base import Dataset, Samples
from fedsign.errors import ConfigError
from fedsign.seeding import Purpose, global_stream
from simulations import run

CLIENT = {"local_steps": 2, "batch_size": 4}
HERE = "tests.training.test_global_generators"


def noise() -> float:
    """A number of each generator."""
    return float(random.random() + np.random.random() + torch.rand(()).item())  # noqa: NPY002


class Jittered(TorchDataset[tuple[Tensor, int]]):
    """Its features are drawn at once, its transform draws for each item."""

    def __init__(self, size: int) -> None:
        self.features = torch.tensor([[noise() for _ in range(4)] for _ in range(size)])
        self.targets = [item % 2 for item in range(size)]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.features[index] * noise(), self.targets[index]


def jittered(seed: int) -> tuple[Jittered, Jittered]:
    return Jittered(48), Jittered(16)


def drawn(seed: int) -> Dataset:
    """In memory, and large enough for several batches of an evaluation."""
    train, test = (Jittered(size) for size in (48, 2100))
    parts = [Samples(features=each.features, targets=torch.tensor(each.targets)) for each in (train, test)]
    return Dataset(train=parts[0], test=parts[1], class_names=("a", "b"))


class Noisy(nn.Module):
    def __init__(self, num_features: int, num_outputs: int) -> None:
        super().__init__()
        self.head = nn.Linear(num_features, num_outputs)

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(features + noise() + torch.randn_like(features))
        return logits


def noisy(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return Noisy(math.prod(input_shape), num_outputs)


def records(root: Path, data: str, *, scrambled_by: int, **changes: Any) -> list[Mapping[str, Any]]:
    random.seed(scrambled_by)
    np.random.seed(scrambled_by)  # noqa: NPY002
    torch.manual_seed(scrambled_by)
    before = random.getstate(), str(np.random.get_state()), torch.get_rng_state()  # noqa: NPY002
    tree = {
        "rounds": 2,
        "callbacks": [],
        "data": {"name": f"{HERE}:{data}"},
        "model": {"name": f"{HERE}:noisy"},
        "partition": {"num_clients": 3, "name": "iid"},
        "client": CLIENT,
        "server": {"cohort_size": 2},
        "results": {"root": str(root)},
    }
    done = run({**tree, **changes})
    after = random.getstate(), str(np.random.get_state()), torch.get_rng_state()  # noqa: NPY002
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])
    return done.rounds


@pytest.mark.parametrize("data", ["jittered", "drawn"])
def test_runs_do_not_depend_on_the_global_generators_and_give_them_back(data: str, tmp_path: Path) -> None:
    first = records(tmp_path, data, scrambled_by=1)
    assert records(tmp_path, data, scrambled_by=2) == first


@pytest.mark.needs("workers")
def test_workers_draw_what_one_process_draws(tmp_path: Path) -> None:
    expected = records(tmp_path, "jittered", scrambled_by=2)
    assert records(tmp_path, "jittered", scrambled_by=1, engine={"workers": 2}) == expected


COHORT = pytest.param({"path": "cohort"}, marks=pytest.mark.needs("cohort"))
RANKS = pytest.param({"sharding": {"ranks": 2}}, marks=[pytest.mark.slow, pytest.mark.needs("sharding")])


@pytest.mark.parametrize("client", [COHORT, RANKS], ids=str)
def test_stacks_and_ranks_train_data_that_were_drawn_and_refuse_what_draws_in_a_round(
    client: dict[str, Any], tmp_path: Path
) -> None:
    changes = {"client": {**CLIENT, **client}, "model": {"name": "linear"}}
    first, again, one = (
        records(tmp_path, "drawn", scrambled_by=seed, **given)
        for seed, given in ((1, changes), (2, changes), (3, {"model": {"name": "linear"}}))
    )
    assert first == again and first[-1]["loss"] == pytest.approx(one[-1]["loss"], rel=1e-5)
    for data, model in (("jittered", "linear"), ("drawn", f"{HERE}:noisy")):
        with pytest.raises(ConfigError, match=r"client\.(path=cohort|sharding\.ranks=2) was given, but"):
            records(tmp_path, data, scrambled_by=1, **{**changes, "model": {"name": model}})


def test_a_model_that_draws_is_evaluated_alike_by_any_number_of_threads() -> None:
    from fedsign.config import from_dict
    from fedsign.workload import Workload

    workload = Workload(from_dict({"data": {"name": f"{HERE}:drawn"}, "model": {"name": f"{HERE}:noisy"}}))
    model = workload.make_model()
    assert len(workload.dataset.test) > 2 * workload.evaluation.batch_size(workload.dataset.test, model)
    expected = workload.evaluate(model)
    assert all(workload.evaluate(model, num_threads=3) == expected for _ in range(5))


def test_a_stream_tells_who_has_drawn() -> None:
    draws = {"random": random.random, "numpy.random": np.random.random, "torch": lambda: torch.rand(())}
    for name, draw in draws.items():
        with global_stream(0, Purpose.TRAINING) as drawn:
            assert drawn() == []
            with global_stream(0, Purpose.MODEL):
                noise()
            assert drawn() == []
            draw()
            assert drawn() == [name]
