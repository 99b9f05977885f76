"""Means whose bits do not depend on the order of replies."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsign.federation.aggregation import Aggregate, Dispersion, WeightedMean, in_slot_order, norm_of
from fedsign.records import CohortReply, Reply, Role, Tensors, TrainReply
from strategies.base import Strategy


def mean_of(models: list[Tensors], weights: list[float] | None = None) -> Tensors:
    total = WeightedMean()
    for model, weight in zip(models, weights or [1.0] * len(models), strict=True):
        total.add(model, weight)
    return total.result()


def random_models(num: int, size: int = 64) -> list[Tensors]:
    """Models whose elements spread over six orders of magnitude, so that the order of a sum shows."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(num, size)) * 10.0 ** rng.integers(-3, 3, size=(num, size))
    return [{"w": torch.from_numpy(row.astype(np.float32))} for row in values]


@given(st.integers(0, 9).flatmap(lambda num: st.permutations(range(num))))
def test_every_order_of_arrival_gives_the_order_of_the_slots(slots: list[int]) -> None:
    assert list(in_slot_order((slot, f"reply {slot}") for slot in slots)) == [f"reply {k}" for k in range(len(slots))]


def test_a_reply_goes_out_as_soon_as_its_slot_is_next() -> None:
    def arrivals():  # type: ignore[no-untyped-def]
        for slot in (1, 0, 2):
            taken.append(slot)
            yield slot, slot

    taken: list[int] = []
    ordered = in_slot_order(arrivals())
    assert (next(ordered), taken) == (0, [1, 0])
    assert (next(ordered), taken) == (1, [1, 0])


def test_the_order_of_a_plain_sum_shows_in_its_bits() -> None:
    """1 + 1e8 rounds to 1e8 in float32 (spacing 8 there), so the order decides between 0 and 1."""
    one, large = torch.tensor(1.0), torch.tensor(1e8)
    assert ((one + large) - large).item() == 0.0
    assert ((large - large) + one).item() == 1.0
    models = random_models(8)
    assert not torch.equal(mean_of(models)["w"], mean_of(models[::-1])["w"])


@given(st.permutations(range(8)), st.sampled_from([None, [3.0, 1.0, 7.0, 2.0, 5.0, 11.0, 4.0, 6.0]]))
def test_the_mean_has_the_same_bits_whoever_answers_first(slots: list[int], weights: list[float] | None) -> None:
    models = random_models(8)
    expected = mean_of(models, weights)
    total = WeightedMean()
    for model, weight in in_slot_order((k, (models[k], (weights or [1.0] * 8)[k])) for k in slots):
        total.add(model, weight)
    assert torch.equal(total.result()["w"], expected["w"])


def test_weights_count() -> None:
    """(1 * 1 + 3 * 4) / (1 + 3) = 13/4, every step exact in binary."""
    total = WeightedMean()
    total.add({"w": torch.tensor([1.0])}, 1.0)
    total.add({"w": torch.tensor([4.0])}, 3.0)
    assert (total.count, total.num_sent, total.weight_sent) == (2, {"w": 2}, {"w": 4.0})
    assert total.result()["w"].item() == 3.25


@pytest.mark.parametrize("num", [2, 10, 100])
def test_the_mean_is_the_float64_mean_up_to_float32_rounding(num: int) -> None:
    """Each of the K terms passes at most K additions, one product and one division, each of relative error
    u = 2^-24; to first order the error is below (K + 2) u sum_k w_k |x_k| / sum_k w_k (Higham 2002, 4.2)."""
    models = random_models(num)
    weights = np.arange(1.0, num + 1)
    values = np.stack([model["w"].numpy() for model in models]).astype(np.float64)
    exact = weights @ values / weights.sum()
    bound = 1.01 * (num + 2) * 2.0**-24 * (weights @ np.abs(values)) / weights.sum()
    mean = mean_of(models, weights.tolist())["w"]
    assert mean.dtype == torch.float32
    assert (np.abs(mean.double().numpy() - exact) <= bound).all()


