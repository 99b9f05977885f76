"""Noise, directions, scales and groups as the paper defines them; valleys of functions known in closed form."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

from fedsign.data.base import Samples
from fedsign.errors import ConfigError
from fedsign.landscape.directions import (
    NOISES,
    SPECIAL,
    Scaling,
    is_random,
    is_symmetric,
    noise,
    scaled,
    special,
    with_signs,
)
from fedsign.landscape.draws import independent
from fedsign.landscape.groups import GROUPS, mask_of
from fedsign.landscape.interpolation import between, soup_gap
from fedsign.landscape.landscape import Landscape
from fedsign.landscape.sign_ratios import same_sign_ratio, step_by_group
from fedsign.landscape.valley import asymmetry, curves, lambdas_of, sides_of, surface
from fedsign.landscape.vector import Layout
from fedsign.models.cnn import cnn
from fedsign.tasks.classification import Classification
from fedsign.tasks.regression import Regression

CONTINUOUS = {
    "gaussian": stats.norm(0, 1).cdf,
    "uniform": stats.uniform(-1, 2).cdf,
    "gaussian_1": stats.norm(1, 1).cdf,
    "uniform_01": stats.uniform(0, 1).cdf,
}
DISCRETE = {"ternary": [-1, 0, 1], "binary": [0, 1], "ones": [1]}


@pytest.mark.parametrize("name", NOISES)
def test_a_noise_has_its_distribution(name: str) -> None:
    drawn = noise(name, 20_000, seed=3).double().numpy()
    if name in CONTINUOUS:
        assert stats.kstest(drawn, CONTINUOUS[name]).pvalue > 1e-3
    else:
        values, counts = np.unique(drawn, return_counts=True)
        assert values.tolist() == DISCRETE[name]
        assert len(values) == 1 or stats.chisquare(counts).pvalue > 1e-3


def test_a_draw_belongs_to_seed_and_index() -> None:
    drawn = {(seed, index): noise("gaussian", 50, seed=seed, index=index) for seed in (0, 1) for index in (0, 1)}
    assert torch.equal(drawn[0, 1], noise("gaussian", 50, seed=0, index=1))
    assert len({tuple(each.tolist()) for each in drawn.values()}) == 4


@given(st.floats(0, 1), st.integers(1, 200), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_signs_are_replaced_on_the_fraction_that_is_asked_for(fraction: float, size: int, seed: int) -> None:
    eps, theta = noise("gaussian", size, seed=seed), noise("gaussian", size, seed=seed, index=1)
    mixed = with_signs(eps, theta, fraction=fraction, seed=seed)
    assert torch.equal(mixed.abs(), eps.abs())
    moved = mixed != eps
    assert (mixed[moved].sign() == theta[moved].sign()).all()
    num_chosen = round(fraction * size)
    agreeing = int((mixed.sign() == theta.sign()).sum())
    assert agreeing >= num_chosen
    more = with_signs(eps, theta, fraction=min(1.0, fraction + 0.2), seed=seed)
    assert torch.equal(more[moved], mixed[moved])  # nested


def test_all_signs_and_none() -> None:
    eps, theta = noise("gaussian", 99, seed=0), noise("gaussian", 99, seed=1)
    assert torch.equal(with_signs(eps, theta).sign(), theta.sign())
    assert torch.equal(with_signs(eps, theta, fraction=0.0), eps)
    zeros = torch.zeros(99)
    assert torch.equal(with_signs(eps, zeros), eps)
    with pytest.raises(ConfigError, match="from 0 to 1"):
        with_signs(eps, theta, fraction=1.5)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return cnn((1, 8, 8), 10)


def test_norm_scaled_noise_is_as_long_as_the_model_and_keeps_its_direction(model: nn.Module) -> None:
    layout = Layout.of(model)
    theta = layout.vector(model.state_dict())
    eps = noise("gaussian", layout.size, seed=0)
    found = scaled(layout, eps, theta, Scaling.NORM)
    assert found.norm().item() == pytest.approx(theta.norm().item(), rel=1e-5)
    assert torch.cosine_similarity(found, eps, dim=0).item() == pytest.approx(1, abs=1e-5)
    assert torch.equal(scaled(layout, eps, theta, Scaling.RAW), eps)


def test_filter_scaled_noise_is_as_long_as_the_model_in_each_filter(model: nn.Module) -> None:
    layout = Layout.of(model)
    theta = layout.vector(model.state_dict())
    eps = noise("gaussian", layout.size, seed=0)
    found = layout.tensors(scaled(layout, eps, theta, Scaling.FILTER))
    own, drawn = layout.tensors(theta), layout.tensors(eps)
    for name, tensor in found.items():
        for filter, its_own, its_noise in zip(tensor, own[name], drawn[name], strict=True):
            assert filter.norm().item() == pytest.approx(its_own.norm().item(), rel=1e-5)
            assert (filter * its_noise >= 0).all()


def test_noise_in_a_group_is_as_long_as_the_group_and_zero_elsewhere(model: nn.Module) -> None:
    layout = Layout.of(model)
    theta = layout.vector(model.state_dict())
    mask = mask_of("BN", model, layout)
    found = scaled(layout, noise("gaussian", layout.size, seed=0), theta, Scaling.NORM, where=mask)
    assert not found[~mask].any() and found[mask].all()
    assert found.norm().item() == pytest.approx(theta[mask].norm().item(), rel=1e-5)


def members(group: str, model: nn.Module) -> set[str]:
    layout = Layout.of(model)
    mask = mask_of(group, model, layout)
    inside = {name for name, place in layout.slices().items() if mask[place].all()}
    assert int(mask.sum()) == sum(mask[layout.slices()[name]].numel() for name in inside)  # whole tensors only
    return inside


@pytest.mark.needs("images")
def test_groups_of_a_resnet() -> None:
    from fedsign.models.resnet import resnet20

    model = resnet20((3, 8, 8), 10)
    names = {name for name, _ in model.named_parameters()}
    kinds = {path: type(module) for path, module in model.named_modules()}
    of = {
        kind: {name for name in names if issubclass(kinds[name.rpartition(".")[0]], kind)}
        for kind in (nn.Conv2d, nn.BatchNorm2d, nn.Linear)
    }
    assert members("ALL", model) == names
    assert members("CONV", model) == of[nn.Conv2d] and members("BN", model) == of[nn.BatchNorm2d]
    assert members("CLF", model) == {name for name in of[nn.Linear] if name.endswith("weight")}
    assert members("FEAT", model) == names - of[nn.Linear]
    assert members("LAYER1", model) and members("LAYER1", model) < names
    assert members("*.bias", model) == {name for name in names if name.endswith(".bias")}
    with pytest.raises(ConfigError, match="no parameters in this model"):
        mask_of("nothing.*", model, Layout.of(model))
    assert set(GROUPS) == {"ALL", "CLF", "FEAT", "LAYER1", "CONV", "BN"}


def test_the_special_directions() -> None:
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
    layout = Layout.of(model)
    theta = torch.tensor([1.0, -3.0, 0.0, 2.0, -2.0])  # weight [1, 2], bias; weight [1, 1], bias
    initial = torch.arange(5.0)
    found = {
        name: special(name, layout, theta, initial).tolist()
        for name in ("initial", "final", "sign", "sign_centered", "sgp", "sgp_centered")
    }
    assert found == {
        "initial": [0, 1, 2, 3, 4],
        "final": theta.tolist(),
        "sign": [1, -1, 0, 1, -1],
        "sign_centered": [1, -1, 0, 0, 0],  # the first weight's mean is -1, a single number is its own mean
        "sgp": [1, 0, 0, 1, 0],
        "sgp_centered": [1, 0, 0, 0, 0],
    }
    with pytest.raises(ConfigError, match="not known here"):
        special("initial", layout, theta)


def least_squares() -> tuple[nn.Module, Samples, Tensor]:
    """A linear model's mean squared error is a parabola: L(theta + d) = L + g^T d + 1/2 d^T H d, H = 2 X^T X / n."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 1, bias=False)).double()
    samples = Samples(features=torch.randn(40, 5, dtype=torch.float64), targets=torch.randn(40, dtype=torch.float64))
    return model, samples, 2 * samples.features.t() @ samples.features / 40


