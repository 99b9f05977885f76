"""Partial replies: means over those who sent a tensor; tensors that nobody sent stay."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsign.config import from_dict
from fedsign.errors import ConfigError, RoundError
from fedsign.federation.aggregation import Dispersion, WeightedMean
from fedsign.federation.exchange import DirectExchange
from fedsign.partial.updates import PartialUpdates
from fedsign.records import CohortRequest, Failure, ObjectiveSpec, Role, Tensors, TrainReply, TrainRequest
from fedsign.traits import declares
from simulations.api import check
from strategies.base import Strategy
from strategies.fedavg import FedAvg
from strategies.feddyn import FedDyn
from strategies.server_optim.adam import ServerAdam
from strategies.server_optim.base import ServerOptimizer
from strategies.server_optim.sgd import ServerSGD
from tests.training.requests import request

ROLES = {"first": Role.PARAMETER, "mean": Role.BUFFER, "middle": Role.PARAMETER, "last": Role.PARAMETER}
BUFFERS = frozenset({"mean"})
PARAMETERS = [name for name, role in ROLES.items() if role is Role.PARAMETER]
SIZE = 5
NUM_CLIENTS = 7  # of the population


def model(seed: int) -> Tensors:
    rng = np.random.default_rng(seed)
    return {name: torch.from_numpy(rng.normal(size=SIZE).astype(np.float32)) for name in ROLES}


def reply(partition: int, *sent: str, seed: int | None = None, num_examples: int = 1) -> TrainReply:
    """A model drawn by seed, of which the buffer and the named parameters are sent."""
    drawn = model(partition + 1 if seed is None else seed)
    return TrainReply(
        round=1,
        partition=partition,
        tensors={name: tensor for name, tensor in drawn.items() if name in sent or name == "mean"},
        roles=ROLES,
        num_examples=num_examples,
        metrics={"train-loss": 1.0},
    )


subsets = st.lists(st.sets(st.sampled_from(PARAMETERS), min_size=1), min_size=1, max_size=6)


def exchange(
    replies: Sequence[TrainReply | Failure], *, parts: bool = True
) -> tuple[DirectExchange, Callable[[Tensors], list[TrainReply]]]:
    """An exchange whose clients answer so, and a round of it."""

    def train_many(requests: Sequence[TrainRequest]) -> Iterator[TrainReply | Failure]:
        yield from replies

    link = DirectExchange(train_many, num_partitions=NUM_CLIENTS, roles=ROLES)
    link.encoding = PartialUpdates(BUFFERS) if parts else None

    def run_round(served: Tensors) -> list[TrainReply]:
        cohort = [each.partition for each in replies]
        request = CohortRequest(round=1, cohort=cohort, tensors=served, objective=ObjectiveSpec())
        return [each for each in link.train(request) if isinstance(each, TrainReply)]

    return link, run_round


def aggregated(strategy: Strategy, replies: Sequence[TrainReply], served: Tensors, *, round: int = 1) -> Tensors:
    """The next served model, of a strategy that gets parts."""
    strategy.request(round, served, range(NUM_CLIENTS), cohort_size=len(replies), seed=0)
    result = strategy.aggregate(round, replies)
    assert result is not None
    return result


# The mean


@settings(deadline=None)
@given(subsets, st.lists(st.integers(1, 9), min_size=6, max_size=6))
def test_each_tensor_is_averaged_over_those_who_sent_it(sent: list[set[str]], weights: list[int]) -> None:
    """Against sum w_k x_k / sum w_k in float64; the server is left where the weighted deviations cancel."""
    served = model(0)
    replies = [reply(k, *names, num_examples=weights[k]) for k, names in enumerate(sent)]
    found = aggregated(FedAvg(weighting="examples"), replies, served)
    for name in ROLES:
        senders = [each for each in replies if name in each.tensors]
        if not senders:
            assert torch.equal(found[name], served[name])
            continue
        values = torch.stack([each.tensors[name].double() for each in senders])
        w = torch.tensor([each.num_examples for each in senders], dtype=torch.float64)
        torch.testing.assert_close(found[name].double(), (w @ values) / w.sum(), rtol=1e-6, atol=1e-6)
        deviation = w @ (values - found[name].double())
        assert deviation.abs().max() < 1e-5 * w.sum()


@settings(deadline=None)
@given(subsets, st.lists(st.floats(0.5, 9), min_size=6, max_size=6))
def test_a_tensors_mean_is_that_of_those_who_sent_it_alone_to_the_last_bit(
    sent: list[set[str]], weights: list[float]
) -> None:
    total = WeightedMean()
    for k, names in enumerate(sent):
        total.add(reply(k, *names).tensors, weights[k])
    found = total.result()
    for name in found:
        senders = [k for k, names in enumerate(sent) if name in {*names, "mean"}]
        alone = WeightedMean()
        for k in senders:
            alone.add({name: model(k + 1)[name]}, weights[k])
        assert torch.equal(found[name], alone.result()[name])
        assert (total.num_sent[name], total.weight_sent[name]) == (len(senders), alone.weight_sent[name])


def test_a_server_update_knows_how_many_sent_each_tensor_and_their_weight() -> None:
    class Watching(FedAvg):
        def server_update(self, aggregate: Any) -> Tensors:
            self.seen = aggregate
            return super().server_update(aggregate)

    strategy = Watching(weighting="examples")
    replies = [reply(0, "first", "last", num_examples=2), reply(1, "first", num_examples=3)]
    aggregated(strategy, replies, model(0))
    assert strategy.seen.num_sent == {"first": 2, "mean": 2, "middle": 0, "last": 1}
    assert strategy.seen.weight_sent == {"first": 5.0, "mean": 5.0, "middle": 0.0, "last": 2.0}
    assert strategy.seen.parameters == ["first", "last"] and strategy.seen.num_replies == 2


def test_a_counter_stays_the_servers() -> None:
    served = {**model(0), "mean": torch.tensor(7)}
    sent = reply(0, "first")
    found = aggregated(FedAvg(), [replace(sent, tensors={**sent.tensors, "mean": torch.tensor(9)})], served)
    assert found["mean"] == 7


# Where the server moves


@settings(deadline=None, max_examples=50)
@given(st.lists(subsets, min_size=1, max_size=4))
def test_feddyn_remembers_the_drift_of_those_who_sent(rounds: list[list[set[str]]]) -> None:
    """Against Algorithm 1 in float64 over whole models: what a client did not send is what it was served.

    h <- h + (1/K) sum over the cohort of (theta_k - theta): those who did not send add nothing.
    """
    strategy, served = FedDyn(), model(0)
    h = {name: torch.zeros(SIZE, dtype=torch.float64) for name in PARAMETERS}
    for number, sent in enumerate(rounds, start=1):
        replies = [reply(k, *names, seed=100 * number + k) for k, names in enumerate(sent)]
        theta = {name: tensor.double() for name, tensor in served.items()}
        found = aggregated(strategy, replies, served, round=number)
        for name in PARAMETERS:
            dense = [each.tensors[name].double() if name in each.tensors else theta[name] for each in replies]
            h[name] = h[name] + sum(one - theta[name] for one in dense) / NUM_CLIENTS
            senders = [each.tensors[name].double() for each in replies if name in each.tensors]
            expected = sum(senders) / len(senders) + h[name] if senders else theta[name]
            torch.testing.assert_close(found[name].double(), expected, rtol=1e-5, atol=1e-5)
            remembered = strategy.kept.get(name, torch.zeros(SIZE)).double()
            torch.testing.assert_close(remembered, h[name], rtol=1e-5, atol=1e-5)
        served = found


@pytest.mark.parametrize("rule", [ServerAdam(), ServerSGD(momentum=0.9)], ids=["adam", "momentum"])
def test_a_server_optimizer_does_not_step_what_nobody_sent(rule: ServerOptimizer) -> None:
    """A tensor moves as if the rounds in which nobody sent it had not been."""
    others = type(rule)()
    strategy, alone = FedAvg(), FedAvg()
    strategy.server_optimizer, alone.server_optimizer = rule, others
    vars(others).update({key: value for key, value in vars(rule).items() if key != "_memory"})
    served, only = model(0), model(0)
    for number, sent in enumerate([["first", "middle"], ["first"], ["first", "middle"], ["first"]]):
        replies = [reply(k, *sent, seed=10 * number + k) for k in range(2)]
        before = served
        served = aggregated(strategy, replies, served)
        if "middle" in sent:
            only = aggregated(alone, replies, only)
        else:
            assert torch.equal(served["middle"], before["middle"])
    assert torch.equal(served["middle"], only["middle"]) and not torch.equal(served["first"], only["first"])
    memory, expected = rule.state_dict(), others.state_dict()
    assert all(torch.equal(memory[key], expected[key]) for key in memory if key.endswith("/middle"))
    assert not any(key.endswith("/last") for key in memory)


# What comes back


def test_a_part_is_taken_and_counts_as_much_as_was_sent() -> None:
    link, run_round = exchange([reply(0, "first"), reply(1, "first", "last")])
    assert len(run_round(model(0))) == 2
    assert link.traffic.bytes_up == 4 * SIZE * (2 + 3) and not link.traffic.failures


@pytest.mark.needs("signs")
def test_the_figures_of_a_round_are_those_of_the_whole_models() -> None:
    """What was not sent is an update of zero."""
    from fedsign.signs.agreement import SignAgreement

    served = model(0)
    replies = [reply(0, "first"), reply(1, "first", "last"), reply(2, *PARAMETERS)]
    link, run_round = exchange(replies)
    observer = SignAgreement()
    link.observers = [observer]
    run_round(served)
    received = {name: served[name] for name in PARAMETERS}
    dispersion, signs = Dispersion(), SignAgreement()
    for each in replies:
        whole = {name: each.tensors.get(name, served[name]) for name in ROLES}
        dispersion.add(whole, received)
        signs.add(whole, received)
    assert link.traffic.dispersion.metrics() == dispersion.metrics()
    assert signs.metrics() and observer.metrics() == signs.metrics()


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"first": torch.zeros(SIZE)}, r"missing \['mean'\], unknown \[\]; expected all buffers"),
        ({"first": torch.zeros(SIZE), "mean": torch.zeros(SIZE), "x": torch.zeros(1)}, r"unknown \['x'\]"),
        ({"mean": torch.zeros(SIZE)}, "holds no parameter"),
        ({}, r"missing \['mean'\]"),
        ({"first": torch.zeros(3), "mean": torch.zeros(SIZE)}, r"is float32\[3\]; expected float32\[5\]"),
        ({"first": torch.full([SIZE], torch.nan), "mean": torch.zeros(SIZE)}, "'first' holds NaN"),
    ],
)
def test_what_is_no_part_of_the_model_is_a_failure_that_says_why(tensors: Tensors, said: str) -> None:
    link, run_round = exchange([replace(reply(0, "first"), tensors=tensors)])
    assert run_round(model(0)) == []
    with pytest.raises(RoundError, match=said):
        raise RoundError(link.traffic.failures[0].reason)


def test_a_part_is_no_reply_where_the_experiment_does_not_train_parts() -> None:
    link, run_round = exchange([reply(0, "first")], parts=False)
    assert run_round(model(0)) == []
    assert "missing ['last', 'middle']" in link.traffic.failures[0].reason


@pytest.mark.needs("robustness")
def test_an_attacker_changes_what_it_sends() -> None:
    from clients.robustness.attack import Attack

    part = from_dict({"attack": {"name": "sign_flip", "fraction": 1.0}}).attack
    served, sent = model(0), reply(0, "first")
    lie = Attack(part, seed=0, num_clients=1).after(request(served, 0), sent)
    assert isinstance(lie, TrainReply) and lie.tensors.keys() == sent.tensors.keys()
    torch.testing.assert_close(lie.tensors["first"], 2 * served["first"] - sent.tensors["first"])
    assert torch.equal(lie.tensors["mean"], sent.tensors["mean"])


# What a client must download


def test_a_client_lacks_what_has_changed_since_the_model_that_it_holds() -> None:
    """Round 1 changes first and last, round 2 first, round 3 middle; clients replied in 1, in 2, and never."""
    updates, names = PartialUpdates(BUFFERS), list(ROLES)
    served = {name: torch.zeros(1) for name in names}
    for round, accepted, changed in ((1, [4], ["first", "last"]), (2, [5], ["first"]), (3, [], ["middle"])):
        after = {name: tensor + 1 if name in changed else tensor.clone() for name, tensor in served.items()}
        updates.commit(round, accepted, before=served, after=after)
        served = after
    assert updates.changed_in == {"first": 2, "last": 1, "middle": 3}
    assert updates.lacking(4, names) == ["first", "middle", "last"]  # it has not even seen what its own round changed
    assert updates.lacking(5, names) == ["first", "middle"]
    assert updates.lacking(6, names) == names


# What cannot work


@declares(takes_model=True, trains_part=True)
def parts(module: torch.nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """Plain descent; that it trains a part is only said."""
    return torch.optim.SGD(module.parameters(), lr=lr)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"strategy": {"name": "scaffold"}}, "scaffold needs to know how far every parameter went; take another"),
        ({"strategy": {"name": "flower_fedmedian"}}, "is Flower's and needs the same tensors from every client"),
        (
            {"privacy": {"name": "central", "clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-3}},
            "privacy.name=central covers all of it with noise",
        ),
        (
            {"privacy": {"name": "local", "clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-3}},
            "privacy.name=local covers all of it with noise",
        ),
    ],
)
def test_what_cannot_do_with_parts_is_refused_before_the_run(changes: dict[str, Any], said: str) -> None:
    tree = {"client": {"optimizer": {"name": f"{__name__}:parts"}}, "model": {"name": "mlp", "hidden": [4]}, **changes}
    with pytest.raises(ConfigError, match=said) as raised:
        check(from_dict(tree))
    assert str(raised.value).startswith(f"client.optimizer.name={__name__}:parts trains a part") and "\n" not in str(
        raised.value
    )
