"""Hypergradients: exact or unbiased as claimed, with the derived second moments, optimizer state included."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedsign.bilevel import directions
from fedsign.bilevel.descent import GradientDescent
from fedsign.bilevel.estimate import Hypergradient, Method
from fedsign.bilevel.forward_gradient import chunk_size, fg2u, fg2u_zo, forward_exact, slopes_along
from fedsign.bilevel.hypergradients import hessian_free, neumann, rgu, trgu
from fedsign.bilevel.unroll import Inner, Problem, Tree, final_state, pushed
from fedsign.bilevel.updates import Adam, Sgd, Update, parameters_of
from fedsign.errors import ConfigError

UPDATES = {"momentum": Sgd(momentum=0.9), "adam": Adam()}


def random_problem(update: Update, *, seed: int = 0, depth: int = 6) -> tuple[Problem, Tree]:
    """Weights of a small tanh network, trained on data that are learned, with a learned start, rate and decay."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    target, probe, judge, begin = normal(5, 2), normal(7, 3), normal(7, 2), normal(3, 2)

    def loss(own: Tree, meta: Tree, index: Tensor) -> Tensor:
        outputs = torch.tanh(meta["features"][index] @ own["w"]) + own["b"]
        decay = torch.nn.functional.softplus(meta["decay"]) * own["w"].square().sum()
        return (outputs - target[index]).square().mean() + decay

    inner = GradientDescent(
        start=lambda meta: {"w": begin + meta["start"], "b": begin.new_zeros(2)},
        loss=loss,
        update=update,
        rate=lambda meta: meta["rate"].exp(),
        objective_data=torch.arange(5),
    )
    data = [torch.randint(0, 5, (4,), generator=draw) for _ in range(depth)]

    def outer(state: Tree, meta: Tree) -> Tensor:
        return (torch.tanh(probe @ state["w"]) + state["b"] - judge).square().mean() + 0.1 * meta[
            "decay"
        ].square().sum()

    meta = {
        "features": normal(5, 3),
        "start": 0.1 * normal(3, 2),
        "rate": torch.tensor(-2.5, dtype=torch.float64),
        "decay": torch.tensor(-3.0, dtype=torch.float64),
    }
    return Problem(inner=inner, data=data, outer=outer), meta


def by_differences(problem: Problem, meta: Tree, step: float = 1e-5) -> Tree:
    """Central differences of h, coordinate by coordinate: an error of about step^2."""

    def value(at: Tree) -> float:
        return float(problem.outer(final_state(problem, at), at))

    found = {}
    for key, each in meta.items():
        flat = torch.zeros(each.numel(), dtype=each.dtype)
        for index in range(each.numel()):
            move = torch.zeros(each.numel(), dtype=each.dtype)
            move[index] = step
            up, down = (each + sign * move.reshape(each.shape) for sign in (1, -1))
            flat[index] = (value({**meta, key: up}) - value({**meta, key: down})) / (2 * step)
        found[key] = flat.reshape(each.shape)
    return found


def flat(tree: Tree) -> Tensor:
    return torch.cat([each.flatten() for each in tree.values()])


