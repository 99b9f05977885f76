"""Settings learned through whole rounds: the rounds equal the engine's, and the gradients finite differences."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedsign.bilevel.federated import WEIGHTS, values_of
from fedsign.bilevel.forward_gradient import forward_exact
from fedsign.bilevel.hypergradients import rgu
from fedsign.bilevel.unroll import final_state
from fedsign.config import from_dict
from fedsign.errors import ConfigError
from simulations import run
from simulations.bilevel.kept_steps import KeptSteps
from simulations.bilevel.learning import Learning, Options, learn, learned_config

ALL = ("strategy.gamma", "client.lr", "client.weight_decay", "aggregation.weights")


def tree(**changes: Any) -> dict[str, Any]:
    """Three clients, two rounds of three local steps with momentum."""
    return {
        "rounds": 2,
        "callbacks": [],
        "data": {"name": "digits", "validation_fraction": 0.2},
        "partition": {"num_clients": 3, "alpha": 1.0},
        "server": {"cohort_size": 3},
        "model": {"name": "mlp", "hidden": [8]},
        "client": {"local_steps": 3, "lr": 0.1, "weight_decay": 0.01},
        "strategy": {"name": "fedsign", "gamma": 0.02},
        **changes,
    }


@pytest.mark.parametrize(
    ("strategy", "weighting"),
    [
        ({"name": "fedsign", "gamma": 0.02}, "uniform"),
        ({"name": "fedprox", "mu": 0.1}, "examples"),
        ({"name": "fedavg"}, "examples"),
    ],
)
def test_the_rounds_are_those_of_the_engine(strategy: dict[str, Any], weighting: str, tmp_path: Path) -> None:
    """Two of three clients a round, a falling rate: the model that is served at the end, to rounding."""
    asked = tree(
        strategy={**strategy, "weighting": weighting},
        server={"cohort_size": 2},
        results={"root": str(tmp_path)},
        client={"local_epochs": 1, "lr": 0.1, "weight_decay": 0.01, "schedule": {"name": "cosine"}},
    )
    done = run(asked)
    learning = Learning(from_dict(asked), Options(names=("client.lr",)))
    found = final_state(learning.problem(), learning.start)
    for name, each in load_file(done.path / "model.safetensors").items():
        torch.testing.assert_close(found[name], each, atol=2e-6, rtol=1e-4)


def test_every_step_runs_rounds_of_its_own_at_the_rates_of_the_first_ones() -> None:
    client = {"local_steps": 3, "lr": 0.1, "schedule": {"name": "cosine"}}
    learning = Learning(from_dict(tree(client=client, rounds=3)), Options(names=("client.lr",)))
    first, second = learning.problem(0).data, learning.problem(1).data
    assert [each.factor for each in first] == [each.factor for each in second] == pytest.approx([1, 0.75, 0.25])
    assert not torch.equal(first[0].clients[0].batches[0][0], second[0].clients[0].batches[0][0])


@pytest.mark.parametrize("name", ALL)
def test_hypergradients_are_those_of_finite_differences_through_rounds_of_three_clients(name: str) -> None:
    learning = Learning(from_dict(tree()), Options(names=ALL), dtype=torch.float64)
    problem, meta = learning.problem(), learning.start
    forward = forward_exact()(problem, meta, generator=torch.Generator())
    reverse = rgu()(problem, meta, generator=torch.Generator())

    def value(raw: torch.Tensor) -> float:
        moved = {**meta, name: raw}
        return float(problem.outer(final_state(problem, moved), moved))

    raw, step = meta[name], 1e-5
    slopes = []
    for index in range(raw.numel()):
        shift = torch.zeros(raw.numel(), dtype=raw.dtype)
        shift[index] = step
        shift = shift.reshape(raw.shape)
        slopes.append((value(raw + shift) - value(raw - shift)) / (2 * step))
    expected = torch.tensor(slopes, dtype=raw.dtype).reshape(raw.shape)
    assert expected.abs().max() > 1e-6
    for found in (forward, reverse):
        torch.testing.assert_close(found.gradient[name], expected, atol=1e-9, rtol=1e-6)


def test_what_is_learned_stays_what_it_is_and_gets_better() -> None:
    """From a rate that is far too low: positive values, weights that add up to 1, a lower loss."""
    asked = tree(client={"local_steps": 8, "lr": 0.005, "weight_decay": 0.001})
    found = list(Learning(from_dict(asked), Options(names=ALL, steps=8, lr=0.3)).steps())
    assert len(found) == 9
    assert found[-1]["loss"] < found[0]["loss"] - 0.03
    for step in found:
        assert step["client.lr"] > 0 and step["strategy.gamma"] > 0
        assert sum(step[WEIGHTS]) == pytest.approx(1, abs=1e-6)
    assert found[-1]["client.lr"] > 0.01


def test_weights_that_were_learned_are_a_setting(tmp_path: Path) -> None:
    """The engine's run with them is the round that they were learned for."""
    config = from_dict(tree(rounds=1, results={"root": str(tmp_path)}))
    found = learn(config, Options(names=(WEIGHTS, "client.lr"), steps=2, lr=0.5))
    learned = learned_config(config, found)
    assert len(set(learned.strategy.settings["weights"])) == 3
    assert found.arrays[WEIGHTS].shape == (3, 3)
    again = Learning(learned, Options(names=(WEIGHTS,)))
    served = final_state(again.problem(), again.start)
    for name, each in load_file(run(learned).path / "model.safetensors").items():
        torch.testing.assert_close(served[name], each, atol=2e-6, rtol=1e-4)


