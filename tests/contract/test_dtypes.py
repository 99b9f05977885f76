"""Every floating-point and complex type is trained, averaged, compared, stored, and sent.

The oracle knows no complex numbers: a complex weight is trained like its two parts, which is what torch's optimizers
do, and what the real inner product of penalties, norms, and noise means.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clients.trainer import check_training
from fedsign.config import from_dict
from fedsign.errors import ConfigError
from fedsign.federation.aggregation import Dispersion, WeightedMean, is_finite, norm_of
from fedsign.federation.codec import decode, encode
from fedsign.numerics import as_kind_of, as_real
from fedsign.objectives.base import LocalContext, Objective, gradient_fault
from fedsign.objectives.feddyn import FedDynObjective
from fedsign.objectives.fedprox import FedProxObjective
from fedsign.objectives.fedsign import FedSignObjective
from fedsign.objectives.scaffold import ScaffoldObjective
from fedsign.records import ObjectiveSpec
from fedsign.storage.checkpoints import load_latest, load_tensors, save_tensors
from fedsign.workload import Workload
from simulations import Run, run
from strategies.server_optim.adam import ServerAdam
from strategies.server_optim.sgd import ServerSGD

INEXACT = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
COMPLEX = INEXACT[-2:]


def drawn(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64 if not dtype.is_complex else dtype).to(dtype)


@pytest.mark.parametrize("dtype", INEXACT)
@pytest.mark.parametrize("size", [(), (3,), (2, 3), (2**17 + 3,)])
def test_means_norms_and_dispersions_are_those_of_the_parts(dtype: torch.dtype, size: tuple[int, ...]) -> None:
    models = [{"w": drawn(dtype, *size, seed=seed), "b": drawn(torch.float32, 2, seed=9 + seed)} for seed in range(3)]
    served = {"w": drawn(dtype, *size, seed=7), "b": torch.zeros(2)}
    weights = [1.0, 2.0, 5.0]
    mean, stacked = WeightedMean(), WeightedMean()
    for model, weight in zip(models, weights, strict=True):
        mean.add(model, weight)
    stacked.add_stack({name: torch.stack([model[name] for model in models]) for name in served}, weights)
    exact = sum(w * as_real(m["w"]).double() for m, w in zip(models, weights, strict=True)) / 8
    for result in (mean.result()["w"], stacked.result()["w"]):
        assert result.dtype == torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(as_real(result).double(), exact, rtol=1e-5, atol=1e-6)
    one, other = Dispersion(), Dispersion()
    assert all(one.add(model, served) for model in models)
    assert other.add_stack({name: torch.stack([model[name] for model in models]) for name in served}, served)
    updates = [
        torch.cat([(as_real(model[name]) - as_real(served[name])).double().flatten() for name in served])
        for model in models
    ]
    centre = sum(updates) / 3
    drift = (sum((each - centre).square().sum() for each in updates) / 3).sqrt() / centre.norm()
    for found in (one, other):
        assert found.norms == pytest.approx([float(each.norm()) for each in updates], rel=5e-3)
        assert found.metrics() == pytest.approx((float(centre.norm()), float(drift)), rel=5e-3)
    assert norm_of(models[0], ["w"]) == pytest.approx(float(as_real(models[0]["w"]).double().norm()), rel=1e-6)


@pytest.mark.parametrize("dtype", COMPLEX)
def test_an_infinite_or_missing_imaginary_part_is_found(dtype: torch.dtype) -> None:
    good = drawn(dtype, 3)
    assert is_finite(good) and is_finite(good.conj())
    for bad in (float("nan"), float("inf"), 2.0**45):
        spoilt = good.clone()
        spoilt[1] = complex(0.0, bad)
        assert not is_finite(spoilt, 2.0**44)


@pytest.mark.parametrize("dtype", INEXACT)
def test_every_type_is_sent_and_stored_to_the_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"w": drawn(dtype, 2, 3), "scalar": drawn(dtype), "none": drawn(dtype, 0, 4)}
    digest = save_tensors(tmp_path / "x.safetensors", tensors)
    stored = load_tensors(tmp_path / "x.safetensors", digest=digest)
    for name, tensor in tensors.items():
        sent = encode(tensor)
        for back in (decode(sent.encoding, sent.payload), stored[name]):
            assert back.dtype == dtype and back.shape == tensor.shape and torch.equal(back, tensor)


OBJECTIVES = [
    FedProxObjective(mu=0.3),
    FedDynObjective(alpha=0.3),
    ScaffoldObjective(),
    FedSignObjective(gamma=0.3),
    FedSignObjective(gamma=0.3, reduction="tensor_mean"),
]


def of_context(received: Tensor, state: Tensor, shared: Tensor) -> LocalContext:
    return LocalContext(
        received={"w": received}, state={"w": state}, shared={"w": shared}, unit_displacement=2.0, sizes={"w": 6}
    )


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda each: type(each).__name__)
def test_a_penalty_of_complex_weights_is_that_of_their_parts(objective: Objective) -> None:
    """Value, autograd's gradient, the gradient by hand, and state: all as for a real tensor [2, 3, 2]."""
    theta, *others = (drawn(torch.complex128, 2, 3, seed=seed) for seed in range(4))
    context, parts = of_context(*others), of_context(*map(as_real, others))
    free = theta.clone().requires_grad_()
    penalty, expected = objective.penalty({"w": free}, context), objective.penalty({"w": as_real(theta)}, parts)
    assert penalty is not None and expected is not None and penalty.item() == pytest.approx(expected.item())
    (gradient,) = torch.autograd.grad(penalty, free)
    by_hand, of_parts = (
        objective.penalty_gradient({"w": theta}, context),
        objective.penalty_gradient({"w": as_real(theta)}, parts),
    )
    assert by_hand is not None and of_parts is not None
    for found in (gradient, by_hand["w"]):
        torch.testing.assert_close(as_real(found), of_parts["w"])
    assert gradient_fault(objective, ["w"]) == ""
    if objective.has_state:
        after, wanted = objective.next_state({"w": theta}, context), objective.next_state({"w": as_real(theta)}, parts)
        torch.testing.assert_close(as_real(after["w"]), wanted["w"])


