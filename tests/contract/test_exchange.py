"""Both exchanges with clients are equivalent: values passed within this process, and Flower messages."""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord
from torch import Tensor

from fedsign.errors import ReplyError, RoundError
from fedsign.federation.aggregation import LARGEST_VALUE, Dispersion
from fedsign.federation.exchange import DirectExchange, MaxExamples, check_finite
from fedsign.objectives.base import LocalContext, Objective
from fedsign.records import (
    CohortReply,
    CohortRequest,
    Failure,
    ObjectiveSpec,
    Role,
    Tensors,
    TrainReply,
    TrainRequest,
)
from simulations import run
from strategies.base import Strategy
from strategies.fedavg import FedAvg
from strategies.feddyn import FedDyn
from strategies.fedpan import FedPAN
from strategies.fedprox import FedProx
from strategies.fedsign import FedSign
from strategies.moon import MOON
from strategies.scaffold import SCAFFOLD
from tests.contract.test_capabilities import with_a_broken_sample
from tests.contract.test_strategies import lines

_ = with_a_broken_sample  # is named by "module:Name" below
OURS: dict[str, type[Strategy]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "feddyn": FedDyn,
    "fedsign": FedSign,
    "scaffold": SCAFFOLD,
    "moon": MOON,
    "fedpan": FedPAN,
}