def test_curves_of_a_parabola() -> None:
    model, samples, hessian = least_squares()
    landscape = Landscape(model, Regression(), samples)
    theta, direction = landscape.center, torch.randn(5, dtype=torch.float64)
    residual = samples.features @ theta - samples.targets
    slope = 2 * (samples.features.t() @ residual / 40) @ direction
    lambdas = lambdas_of()
    values = curves(landscape, [direction], scales=[0.5, 2.0], lambdas=lambdas)
    assert values.error is None and values.loss.shape == (1, 2, 41)
    for scale, loss in zip([0.5, 2.0], values.loss[0], strict=True):
        step = scale * torch.from_numpy(lambdas)
        expected = residual.square().mean() + step * slope + 0.5 * step**2 * (direction @ hessian @ direction)
        assert np.allclose(loss, expected, rtol=1e-10)


def test_a_surface_of_a_paraboloid() -> None:
    model, samples, _ = least_squares()
    landscape = Landscape(model, Regression(), samples)
    first, second = (torch.randn(5, dtype=torch.float64) for _ in range(2))
    rows, columns = lambdas_of(5), lambdas_of(7)
    found = surface(landscape, first, second, rows=rows, columns=columns)
    assert found.loss.shape == (5, 7)
    for row, i in ((rows[1], 1), (rows[4], 4)):
        for column, j in ((columns[0], 0), (columns[5], 5)):
            point = landscape.center + row * first + column * second
            expected = (samples.features @ point - samples.targets).square().mean().item()
            assert found.loss[i, j] == pytest.approx(expected, rel=1e-10)