@pytest.mark.parametrize("optimizer", [ServerAdam, ServerSGD])
def test_a_server_optimizer_moves_each_part_of_a_complex_parameter(optimizer: type) -> None:
    ours, theirs = optimizer(), optimizer()
    served, proposals = drawn(torch.complex128, 3), [drawn(torch.complex128, 3, seed=seed) for seed in (1, 2, 3)]
    mine, parts = served, as_real(served).clone()
    for proposal in proposals:
        mine = ours.step({"w": mine}, {"w": proposal}, ["w"])["w"]
        parts = theirs.step({"w": parts}, {"w": as_real(proposal)}, ["w"])["w"]
        torch.testing.assert_close(as_real(mine), parts)


class Filter(nn.Module):
    """A complex weight between two real layers: the magnitude of a filtered signal."""

    def __init__(self, num_outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.a, self.o = nn.Linear(64, 8), nn.Linear(8, num_outputs)
        self.w = self.made((torch.randn(8, 8, dtype=torch.complex128) * 0.3).to(dtype))

    def made(self, start: Tensor) -> nn.Parameter:
        return nn.Parameter(start)

    @property
    def filter(self) -> Tensor:
        return self.w

    def forward(self, features: Tensor) -> Tensor:
        weight = self.filter
        filtered = self.a(features.flatten(1)).to(weight.dtype) @ weight
        return self.o((filtered.real.square() + filtered.imag.square() + 1e-3).sqrt().to(features.dtype))


class Parts(Filter):
    """The same, whose weight is a real tensor [8, 8, 2]."""

    def made(self, start: Tensor) -> nn.Parameter:
        return nn.Parameter(torch.view_as_real(start).contiguous())

    @property
    def filter(self) -> Tensor:
        return torch.view_as_complex(self.w)


class Cast(nn.Module):
    """A classifier in one type, between float32 at both ends."""

    def __init__(self, num_outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.o = nn.Linear(64, num_outputs).to(dtype)

    def forward(self, features: Tensor) -> Tensor:
        return self.o(features.flatten(1).to(self.o.weight.dtype)).to(features.dtype)


def filter_model(input_shape: tuple[int, ...], num_outputs: int, *, wide: bool = False) -> nn.Module:
    return Filter(num_outputs, torch.complex128 if wide else torch.complex64)


def parts_model(input_shape: tuple[int, ...], num_outputs: int, *, wide: bool = False) -> nn.Module:
    return Parts(num_outputs, torch.complex128 if wide else torch.complex64)


def cast_model(input_shape: tuple[int, ...], num_outputs: int, *, dtype: str) -> nn.Module:
    return Cast(num_outputs, getattr(torch, dtype))


def tree(root: Path, model: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "rounds": 3,
        "callbacks": [],
        "partition": {"num_clients": 4, "alpha": 1.0},
        "server": {"cohort_size": 3},
        "client": {"local_steps": 3, "lr": 0.1},
        "strategy": {"name": "fedavg"},
        "model": {**model, "name": f"{__name__}:{model['name']}"},
        "results": {"root": str(root)},
        **changes,
    }


def both(root: Path, changes: dict[str, Any], *, wide: bool = False) -> tuple[Run, Run]:
    ours = run(tree(root / "ours", {"name": "filter_model", "wide": wide}, **changes))
    return ours, run(tree(root / "theirs", {"name": "parts_model", "wide": wide}, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        *({"strategy": {"name": name}} for name in ("fedavg", "fedprox", "feddyn", "fedsign", "scaffold", "moon")),
        *(
            {"strategy": {"name": f"flower_{name}"}}
            for name in ("fedadam", "fedmedian", "krum", "fedtrimmedavg", "qfedavg")
        ),
        {"strategy": {"name": "control", "objective": "sign_push", "settings": {"sign": "random", "gamma": 1e-3}}},
        {"server": {"cohort_size": 3, "optimizer": {"name": "yogi"}}},
        {"client": {"local_steps": 3, "optimizer": {"name": "adam"}, "lr": 0.01, "clip_norm": 0.5}},
        {"client": {"local_steps": 3, "weight_decay": 0.1, "optimizer": {"name": "sgd", "momentum": 0.9}}},
        {"results": {"signs": True}},
        {"privacy": {"name": "local", "clip_norm": 0.1, "noise_multiplier": 0.0, "delta": 1e-5}},
        {"attack": {"name": "sign_flip", "fraction": 0.5}},
    ],
    ids=str,
)
def test_a_complex_parameter_trains_like_its_two_parts(changes: dict[str, Any], tmp_path: Path) -> None:
    if "results" in changes:
        changes = {"results": {"signs": True, "root": str(tmp_path)}}
    ours, theirs = both(tmp_path, changes)
    for mine, its in zip(ours.rounds, theirs.rounds, strict=True):
        assert not mine["failures"]
        assert mine["bytes_up"] == its["bytes_up"]
        for metric in ("loss", "train_loss", "update_norm", "client_drift", "weight_norm", "signs_models"):
            if its.get(metric) is not None:  # privacy withholds some
                assert mine[metric] == pytest.approx(its[metric], rel=1e-4), metric
    own, parts = ours.model().get_parameter("w"), theirs.model().get_parameter("w")
    assert (as_real(first_model(ours).get_parameter("w")) != as_real(own)).any(-1).all()
    torch.testing.assert_close(as_real(own), parts, rtol=1e-4, atol=1e-5)


@pytest.mark.needs("privacy")
@pytest.mark.parametrize("name", ["central", "local"])
def test_privacys_noise_reaches_both_parts_and_has_its_deviation(name: str, tmp_path: Path) -> None:
    """Learning rate 0 leaves the noise alone: N(0, (z C / n)^2) of the mean, or N(0, (z C)^2 / n) of local replies."""
    privacy = {"name": name, "clip_norm": 0.1, "noise_multiplier": 3.0, "delta": 1e-5}
    changes = {"privacy": privacy, "client": {"local_steps": 1, "lr": 1e-12}, "rounds": 1}
    done = run(tree(tmp_path, {"name": "filter_model"}, **changes))
    moved = as_real((done.model().get_parameter("w") - first_model(done).get_parameter("w")).detach())
    expected = 3.0 * 0.1 / (3 if name == "central" else 3**0.5)
    for part in moved.unbind(-1):  # 64 draws: four standard errors of a deviation are 4 / sqrt(128)
        assert float(part.std()) == pytest.approx(expected, rel=0.36)


def first_model(done: Run) -> nn.Module:
    return Workload(done.config).make_model()


@pytest.mark.parametrize(
    "model", [{"name": "filter_model", "wide": True}, {"name": "cast_model", "dtype": "float64"}], ids=str
)
@pytest.mark.parametrize("strategy", ["scaffold"])
def test_wide_types_keep_their_type_in_states_and_resume(model: dict[str, Any], strategy: str, tmp_path: Path) -> None:
    changes = {"strategy": {"name": strategy}, "results": {"root": str(tmp_path), "checkpoint_every": 1}}
    whole = run(tree(tmp_path, model, **changes))
    half = run(tree(tmp_path, model, **{**changes, "rounds": 2}))
    resumed = run(half.config.replace(rounds=3), resume=half.path)
    assert (resumed.path / "rounds.jsonl").read_text() == (whole.path / "rounds.jsonl").read_text()
    one, other = load_latest(whole.folder.checkpoints), load_latest(resumed.folder.checkpoints)
    assert one is not None and other is not None
    for mine, its in ((one.served, other.served), (one.strategy, other.strategy)):
        assert {name: tensor.dtype for name, tensor in mine.items()} == {name: t.dtype for name, t in its.items()}
        assert all(torch.equal(tensor, its[name]) for name, tensor in mine.items())
    assert any(tensor.dtype in (torch.complex128, torch.float64) for tensor in one.strategy.values())


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("strategy", ["scaffold", "flower_fedavg"])
def test_a_model_in_any_type_learns_as_in_float32(dtype: str, strategy: str, tmp_path: Path) -> None:
    changes = {"strategy": {"name": strategy}, "client": {"local_epochs": 2, "lr": 0.1}, "rounds": 4}
    done = run(tree(tmp_path, {"name": "cast_model", "dtype": dtype}, **changes))
    assert done.model().get_parameter("o.weight").dtype == getattr(torch, dtype)
    assert done.rounds[-1]["accuracy"] > 0.8


@pytest.mark.needs("cohort")
def test_a_stack_of_complex_weights_is_refused_and_auto_trains_them_one_by_one(tmp_path: Path) -> None:
    from clients.cohort.paths import on_path

    config = tree(tmp_path, {"name": "filter_model"}, client={"local_steps": 3, "path": "cohort"})
    with pytest.raises(ConfigError, match="complex parameter 'w'"):
        check_training(Workload(from_dict(config)), ObjectiveSpec())
    config["client"]["path"] = "auto"
    assert on_path(Workload(from_dict(config)), ObjectiveSpec()).config.client.path == "sequential"


def test_conjugated_views_have_the_kind_of_what_they_belong_to() -> None:
    values = drawn(torch.complex64, 2, 2)
    assert torch.equal(as_kind_of(values, as_real(values.conj())), values.conj())
    assert as_real(values.real) is not None and torch.equal(as_kind_of(values.real, values.real), values.real)