class _ByMessages:
    """Has its own way with messages (Flower's), and so gets them."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        return super().aggregate_train(server_round, replies)  # type: ignore[misc, no-any-return]


for _name, _strategy in OURS.items():
    globals()[f"{_name}_by_messages"] = type(f"{_name}_by_messages", (_ByMessages, _strategy), {"__module__": __name__})


def tree(root: Path, strategy: str, **changes: Any) -> dict[str, Any]:
    return {
        "rounds": 3,
        "callbacks": [],
        "partition": {"num_clients": 6, "alpha": 1.0},
        "server": {"cohort_size": 3},
        "client": {"local_steps": 3},
        "model": {"name": "mlp", "hidden": [8]},
        "strategy": {"name": strategy},
        "results": {"root": str(root), "checkpoint_every": 1},
        **changes,
    }


@pytest.mark.parametrize("name", OURS)
def test_without_messages_a_run_has_the_same_lines_to_the_last_bit(name: str, tmp_path: Path) -> None:
    spoken = f"{__name__}:{name}_by_messages"
    assert globals()[f"{name}_by_messages"].needs_messages() and not OURS[name].needs_messages()
    assert lines(run(tree(tmp_path, name))) == lines(run(tree(tmp_path, spoken)))


@pytest.mark.parametrize("path", ["sequential", pytest.param("cohort", marks=pytest.mark.needs("cohort"))])
def test_a_client_that_diverges_is_the_same_failure_either_way(path: str, tmp_path: Path) -> None:
    """One training sample is so bright that whoever holds it sends NaN."""
    changes = {
        "data": {"name": "tests.contract.test_capabilities:with_a_broken_sample"},
        "server": {"cohort_size": 6},
        "client": {"local_epochs": 1, "path": path},
    }
    direct = run(tree(tmp_path, "feddyn", **changes))
    spoken = run(tree(tmp_path, f"{__name__}:feddyn_by_messages", **changes))
    assert any(line["failures"] for line in direct.rounds)
    for line, other in zip(direct.rounds, spoken.rounds, strict=True):
        assert line["failures"] == other["failures"]
        assert all(each["reason"].endswith("training diverged.") for each in line["failures"])
        assert (line["num_replies"], line["bytes_up"]) == (6 - len(line["failures"]), other["bytes_up"])
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert line["client_drift"] == pytest.approx(other["client_drift"], rel=1e-4)
    if path == "sequential":
        assert lines(direct) == lines(spoken)


# A model of one parameter and one buffer

ROLES = {"w": Role.PARAMETER, "mean": Role.BUFFER}
SERVED: Tensors = {"w": torch.tensor([1.0, -2.0]), "mean": torch.tensor([0.5])}


def cohort(*partitions: int) -> CohortRequest:
    return CohortRequest(round=1, cohort=partitions, tensors=SERVED, objective=ObjectiveSpec())


def reply(partition: int, **tensors: Any) -> TrainReply:
    """Client k moves w by (k, 1)."""
    model = {"w": SERVED["w"] + torch.tensor([float(partition), 1.0]), "mean": torch.tensor([1.0 * partition])}
    return TrainReply(
        round=1,
        partition=partition,
        tensors={name: torch.tensor(tensors[name]) if name in tensors else model[name] for name in model},
        roles=ROLES,
        num_examples=10 + partition,
        metrics={"train-loss": 0.1 * partition},
    )


def stacked(*replies: TrainReply) -> CohortReply:
    return CohortReply(
        round=1,
        partitions=[each.partition for each in replies],
        tensors={name: torch.stack([each.tensors[name] for each in replies]) for name in ROLES},
        roles=ROLES,
        num_examples=[each.num_examples for each in replies],
        metrics={"train-loss": [each.metrics["train-loss"] for each in replies]},
    )


def exchange(
    *results: TrainReply | CohortReply | Failure, max_examples: MaxExamples = lambda partition: 1000
) -> DirectExchange:
    def train_many(requests: Sequence[TrainRequest]) -> Iterator[TrainReply | CohortReply | Failure]:
        yield from results

    return DirectExchange(train_many, num_partitions=100, roles=ROLES, max_examples=max_examples)


def taken(link: DirectExchange, request: CohortRequest) -> list[int]:
    """The partitions of the replies that come out, in their order."""
    answers = link.train(request)
    return [
        partition
        for answer in answers
        for partition in (answer.partitions if isinstance(answer, CohortReply) else [answer.partition])
    ]


def test_the_order_of_arrival_shows_nowhere() -> None:
    request, replies = cohort(*range(20)), [reply(k) for k in range(20)]
    expected = exchange(*replies)
    assert taken(expected, request) == list(range(20))
    shuffled = random.Random(0).sample(replies, k=20)
    assert [each.partition for each in shuffled] != list(range(20))
    other = exchange(*shuffled)
    assert taken(other, request) == list(range(20))
    assert other.traffic.record() == expected.traffic.record()


def test_a_stack_is_counted_like_its_clients_one_by_one() -> None:
    """The second stack arrives first; what the server takes in is in the order of the cohort."""
    replies = [reply(k) for k in range(5)]
    one_by_one, stacks = exchange(*replies), exchange(stacked(*replies[3:]), stacked(*replies[:3]))
    assert taken(stacks, cohort(*range(5))) == taken(one_by_one, cohort(*range(5))) == [0, 1, 2, 3, 4]
    for name in ("accepted", "bytes_up", "bytes_down", "num_examples", "train_losses", "sent", "with_state"):
        assert getattr(stacks.traffic, name) == getattr(one_by_one.traffic, name), name
    assert stacks.traffic.dispersion.metrics()[0] == pytest.approx(one_by_one.traffic.dispersion.metrics()[0])
    assert stacks.traffic.dispersion.metrics()[1] == pytest.approx(one_by_one.traffic.dispersion.metrics()[1])
    assert stacks.traffic.dispersion.norms == pytest.approx(one_by_one.traffic.dispersion.norms)


def test_what_is_not_finite_is_its_own_clients_failure() -> None:
    nan = float("nan")
    bad = [reply(1, w=[nan, 0.0]), reply(3, mean=[float("inf")])]
    for link in (exchange(reply(0), bad[0], reply(2), bad[1]), exchange(stacked(reply(0), bad[0], reply(2), bad[1]))):
        assert taken(link, cohort(0, 1, 2, 3)) == [0, 2]
        assert [(each.partition, each.reason.split(" holds")[0]) for each in link.traffic.failures] == [
            (1, "tensor 'w'"),
            (3, "tensor 'mean'"),
        ]
        assert link.traffic.accepted == [0, 2]


def test_samples_beyond_what_a_client_has_are_its_own_failure() -> None:
    """Client 1 has 5 samples, and counts 11."""
    replies = [reply(k) for k in range(3)]
    for results in (replies, [stacked(*replies)]):
        link = exchange(*results, max_examples=lambda partition: 5 if partition == 1 else 100)
        assert taken(link, cohort(0, 1, 2)) == [0, 2]
        (failure,) = link.traffic.failures
        assert failure.partition == 1 and "num-examples=11; expected 5 at most" in failure.reason


def test_a_stack_of_clients_that_all_diverged_is_no_reply() -> None:
    link = exchange(stacked(reply(0, w=[float("nan")] * 2), reply(1, w=[float("nan")] * 2)))
    assert taken(link, cohort(0, 1)) == []
    assert [failure.partition for failure in link.traffic.failures] == [0, 1]


@pytest.mark.parametrize(("value", "is_taken"), [(LARGEST_VALUE, True), (2 * LARGEST_VALUE, False), (3e38, False)])
def test_finite_values_are_taken_as_long_as_the_sum_of_their_squares_is_finite(value: float, is_taken: bool) -> None:
    served = {**SERVED, "w": torch.tensor([-LARGEST_VALUE, 0.0])}
    request = CohortRequest(round=1, cohort=[1], tensors=served, objective=ObjectiveSpec())
    for answer in (reply(1, w=[value, 0.0]), stacked(reply(1, w=[value, 0.0]))):
        link = exchange(answer)
        assert taken(link, request) == ([1] if is_taken else [])
        assert ["holds values beyond 1.8e+13" in each.reason for each in link.traffic.failures] == [True] * (
            not is_taken
        )


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"w": torch.zeros(2)}, r"missing \['mean'\]"),
        ({"w": torch.zeros(3), "mean": torch.zeros(1)}, r"tensor 'w' is float32\[3\]; expected float32\[2\]"),
        ({"w": torch.zeros(2, dtype=torch.float64), "mean": torch.zeros(1)}, r"is float64\[2\]"),
    ],
)
def test_a_reply_of_another_model_is_a_failure(model: Tensors, said: str) -> None:
    link = exchange(TrainReply(round=1, partition=1, tensors=model, roles=ROLES, num_examples=1, metrics={}))
    assert taken(link, cohort(1)) == []
    with pytest.raises(ReplyError, match=said):
        raise ReplyError(link.traffic.failures[0].reason)


def test_a_client_of_which_nothing_is_heard_is_a_failure() -> None:
    link = exchange(reply(2))
    assert taken(link, cohort(1, 2)) == [2]
    assert [(each.partition, each.reason) for each in link.traffic.failures] == [(1, "the trainer gave no reply")]


def test_what_travels_besides_has_to_be_finite_too() -> None:
    with pytest.raises(ReplyError, match="tensor 'w' besides the model holds NaN"):
        check_finite({}, {"w": torch.tensor(float("nan"))})


def test_the_spread_of_a_stack_is_that_of_its_updates() -> None:
    """u = (3, 4) and (3, -4): mean (3, 0), each lies 4 from it."""
    dispersion = Dispersion()
    local = {"a": torch.tensor([[4.0], [4.0]]), "b": torch.tensor([[4.0], [-4.0]])}
    dispersion.add_stack(local, {"a": torch.tensor([1.0]), "b": torch.tensor([0.0])})
    assert dispersion.metrics() == (pytest.approx(3.0), pytest.approx(4 / 3))


class Misshapen(Objective):
    """Sends something besides that is like no parameter, if it has moved further than `reach`."""

    def __init__(self, *, reach: float = 0.0) -> None:
        self.reach = reach

    def to_server(self, next_state: Mapping[str, Tensor], context: LocalContext) -> Tensors:
        name, parameter = next(iter(context.received.items()))
        is_far = (context.unit_displacement or 0.0) > self.reach
        return {name: parameter.new_zeros(3) if is_far else parameter.clone()}


class AsksForMore(FedAvg):
    def __init__(self, *, reach: float = 0.0) -> None:
        super().__init__()
        self.reach = reach

    def objective(self, round: int) -> ObjectiveSpec:
        return ObjectiveSpec(name=f"{__name__}:Misshapen", settings={"reach": self.reach})


def failing(root: Path, path: str, *, reach: float) -> list[int]:
    """Who failed in each round, of clients of different sizes, and so with different numbers of steps."""
    client = {"local_epochs": 1, "path": path, "lr": 0.1, "optimizer": {"momentum": 0.0}}
    changes = {"strategy": {"name": f"{__name__}:AsksForMore", "reach": reach}, "server": {"cohort_size": 6}}
    done = run({**tree(root, ""), **changes, "client": client})
    assert all("besides the model came" in each["reason"] for line in done.rounds for each in line["failures"])
    return [each["client"] for line in done.rounds for each in line["failures"]]


@pytest.mark.needs("cohort")
def test_a_misshapen_tensor_besides_the_model_is_the_failure_of_those_who_sent_it_on_either_path(
    tmp_path: Path,
) -> None:
    some = failing(tmp_path, "sequential", reach=1.5)
    assert 0 < len(some) < 3 * 6  # of three rounds, six clients each
    assert failing(tmp_path, "cohort", reach=1.5) == some
    for path in ("sequential", "cohort"):
        with pytest.raises(RoundError, match=r"0 usable replies of 6.*besides the model came a tensor"):
            failing(tmp_path, path, reach=0.0)