def test_the_middle_of_two_models_is_better_by_an_eighth_of_the_hessians_form() -> None:
    """(L(a) + L(b)) / 2 - L((a + b) / 2) = (b - a)^T H (b - a) / 8 for a parabola, which has no barrier."""
    model, samples, hessian = least_squares()
    landscape = Landscape(model, Regression(), samples)
    first, second = (torch.randn(5, dtype=torch.float64) for _ in range(2))
    lambdas, _, facts = between(landscape, first, second, points=31)
    expected = float((second - first) @ hessian @ (second - first) / 8)
    assert facts["midpoint_gap"] == pytest.approx(expected, rel=1e-10)
    assert facts["barrier"] == 0 and facts["figure"] == "loss"
    assert soup_gap(landscape, [first, second]) == pytest.approx(expected, rel=1e-10)
    assert lambdas[[0, -1]].tolist() == [-1, 2]


def test_a_barrier_is_what_stands_between_two_minima() -> None:
    """A network and the same one with its hidden units swapped are the same function; their middle is another."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False)).double()
    first = torch.tensor([3.0, 0, -3, 0, 2, -2, -2, 2], dtype=torch.float64)  # unit 1 sees x > 0, unit 2 x < 0
    second = torch.tensor([-3.0, 0, 3, 0, -2, 2, 2, -2], dtype=torch.float64)
    features = torch.randn(200, 2, dtype=torch.float64)
    landscape = Landscape(model, Classification(), Samples(features=features, targets=(features[:, 0] < 0).long()))
    _, _, facts = between(landscape, first, second)
    assert (facts["first"], facts["second"]) == (0.0, 0.0)
    share = (features[:, 0] < 0).double().mean().item()  # in the middle all weights are 0, and the first class is said
    assert facts["middle"] == pytest.approx(share) and facts["barrier"] == pytest.approx(share)
    assert facts["midpoint_gap"] == pytest.approx(-share)


def test_the_sides_of_a_curve() -> None:
    lambdas = np.array([-1.0, -0.5, 0.0, 0.5, 1.0])
    found = sides_of(lambdas, np.array([0.6, 0.4, 0.2, 0.2, 0.25]))
    assert found.mean_negative == pytest.approx((0.6 / 2 + 0.4 + 0.2 / 2) / 2)
    assert found.mean_positive == pytest.approx((0.2 / 2 + 0.2 + 0.25 / 2) / 2)
    assert found.asymmetry == pytest.approx(found.mean_negative - found.mean_positive)
    assert found.width_negative == pytest.approx(0.25)  # 0.2 + 0.1 is met half way to 0.4
    assert found.width_positive is None


@pytest.mark.parametrize("end", [0.5, 1.0, 3.0])
def test_the_mean_of_a_side_does_not_depend_on_how_far_the_side_reaches(end: float) -> None:
    """The mean of a line from 0 to 4 is 2, that of a constant the constant."""
    found = sides_of(np.array([-end, 0.0, end / 4, end]), np.array([0.0, 0.0, 1.0, 4.0]) + 5.0)
    assert (found.mean_negative, found.mean_positive) == (pytest.approx(5.0), pytest.approx(7.0))


def test_zero_is_a_sign_of_its_own() -> None:
    first, second = torch.tensor([0.0, -1.0, 1.0, 0.0]), torch.tensor([-1.0, -2.0, 0.0, 0.0])
    assert same_sign_ratio(first, second) == same_sign_ratio(second, first) == 0.5


def test_sides_of_what_is_not_finite() -> None:
    found = sides_of(np.array([-1.0, 0.0, 1.0]), np.array([np.inf, 0.2, np.nan]))
    assert found.width_negative == found.width_positive == 0.0
    assert not np.isfinite([found.mean_negative, found.mean_positive]).any()


def test_the_asymmetrys_interval_is_students() -> None:
    sides = [sides_of(np.array([-1.0, 0.0, 1.0]), np.array([rise, 0.0, 0.0])) for rise in (0.2, 0.4, 0.6)]
    found = asymmetry([each.asymmetry for each in sides])
    values = np.array([0.1, 0.2, 0.3])
    half = stats.t.ppf(0.975, 2) * values.std(ddof=1) / 3**0.5
    assert found is not None and found.mean == pytest.approx(0.2)
    assert (found.low, found.high) == pytest.approx((0.2 - half, 0.2 + half))


def even(model: nn.Module) -> Landscape:
    """L(theta + d) = |X d|^2 / n, which is the same to the last bit for -d: theta and the targets are 0."""
    torch.nn.init.zeros_(model[0].weight)
    features = torch.randn(40, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return Landscape(model, Regression(), Samples(features=features, targets=torch.zeros(40, dtype=torch.float64)))


@pytest.mark.parametrize("name", NOISES)
@pytest.mark.parametrize("points", [5, 41, 61])
def test_the_asymmetry_of_an_even_loss_is_exactly_0(name: str, points: int) -> None:
    landscape, lambdas = even(nn.Sequential(nn.Linear(9, 1, bias=False)).double()), lambdas_of(points)
    eps = noise(name, 9, seed=1, dtype=torch.float64)
    loss = curves(landscape, [eps], scales=[0.2, 2.0], lambdas=lambdas).loss[0]
    assert (loss > 0).any()
    assert [sides_of(lambdas, each).asymmetry for each in loss] == [0.0, 0.0]


def test_a_pair_is_the_curve_of_minus_eps_read_backwards_and_exactly_symmetric_for_any_loss() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    landscape = Landscape(
        model, Classification(), Samples(features=torch.randn(90, 6), targets=torch.randint(3, (90,)))
    )
    lambdas, eps = lambdas_of(11), noise("gaussian", landscape.layout.size, seed=0)
    one, other = curves(landscape, [eps, -eps], scales=[1.0], lambdas=lambdas).loss[:, 0]
    assert np.allclose(other, one[::-1], rtol=1e-6)
    assert abs(sides_of(lambdas, one).asymmetry) > 1e-3  # of one direction it is not
    (mean,) = independent(one[None], is_paired=True)
    assert np.allclose(mean, (one + other) / 2, rtol=1e-6)
    assert sides_of(lambdas, mean).asymmetry == 0.0


def test_pairs_are_of_noises_that_are_symmetric_and_chance_has_a_part_in_draws() -> None:
    """Mirrored draws of a symmetric noise have its distribution (Kolmogorov-Smirnov); those of another one do not."""
    for name in NOISES:
        drawn = noise(name, 4000, seed=0).numpy()
        assert is_symmetric(name) == (stats.ks_2samp(drawn, -drawn).pvalue > 0.01)
        assert is_symmetric(name, 0.0) == is_symmetric(name) and not is_symmetric(name, 0.1)
        for signs in (None, 1.0, 0.5):
            eps = [noise(name, 99, seed=0, index=index) for index in range(2)]
            if signs is not None:
                theta = torch.linspace(-1, 1, 99)
                eps = [with_signs(each, theta, fraction=signs, index=index) for index, each in enumerate(eps)]
            assert is_random(name, signs) == (not torch.equal(*eps))
    assert not any(is_symmetric(name) or is_random(name) for name in SPECIAL)


@pytest.mark.parametrize("points", [2, 4, 1])
def test_a_grid_without_zero_is_refused(points: int) -> None:
    with pytest.raises(ConfigError, match="0 being one"):
        lambdas_of(points)


def test_same_signs_and_steps_by_group() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    layout = Layout.of(model)
    first = torch.tensor([1.0, -1, 2, 2, 0, 1, 1, 1, 0, 0, 3, -3, 1])
    second = torch.tensor([2.0, -2, 1, -1, 0, 2, 3, -1, 1, 1, 4, -4, 0])
    assert same_sign_ratio(first, second) == pytest.approx(8 / 13)
    found = {row["group"]: tuple(row.values())[1:] for row in step_by_group(model, layout, first, second)}
    assert list(found) == ["BN weight", "BN bias", "CLF weight", "CLF bias", "Other weight", "Other bias"]
    # num_parameters, mean, std, ssr_start, ssr_end
    assert found["BN weight"] == (2, 0, 2, 0.5, 1)  # from (1, 1) to (3, -1): steps 2 and -2
    assert found["CLF weight"][1:] == (0, 1, 1, 1)  # from (3, -3) to (4, -4)
    assert sum(num for num, *_ in found.values()) == 13