def taken(method: Method, problem: Problem, meta: Tree, seed: int = 0) -> Hypergradient:
    return method(problem, meta, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("method", [rgu, forward_exact, lambda: trgu(truncated_steps=6)])
def test_exact_methods_agree_with_finite_differences(method: Callable[[], Method], seed: int, update: Update) -> None:
    problem, meta = random_problem(update, seed=seed)
    expected = flat(by_differences(problem, meta))
    assert expected.norm() > 1e-3
    torch.testing.assert_close(flat(taken(method(), problem, meta).gradient), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_the_optimizers_memory_carries_its_tangent(update: Update) -> None:
    """Without the memory's tangents the slopes are wrong by far more than rounding: the test above is not vacuous."""
    problem, meta = random_problem(update)

    class Forgetful(GradientDescent):
        def push(self, state: Tree, tangents: Tree, meta: Tree, along: Tree, data: object) -> tuple[Tree, Tree]:
            known = {key: torch.zeros_like(each) for key, each in tangents.items()} | parameters_of(tangents)
            return Inner.push(self, state, known, meta, along, data)

    inner = problem.inner
    assert isinstance(inner, GradientDescent)
    fields = {name: getattr(inner, name) for name in GradientDescent.__slots__}
    exact, forgetful = (
        taken(forward_exact(), replace(problem, inner=each), meta) for each in (inner, Forgetful(**fields))
    )
    assert (flat(exact.gradient) - flat(forgetful.gradient)).norm() > 0.05 * flat(exact.gradient).norm()


def test_sgd_and_adam_are_torchs() -> None:
    draw = torch.Generator().manual_seed(1)
    gradients = torch.randn(5, 4, generator=draw, dtype=torch.float64)
    for ours, theirs in (
        (Sgd(momentum=0.9), lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9)),
        (Adam(), lambda given: torch.optim.Adam(given, lr=0.1)),
    ):
        weights = torch.ones(4, dtype=torch.float64)
        parameter = torch.nn.Parameter(weights.clone())
        optimizer, state = theirs([parameter]), ours.begin({"w": weights})
        for gradient in gradients:
            state = ours.apply(state, {"w": gradient}, 0.1)
            parameter.grad = gradient.clone()
            optimizer.step()
        torch.testing.assert_close(state["w"], parameter.detach())


def small_problem() -> tuple[Problem, Tree]:
    """N = 8 meta-parameters: 256 Rademacher vectors."""
    problem, meta = random_problem(UPDATES["momentum"])
    whole = dict(meta)
    free = {"start": meta["start"], "rate": meta["rate"], "decay": meta["decay"]}
    inner = problem.inner
    assert isinstance(inner, GradientDescent)
    start, loss = inner.start, inner.loss
    narrowed = replace(
        inner,
        start=lambda given: start({**whole, **given}),
        loss=lambda own, given, data: loss(own, {**whole, **given}, data),
    )
    return replace(problem, inner=narrowed), free


def test_over_all_rademacher_vectors_mean_and_second_moment_are_exact() -> None:
    """E g_hat = g and E |g_hat|^2 = ((N + b - 1) / b) |g|^2, b = 1: N |g|^2."""
    problem, meta = small_problem()
    size = flat(meta).numel()
    gradient = flat(taken(rgu(), problem, meta).gradient)
    signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=size)), dtype=torch.float64)
    parts = signs.split([each.numel() for each in meta.values()], dim=1)
    vectors = {key: part.reshape(-1, *meta[key].shape) for key, part in zip(meta, parts, strict=True)}
    slopes = slopes_along(problem, meta, vectors, memory_bytes=2**30).slopes
    estimates = slopes[:, None] * signs
    torch.testing.assert_close(estimates.mean(0), gradient, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(estimates.square().sum(1).mean(), size * gradient.square().sum(), atol=0, rtol=1e-12)


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
@pytest.mark.parametrize("count", [1, 4])
def test_the_second_moment_of_random_directions_is_the_formulas(kind: directions.Kind, count: int) -> None:
    """((N + b -+ 1) / b) |g|^2 within 4 %, over 20,000 estimates of a gradient that is known."""
    gradient = torch.randn(12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    drawn = directions.draw(kind, {"phi": gradient}, count=20_000 * count, generator=torch.Generator().manual_seed(4))
    vectors = drawn["phi"].reshape(20_000, count, 12)
    estimates = torch.einsum("rbn,n,rbm->rm", vectors, gradient, vectors) / count
    expected = 1 + directions.relative_variance(kind, size=12, count=count)
    assert expected == pytest.approx((12 + count + (1 if kind == "gaussian" else -1)) / count)
    measured = estimates.square().sum(1).mean() / gradient.square().sum()
    assert float(measured) == pytest.approx(expected, rel=0.04)


def test_the_reported_variance_is_that_of_the_mean() -> None:
    """Its mean over many estimates is (N - 1) / b |g|^2; over 100 estimates the standard error is about 4 %."""
    problem, meta = small_problem()
    gradient = flat(taken(rgu(), problem, meta).gradient)
    found = [taken(fg2u(num_directions=8), problem, meta, seed).variance for seed in range(100)]
    mean = sum(each for each in found if each is not None) / len(found)
    expected = directions.relative_variance("rademacher", size=8, count=8) * float(gradient.square().sum())
    assert mean == pytest.approx(expected, rel=0.1)
    assert taken(fg2u(num_directions=1), problem, meta).variance is None
    assert taken(rgu(), problem, meta).variance == 0


def test_a_target_of_the_variance_says_how_many_directions_there_are() -> None:
    problem, meta = small_problem()
    assert taken(fg2u(target_variance=0.5), problem, meta).num_directions == 14  # (8 - 1) / 14 = 0.5
    assert taken(fg2u(target_variance=0.5, directions="gaussian"), problem, meta).num_directions == 18


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_chunks_give_what_all_directions_at_once_give(update: Update) -> None:
    problem, meta = random_problem(update)
    assert chunk_size(problem, meta, memory_bytes=1) == 1
    assert chunk_size(problem, meta, memory_bytes=2**30) > 10
    one_by_one, together = (taken(fg2u(num_directions=10, memory_bytes=memory), problem, meta) for memory in (1, 2**30))
    torch.testing.assert_close(flat(one_by_one.gradient), flat(together.gradient), atol=1e-13, rtol=1e-12)


def test_differences_in_place_of_tangents_give_the_same_estimate() -> None:
    """The same directions; the difference quotient errs by about epsilon."""
    problem, meta = random_problem(UPDATES["momentum"])
    tangents, differences = (
        taken(method, problem, meta) for method in (fg2u(num_directions=5), fg2u_zo(num_directions=5, epsilon=1e-6))
    )
    torch.testing.assert_close(flat(differences.gradient), flat(tangents.gradient), atol=1e-4, rtol=1e-4)


def test_nodes_of_a_quadrature_stand_for_a_normal_distribution() -> None:
    """The mean of v v^T is c I, c = sum_i w_i x_i^2 on one axis, written out here; 1 from 8 nodes on."""
    for each_axis, expected in ((4, 2.78), (6, 1.14), (8, 1.002), (12, 1.0)):
        axis = [-5 + 10 * index / (each_axis - 1) for index in range(each_axis)]
        weights = [math.exp(-(x**2) / 2) for x in axis]
        scale = sum(weight * x**2 for weight, x in zip(weights, axis, strict=True)) / sum(weights)
        assert scale == pytest.approx(expected, abs=0.005)
        meta = {"a": torch.zeros(2, dtype=torch.float64), "b": torch.zeros((), dtype=torch.float64)}
        vectors = directions.quadrature(meta, count=each_axis**3)
        assert {key: each.shape for key, each in vectors.items()} == {"a": (each_axis**3, 2), "b": (each_axis**3,)}
        nodes = torch.cat([vectors["a"], vectors["b"][:, None]], 1)
        torch.testing.assert_close(nodes.T @ nodes / len(nodes), scale * torch.eye(3, dtype=torch.float64))


def test_a_black_box_of_few_meta_parameters_is_differenced_along_the_nodes_of_a_quadrature() -> None:
    """The authors' sum_i w_i (h(phi + epsilon v_i) - h(phi)) v_i / epsilon, of a linear f: equal up to the step
    size.
    """

    class Box(Inner):
        def initial(self, meta: Tree) -> Tree:
            return {"u": torch.stack([(meta["a"] * meta["b"]).sin(), meta["b"].exp()])}

        def step(self, state: Tree, meta: Tree, data: object) -> Tree:
            raise AssertionError("there are no steps")

    problem = Problem(inner=Box(), data=[], outer=lambda state, _: state["u"].sum())
    meta = {"a": torch.tensor(0.7, dtype=torch.float64), "b": torch.tensor(0.3, dtype=torch.float64)}
    found = taken(fg2u_zo(num_directions=144, directions="quadrature"), problem, meta)
    axis, epsilon = torch.linspace(-5, 5, 12, dtype=torch.float64), 1e-4
    nodes = torch.cartesian_prod(axis, axis)
    weights = torch.softmax(-nodes.square().sum(1) / 2, 0)
    a, b = (flat(meta) + epsilon * nodes).T
    moved = (a * b).sin() + b.exp()
    still = (meta["a"] * meta["b"]).sin() + meta["b"].exp()
    authors = (weights * (moved - still) / epsilon) @ nodes
    torch.testing.assert_close(flat(found.gradient), authors, atol=0, rtol=1e-6)
    torch.testing.assert_close(flat(found.gradient), flat(by_differences(problem, meta)), atol=0, rtol=1e-4)
    assert found.variance == 0 and found.num_directions == 144


def test_a_quadrature_says_how_many_nodes_it_takes() -> None:
    problem, meta = small_problem()  # 8 meta-parameters
    assert taken(fg2u_zo(num_directions=256, directions="quadrature"), problem, meta).num_directions == 256
    for count in (1, 32, 255):
        with pytest.raises(ConfigError, match=rf"num_directions={count} .* expected n\^8"):
            taken(fg2u_zo(num_directions=count, directions="quadrature"), problem, meta)


def test_a_truncated_reverse_takes_the_state_before_its_steps_as_given() -> None:
    """The start's gradient is 0, and the others are those of the last steps alone."""
    problem, meta = random_problem(UPDATES["momentum"])
    found = taken(trgu(truncated_steps=2), problem, meta)
    assert found.gradient["start"].abs().max() == 0
    assert found.gradient["features"].abs().max() > 0
    later = replace(problem, data=problem.data[-2:])
    state = final_state(replace(problem, data=problem.data[:-2]), meta)

    class From(Inner):
        def initial(self, meta: Tree) -> Tree:
            return state

        def step(self, state: Tree, meta: Tree, data: object) -> Tree:
            return problem.inner.step(state, meta, data)

    expected = taken(rgu(), replace(later, inner=From()), meta)
    torch.testing.assert_close(flat(found.gradient), flat(expected.gradient))


def quadratic(curvature: float) -> tuple[Problem, Tree]:
    """g = c/2 (theta - phi)^2, trained to its minimum theta = phi; f = theta^2 / 2 + phi: dh/dphi = phi + 1."""
    inner = GradientDescent(
        start=lambda meta: {"theta": torch.zeros(2, dtype=torch.float64)},
        loss=lambda own, meta, _: 0.5 * curvature * (own["theta"] - meta["phi"]).square().sum(),
        update=Sgd(momentum=0.0),
        rate=lambda meta: 1 / curvature,
    )
    problem = Problem(
        inner=inner, data=[None], outer=lambda state, meta: 0.5 * state["theta"].square().sum() + meta["phi"].sum()
    )
    return problem, {"phi": torch.tensor([1.0, -2.0], dtype=torch.float64)}


def test_implicit_gradients_of_a_quadratic_are_the_series() -> None:
    """d2g/dphi dtheta = -c and df/dtheta = phi: Hessian-free gives c phi + 1.

    K terms beyond the first give the fraction 1 - (1 - alpha c)^(K+1).
    """
    for curvature in (0.5, 2.0):
        problem, meta = quadratic(curvature)
        phi = meta["phi"]
        torch.testing.assert_close(taken(hessian_free(), problem, meta).gradient["phi"], curvature * phi + 1)
        share = 1 - (1 - 0.4 * curvature) ** 4
        torch.testing.assert_close(
            taken(neumann(num_terms=3, alpha=0.4), problem, meta).gradient["phi"], share * phi + 1
        )


def test_implicit_methods_ask_for_an_inner_loss() -> None:
    class Halving(Inner):
        def initial(self, meta: Tree) -> Tree:
            return dict(meta)

        def step(self, state: Tree, meta: Tree, data: object) -> Tree:
            return {key: each / 2 for key, each in state.items()}

    problem = Problem(inner=Halving(), data=[0], outer=lambda state, meta: state["x"].sum())
    with pytest.raises(ConfigError, match="does not say what its steps minimize"):
        taken(hessian_free(), problem, {"x": torch.ones(2)})
    assert float(taken(rgu(), problem, {"x": torch.ones(2)}).gradient["x"][0]) == 0.5


def test_tangents_do_not_change_the_training() -> None:
    problem, meta = random_problem(UPDATES["adam"])
    vectors = directions.draw("gaussian", meta, count=3, generator=torch.Generator().manual_seed(0))
    state, _ = pushed(problem, meta, vectors)
    for key, each in final_state(problem, meta).items():
        torch.testing.assert_close(state[key], each, atol=0, rtol=0)