def test_a_weight_for_each_client_is_asked_for(tmp_path: Path) -> None:
    strategy = {"name": "fedavg", "weights": [1.0, 2.0]}
    with pytest.raises(ConfigError, match=r"strategy.weights with 2 numbers was given for 3 clients"):
        run(tree(strategy=strategy, results={"root": str(tmp_path)}))


def test_a_knob_stands_for_the_experiments_value() -> None:
    learning = Learning(from_dict(tree()), Options(names=ALL), dtype=torch.float64)
    values = values_of(learning.start)
    assert float(values["strategy.gamma"]) == pytest.approx(0.02, rel=1e-9)
    assert float(values["client.lr"]) == pytest.approx(0.1, rel=1e-9)
    assert values[WEIGHTS].tolist() == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize(
    ("changes", "names", "said"),
    [
        ({}, ("strategy.beta",), "strategy.gamma"),
        ({}, ("client.momentum",), "client.lr"),
        ({"data": {"name": "digits"}}, ("client.lr",), "data.validation_fraction=0"),
        ({"client": {"local_steps": 3}}, ("client.weight_decay",), "client.weight_decay=0.0"),
        ({"strategy": {"name": "feddyn"}}, ("client.lr",), "strategy.name=feddyn"),
        ({"strategy": {"name": "scaffold"}}, ("client.lr",), "strategy.name=scaffold"),
        ({"client": {"optimizer": {"name": "adam"}}}, ("client.lr",), "client.optimizer.name=adam"),
        ({"client": {"clip_norm": 1.0}}, ("client.lr",), "client.clip_norm=1.0"),
        ({"client": {"loss": "model"}}, ("client.lr",), "client.loss=model was given, but settings are learned only"),
        ({"faults": {"crash_rate": 0.1}}, ("client.lr",), "faults"),
        ({"attack": {"name": "sign_flip"}}, ("client.lr",), "attack.name=sign_flip"),
        ({"server": {"cohort_size": 2, "over_sampling": 0.5}}, ("client.lr",), "server.over_sampling=0.5"),
        ({"strategy": {"name": "fedavg", "weights": [1.0]}}, (WEIGHTS,), "strategy.weights with 1 numbers"),
    ],
)
def test_what_cannot_be_learned_is_refused(changes: dict[str, Any], names: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Learning(from_dict(tree(**changes)), Options(names=names)).start  # noqa: B018


def test_a_learning_that_was_stopped_goes_on_with_the_same_bits(tmp_path: Path) -> None:

    config, options = from_dict(tree()), Options(names=(*ALL,), steps=3, lr=0.3)
    whole = [*Learning(config, options).steps()]
    for step in Learning(config, options).steps(kept=KeptSteps(tmp_path, "a")):
        if step["step"] == 1:
            break  # as Ctrl-C does
    kept = KeptSteps(tmp_path, "a")
    assert kept.steps == whole[:2] and kept.seconds > 0
    learning = Learning(config, options)
    assert [*learning.steps(kept=kept)] == whole
    assert KeptSteps(tmp_path, "b").steps == []
    (tmp_path / "steps.json").write_text("{")
    assert KeptSteps(tmp_path, "a").steps == []