@pytest.mark.parametrize(("dtype", "num"), [(torch.float16, 4096), (torch.bfloat16, 512)], ids=str)
def test_half_precision_is_summed_in_float32(dtype: torch.dtype, num: int) -> None:
    """With p bits of significand, 2^p + 1 rounds to 2^p: the plain sum of ones stops at 2^11 (float16) or
    2^8 (bfloat16), so that the mean of twice as many models of ones would be 1/2."""
    one = torch.ones(1, dtype=dtype)
    naive = torch.zeros(1, dtype=dtype)
    for _ in range(num):
        naive += one
    assert (naive / num).item() == 0.5
    mean = mean_of([{"w": one}] * num)["w"]
    assert (mean.item(), mean.dtype) == (1.0, torch.float32)  # whoever stores it rounds it


def test_a_half_precision_mean_does_not_overflow_on_the_way() -> None:
    """60,000 + 60,000 exceeds float16's largest number, 65,504; their mean does not."""
    model = {"w": torch.tensor([60_000.0], dtype=torch.float16)}
    assert mean_of([model, model])["w"].item() == 60_000.0


def test_float64_stays_float64() -> None:
    """1 + 2^-40 needs 41 bits: float32 would lose it."""
    models = [{"w": torch.tensor([1.0 + 2.0**-40], dtype=torch.float64)}] * 2
    assert mean_of(models)["w"].item() == 1.0 + 2.0**-40


def test_counters_are_kept_from_the_first_model() -> None:
    first = {"n": torch.tensor(7), "flag": torch.tensor([True, False]), "w": torch.tensor(1.0)}
    second = {"n": torch.tensor(100), "flag": torch.tensor([False, False]), "w": torch.tensor(3.0)}
    mean = mean_of([first, second], [2.0, 2.0])
    assert (mean["n"].item(), mean["n"].dtype) == (7, torch.int64)
    assert (mean["flag"].tolist(), mean["flag"].dtype) == ([True, False], torch.bool)
    assert mean["w"].item() == 2.0


@pytest.mark.parametrize("weight", [1.0, 3.0, 29.0, 1437.0])
def test_the_mean_of_one_model_is_that_model(weight: float) -> None:
    (model,) = random_models(1, size=2000)
    assert torch.equal(mean_of([model], [weight])["w"], model["w"])


def test_models_that_are_added_are_not_changed() -> None:
    models = [{"w": torch.tensor([1.0])}, {"w": torch.tensor([2.0])}]
    mean_of(models)
    assert [model["w"].item() for model in models] == [1.0, 2.0]


class ByPartition(Strategy):
    """Replies have weights of its own, where the setting says uniform."""

    def weight(self, reply: TrainReply) -> float:
        return 1.0 + reply.partition


@pytest.mark.parametrize(
    ("strategy", "mean"),
    [
        (Strategy(), 2.0),
        (Strategy(weighting="examples"), 3.0),
        (Strategy(weights=(3.0, 1.0)), 1.0),
        (ByPartition(), 8 / 3),
    ],
    ids=["uniform", "examples", "given", "own"],
)
def test_each_way_of_weighting_replies_shows_in_the_mean(strategy: Strategy, mean: float) -> None:
    """Of 0 with one sample and 4 with three."""
    replies = [
        TrainReply(
            round=1, partition=partition, tensors={"w": torch.tensor([value])}, roles={}, num_examples=num, metrics={}
        )
        for partition, (value, num) in enumerate([(0.0, 1), (4.0, 3)])
    ]
    strategy.request(1, {"w": torch.zeros(1)}, range(2), cohort_size=2, seed=0)
    served = strategy.aggregate(1, replies)
    assert served is not None and served["w"].item() == pytest.approx(mean)


class Quarters(Strategy):
    """Leaves out every fourth client."""

    def weight(self, reply: TrainReply) -> float:
        return float(reply.partition % 4)


@pytest.mark.parametrize("in_stacks", [(7,), (4, 3), (1, 4, 2), (1,) * 7])
def test_a_reply_of_weight_zero_counts_nowhere_in_replies_and_stacks(in_stacks: tuple[int, ...]) -> None:
    """sum k w_k / sum w_k of models and auxiliary tensors, over clients 0 to 6 with w_k = k mod 4."""
    values = torch.arange(7.0, dtype=torch.float64)[:, None]
    replies: list[Reply] = []
    start = 0
    for size in in_stacks:
        rows = slice(start, start + size)
        stack = CohortReply(
            round=1,
            partitions=range(7)[rows],
            tensors={"w": values[rows]},
            roles={"w": Role.PARAMETER},
            num_examples=[1] * size,
            metrics={},
            extra={"w": 10 * values[rows]},
        )
        replies += stack.replies() if size == 1 else [stack]
        start += size
    strategy, seen = Quarters(), list[Aggregate]()
    strategy.server_update = lambda aggregate: seen.append(aggregate) or aggregate.mean  # type: ignore[method-assign, func-returns-value]
    strategy.request(1, {"w": torch.zeros(1, dtype=torch.float64)}, range(7), cohort_size=7, seed=0)
    strategy.aggregate(1, iter(replies))
    expected = sum(k * (k % 4) for k in range(7)) / sum(k % 4 for k in range(7))
    (aggregate,) = seen
    assert aggregate.mean["w"].item() == pytest.approx(expected, rel=1e-12)
    assert aggregate.extra["w"].item() == pytest.approx(10 * expected, rel=1e-12)
    assert (aggregate.num_replies, aggregate.num_sent, aggregate.weight_sent) == (5, {"w": 5}, {"w": 9.0})
    assert strategy.left_out == [0, 4]


def test_the_mean_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no models"):
        WeightedMean().result()


def test_client_drift_of_opposite_updates_is_their_distance_over_the_mean() -> None:
    """u = (3, 4) and (3, -4): mean (3, 0), each lies 4 from it: drift 4 / 3."""
    dispersion = Dispersion()
    for sign in (1.0, -1.0):
        local = {"a": torch.tensor([4.0]), "b": torch.tensor([4.0 * sign])}
        dispersion.add(local, {"a": torch.tensor([1.0]), "b": torch.tensor([0.0])})
    assert dispersion.metrics()[0] == pytest.approx(3.0)
    assert dispersion.metrics()[1] == pytest.approx(4 / 3)


def test_clients_that_move_alike_do_not_drift_and_those_that_cancel_out_have_no_drift() -> None:
    alike, canceling = Dispersion(), Dispersion()
    for sign in (1.0, -1.0):
        alike.add({"a": torch.tensor([2.0])}, {"a": torch.zeros(1)})
        canceling.add({"a": torch.tensor([2.0 * sign])}, {"a": torch.zeros(1)})
    assert alike.metrics() == (2.0, 0.0)
    assert canceling.metrics() == (0.0, None)
    assert Dispersion().metrics() == (None, None)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    st.booleans(),
)
def test_stacks_of_any_sizes_give_the_mean_of_their_models(
    sizes: list[int], dtype: torch.dtype, weighted: bool
) -> None:
    """Against NumPy's average in float64; counters stay the first model's."""
    num = sum(sizes)
    rng = np.random.default_rng(num)
    values, weights = rng.normal(size=(num, 3, 2)), rng.integers(1, 9, size=num).astype(float)
    weights = weights if weighted else np.ones(num)
    stack = {"w": torch.from_numpy(values).to(dtype), "n": torch.arange(num)}
    total, start = WeightedMean(), 0
    for size in sizes:
        rows = slice(start, start + size)
        total.add_stack({name: tensor[rows] for name, tensor in stack.items()}, weights[rows].tolist())
        start += size
    mean = total.result()
    expected = np.average(stack["w"].double().numpy(), axis=0, weights=weights)
    tolerance = 4 * torch.finfo(dtype).eps
    np.testing.assert_allclose(mean["w"].double().numpy(), expected, rtol=tolerance, atol=tolerance)
    assert (mean["w"].dtype, mean["n"].item(), total.count) == (torch.promote_types(dtype, torch.float32), 0, num)


def test_a_stack_of_one_is_that_model_to_the_last_bit() -> None:
    (model,) = random_models(1, size=2000)
    total = WeightedMean()
    total.add_stack({"w": model["w"][None]}, [29.0])
    assert torch.equal(total.result()["w"], model["w"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_tensors_are_walked_block_by_block_to_the_same_spread(dtype: torch.dtype) -> None:
    """Against the definition in float64; 300,000 elements are two blocks and a part of one."""
    rng = np.random.default_rng(0)
    models = torch.from_numpy(rng.normal(size=(4, 3, 100_000))).to(dtype)
    dispersion, stacked = Dispersion(), Dispersion()
    for model in models[1:]:
        dispersion.add({"w": model}, {"w": models[0]})
    stacked.add_stack({"w": models[1:]}, {"w": models[0]})
    updates = (models[1:] - models[0]).double().numpy().reshape(3, -1)
    mean = updates.mean(0)
    drift = np.sqrt(((updates - mean) ** 2).sum(1).mean()) / np.linalg.norm(mean)
    for found in (dispersion, stacked):
        assert found.metrics()[0] == pytest.approx(np.linalg.norm(mean), rel=1e-5)
        assert found.metrics()[1] == pytest.approx(drift, rel=1e-5)


def test_models_of_counters_alone_and_of_nothing_keep_the_first() -> None:
    for model in ({"n": torch.tensor(7)}, {}):
        assert mean_of([model, {name: tensor + 1 for name, tensor in model.items()}], [558.0, 2.0]) == model


@pytest.mark.parametrize("size", [20, 400])  # 400 x 400 are more than a block
def test_a_models_layout_in_memory_does_not_show_in_its_spread(size: int) -> None:
    models = torch.from_numpy(np.random.default_rng(0).normal(size=(3, size, size))).float()
    metrics = []
    for tensors in (list(models), [model.t().contiguous().t() for model in models]):
        assert tensors[0].is_contiguous() == (not metrics)
        dispersion, stacked = Dispersion(), Dispersion()
        for model in tensors[1:]:
            dispersion.add({"w": model}, {"w": tensors[0]})
        stacked.add_stack({"w": torch.stack(tensors[1:])}, {"w": tensors[0]})
        metrics += [dispersion.metrics(), stacked.metrics()]
    assert metrics[0][1] is not None and metrics[0][1] > 0.1
    for other in metrics[1:]:
        assert other == pytest.approx(metrics[0], rel=1e-5)


def test_a_tensor_that_was_not_sent_counts_as_one_that_did_not_move() -> None:
    """Bit for bit, without a sum of its size."""
    received = {"sent": torch.randn(400, 400), "left": torch.randn(500, 400)}
    left_out, copied = Dispersion(), Dispersion()
    for seed in range(2):
        sent = received["sent"] + torch.randn(400, 400, generator=torch.Generator().manual_seed(seed))
        left_out.add({**received, "sent": sent}, received)
        copied.add({"sent": sent, "left": received["left"].clone()}, received)
    assert left_out._large_sums.keys() == {"sent"} and left_out.norms == copied.norms
    assert left_out.metrics() == copied.metrics() == left_out.metrics()


def test_norms_through_a_buffer_have_the_bits_of_torchs() -> None:
    tensors = {"small": torch.randn(7), "large": torch.randn(400, 400), "half": torch.randn(500, 500).bfloat16()}
    tensors |= {"scalar": torch.tensor(3.0), "transposed": torch.randn(300, 400).T}
    norms = torch._foreach_norm(list(tensors.values()), 2, dtype=torch.float64)
    assert norm_of(tensors, tensors) == sum(each.item() ** 2 for each in norms) ** 0.5
