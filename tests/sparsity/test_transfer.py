"""Optima found in a sweep's losses, and a sweep's cells."""

import dataclasses
import json
from collections.abc import Callable
from math import inf, isfinite, isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsign.config import ExperimentConfig, from_dict
from fedsign.errors import ConfigError, ResultsError
from fedsign.parameterization.apply import parameterized
from fedsign.workload import Workload
from simulations import api
from simulations.recipes.base import Metrics, Recipe
from simulations.recipes.smupar import smupar_transfer
from simulations.recipes.smupar.smupar_gpt import INIT_STD
from simulations.sparsity import cells, training, transfer
from simulations.sparsity.command import values_of
from simulations.sparsity.transfer import Options, read_off, tune, widened, width_of

VALUES = [0.25, 0.5, 1.0, 2.0]


def experiment(**changes: Any) -> ExperimentConfig:
    config = from_dict(
        {
            "callbacks": [],
            "model": {"name": "mlp", "hidden": [16, 16]},
            "parameterization": {"name": "smupar", "base_width": 16, "init_std": 0.25},
            "client": {"lr": 2**-6, "batch_size": 8, "optimizer": {"name": "adamw"}},
        }
    )
    return config.replace(**changes)


def losses(*conditions: list[Any]) -> np.ndarray:
    """[conditions, values, seeds], a number for the same loss from each of two seeds."""
    return np.array(
        [[(loss if isinstance(loss, tuple) else (loss, loss)) for loss in condition] for condition in conditions]
    )


def test_an_optimum_is_counted_in_factors_of_two_from_the_bases() -> None:
    """The base's best is 0.25. The other condition's, 2, is three factors of two above; 0.25 is 4 / 2.5 - 1 = 60 %
    worse.
    """
    base, sparse = read_off(losses([1.0, 2.0, 3.0, 4.0], [4.0, 3.5, 3.0, 2.5]), VALUES)
    assert (base.best, base.best_loss, base.moved, base.excess) == (0.25, 1.0, 0.0, 0.0)
    assert (sparse.best, sparse.moved, sparse.kept_loss) == (2.0, 3.0, 4.0)
    assert sparse.excess == pytest.approx(0.6)
    assert read_off(losses([4.0, 3.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]), VALUES)[1].moved == -2.0


def test_an_optimum_at_either_end_of_the_values_is_marked() -> None:
    marks = [
        read_off(losses(condition), VALUES)[0].is_at_edge
        for condition in ([1.0, 2.0, 3.0, 4.0], [2.0, 1.0, 3.0, 4.0], [2.0, 3.0, 1.0, 4.0], [4.0, 3.0, 2.0, 1.0])
    ]
    assert marks == [True, False, False, True]


def test_the_mean_over_seeds_decides_and_single_seeds_say_how_sure_that_is() -> None:
    """Means [3, 2, 2.5, 4]: 0.5.  Single seeds have 0.5 and 1 at the base, 1 and 1 at the other condition: moves 1 and
    0.
    """
    base, other = read_off(losses([(3.0, 3.0), (1.0, 3.0), (3.0, 2.0), (4.0, 4.0)], [3.0, 2.0, 1.0, 4.0]), VALUES)
    assert (base.best, base.moved_low, base.moved_high) == (0.5, 0.0, 0.0)
    assert (other.best, other.moved, other.moved_low, other.moved_high) == (1.0, 1.0, 0.0, 1.0)


def test_excess_is_paired_by_seed() -> None:
    """Losses 2 and 8 at the base's value against 1 and 4 at the own best: the mean of 2 and 2, less 1."""
    _, other = read_off(losses([1.0, 2.0, 3.0, 3.0], [(2.0, 8.0), (1.0, 4.0), (3.0, 9.0), (3.0, 9.0)]), VALUES)
    assert other.excess == pytest.approx(1.0)


@pytest.mark.parametrize("lost", [inf, nan])
def test_a_value_at_which_a_seed_diverged_is_never_the_best(lost: float) -> None:
    (base,) = read_off(losses([3.0, 2.0, (0.5, lost), lost]), VALUES)
    assert (base.best, base.best_loss) == (0.5, 2.0)
    _, sparse = read_off(losses([1.0, 2.0, 3.0, 4.0], [lost, 2.0, 3.0, 4.0]), VALUES)
    assert (sparse.best, sparse.kept_loss, sparse.excess) == (0.5, inf, inf)
    _, dead = read_off(losses([1.0, 2.0, 3.0, 4.0], [lost] * 4), VALUES)
    assert isnan(dead.best) and isnan(dead.moved) and isnan(dead.excess)


def test_values_are_listed_or_doubled() -> None:
    assert values_of("2^-3..2^-1") == [0.125, 0.25, 0.5]
    assert values_of("0.1..0.5") == [0.1, 0.2, 0.4]  # no more than that
    assert values_of("0.1, 2^-1,3e0") == [0.1, 0.5, 3.0]


@pytest.mark.parametrize("text", ["a", "2^-1..", "..2", "2..1", "0..1", "1..2..3", "2^x", "1,nan", "inf"])
def test_values_that_are_none_are_a_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--values .* expected numbers"):
        values_of(text)


def test_a_model_is_widened_in_all_its_layers_and_its_heads_keep_their_width() -> None:
    wide = widened(experiment(**{"model.hidden": [24, 16]}), 32)
    assert wide.model.settings["hidden"] == (48, 32) or wide.model.settings["hidden"] == [48, 32]
    gpt = from_dict(
        {
            "task": "language",
            "metrics": [],
            "data": {"name": "pytext"},
            "model": {"name": "gpt", "width": 64, "num_heads": 2, "ffn_width": 96},
        }
    )
    assert width_of(gpt) == 64
    settings = widened(gpt, 128).model.settings
    assert (settings["width"], settings["num_heads"], settings["ffn_width"], settings["num_kv_heads"]) == (
        128,
        4,
        192,
        0,
    )
    with pytest.raises(ConfigError, match=r"--widths has 96.* 1\.5 times .* model\.num_heads=1"):
        widened(gpt.replace(**{"model.num_heads": 1}), 96)
    with pytest.raises(ConfigError, match=r"model\.name=linear has none of the settings width"):
        widened(experiment(**{"parameterization.name": "none"}).replace(model={"name": "linear"}), 32)


def test_a_cell_is_found_by_what_its_loss_depends_on() -> None:
    def cell(*, steps: int = 5, samples: int = 0, **changes: Any) -> str:
        return cells.Cell(config=experiment(**changes), steps=steps, samples=samples, words={}).id

    same = cell()
    assert same == cell(name="another", callbacks=["progress"], **{"results.root": "elsewhere"})
    others = {
        cell(steps=6),
        cell(samples=3),
        cell(seed=1),
        cell(**{"client.lr": 0.5}),
        cell(**{"parameterization.density": 0.5}),
        cell(**{"sparsity.draw": "exact"}),
    }
    assert len(others | {same}) == 7


def test_every_cell_draws_masks_as_the_experiment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = experiment(**{"sparsity.draw": "exact", "model.hidden": [32, 32]})
    seen = planned(asked, Options(seeds=1), monkeypatch, tmp_path)
    assert {cell.config.sparsity.draw for cell in seen} == {"exact"}
    sparse = next(cell for cell in seen if cell.words["density"] == 0.0625)
    made = parameterized(Workload(training.alone(sparse.config, 1)).make_model())
    assert made is not None and [mask.num for mask in made.masks.values()] == [32 * 32 / 16]


def test_a_cells_file_holds_its_loss_and_a_damaged_one_counts_as_none(tmp_path: Path) -> None:
    path = tmp_path / "cell.json"
    assert cells.loss_in(path) is None
    cells.write_loss(path, 1.25, {"seed": 3})
    assert cells.loss_in(path) == 1.25 and json.loads(path.read_text()).items() >= {"seed": 3, "loss": 1.25}.items()
    cells.write_loss(path, inf, {})
    assert isnan(cells.loss_in(path) or 0.0) and json.loads(path.read_text())["loss"] is None
    flipped = path.read_text().replace("null", "0.25")
    for damaged in (flipped, "", "{", "[]", "{}", '{"loss": "x"}'):
        path.write_text(damaged)
        assert cells.loss_in(path) is None


def planned(
    config: ExperimentConfig, asked: Options, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> list[cells.Cell]:
    """Return a sweep's cells without training: losses are a function of value and density, with the optimum 1 /
    density.
    """
    seen: list[cells.Cell] = []

    def pretend(given: list[cells.Cell], *_: Any, **__: Any) -> list[float]:
        seen.extend(given)
        return [
            abs(np.log2(cell.words["client.lr"] * cell.words["density"] / 2**-6)) + 1 + cell.words["seed"] / 8
            for cell in given
        ]

    monkeypatch.setattr("simulations.sparsity.transfer.losses_of", pretend)
    found = tune(config, asked, folder)
    assert [row["moved"] for row in found.summary] == [0.0, 2.0, 4.0] * (len(found.summary) // 3)
    assert found.arrays["loss"].shape == (len(asked.schemes), 1, 3, 9, asked.seeds)
    return seen


def test_a_sweep_tries_every_value_everywhere_from_the_same_seeds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nine values around 2^-6, three densities, two schemes, two seeds; at density 1 both schemes are one muP
    training.
    """
    asked = Options(schemes=("mup", "smupar"), seeds=2, steps=5)
    seen = planned(experiment(), asked, monkeypatch, tmp_path)
    assert len(seen) == 9 * 3 * 2 * 2
    assert {cell.config.client.lr for cell in seen} == {2.0**power for power in range(-10, -1)}
    dense = [cell for cell in seen if cell.words["density"] == 1]
    assert len({cell.id for cell in dense}) == len(dense) / 2
    assert len({cell.id for cell in seen}) == 9 * (3 + 2) * 2
    assert {cell.config.data.validation_fraction for cell in seen} == {training.VALIDATION_FRACTION}
    held = planned(experiment(**{"data.validation_fraction": 0.2}), asked, monkeypatch, tmp_path)
    assert {cell.config.data.validation_fraction for cell in held} == {0.2}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (Options(setting="rates"), "Did you mean 'rate'"),
        (Options(schemes=("smupr",)), "Did you mean 'smupar'"),
        (Options(schemes=()), "--schemes was given as"),
        (Options(schemes=("sp", "sp")), "each once"),
        (Options(densities=(1.0, 2.0)), "--densities has 2"),
        (Options(values=(2.0, 1.0)), "numbers above 0 that ascend"),
        (Options(values=(0.0, 1.0)), "numbers above 0 that ascend"),
        (Options(seeds=0), "--seeds=0"),
        (Options(steps=-1), "--steps=-1"),
        (Options(samples=8), "--samples was given without --steps"),
        (Options(steps=5, widths=(24,)), "--widths has 24"),
    ],
)
def test_what_cannot_be_tried_is_refused(asked: Options, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        tune(experiment(**{"model.hidden": [17, 16]}), asked, tmp_path / "there")
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize(
    ("changes", "asked", "said"),
    [
        ({"parameterization": {"name": "none"}}, Options(steps=5), "parameterization.name=none"),
        ({"parameterization.densities": {"*": 0.5}}, Options(steps=5), "stands before the densities"),
        ({"engine": {"name": "ray"}}, Options(), "engine.name=ray"),
        ({"client.optimizer": {"name": "galore"}}, Options(steps=5), "divides the model in its own way"),
    ],
)
def test_an_experiment_that_cannot_be_tuned_is_refused(
    changes: dict[str, Any], asked: Options, said: str, tmp_path: Path
) -> None:
    data = experiment().model_dump(mode="json")
    for key, value in changes.items():
        section, _, leaf = key.partition(".")
        data[section] = data[section] | {leaf: value} if leaf else value
    with pytest.raises(ConfigError, match=said):
        tune(from_dict(data), asked, tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultsError, match="is a file"):
        tune(experiment(), Options(steps=5), tmp_path / "file")
    with pytest.raises(ConfigError, match="--workers=0"):
        tune(experiment(), Options(steps=5), tmp_path / "there", workers=0)


def test_a_training_alone_may_train_a_part_of_the_model_at_a_time() -> None:
    """LISA's reply holds what it trained; the rest is as it began."""
    config = training.held_out(
        experiment(
            **{
                "model.hidden": [8, 8, 8],
                "client.optimizer.name": "lisa",
                "client.optimizer.blocks": "0,2,4",
                "client.optimizer.num_sampled_layers": 1,
                "client.optimizer.period": 2,
            }
        )
    )
    assert isfinite(training.Trainings().loss(config, steps=3, samples=0))


def test_a_training_alone_ends_where_a_federation_of_one_client_ends(tmp_path: Path) -> None:
    """The same five steps by the round loop, whose loss on the held-out samples is in its only line."""
    config = training.held_out(
        experiment(**{"parameterization.density": 0.5, "client.weight_decay": 0.1, "client.clip_norm": 1.0})
    )
    found = training.Trainings().loss(config, steps=5, samples=0)
    done = api.run(training.alone(config, 5).replace(**{"results.root": str(tmp_path)}))
    (line,) = done.rounds
    assert found == line["validation_loss"]
    assert line["clients"] == [0] and done.config.partition.num_clients == 1


def test_without_a_number_of_steps_it_is_the_federation(tmp_path: Path) -> None:
    config = training.held_out(experiment(rounds=1, **{"client.local_epochs": 1, "server.cohort_size": 2}))
    done = api.run(config.replace(**{"results.root": str(tmp_path)}))
    assert training.Trainings().loss(config, steps=0, samples=0) == done.rounds[-1]["validation_loss"]


def test_the_data_of_the_cell_before_change_nothing() -> None:
    """Cells of another seed, of another rate, and the requested one, whose loss equals that of a fresh process."""
    config = training.held_out(experiment())
    one = training.Trainings()
    one.loss(config.replace(seed=1), steps=2, samples=0)
    one.loss(config.replace(**{"client.lr": 0.5}), steps=2, samples=0)
    assert one.loss(config, steps=2, samples=0) == training.Trainings().loss(config, steps=2, samples=0)
    assert one.loss(config, steps=2, samples=5) != one.loss(config, steps=2, samples=0)


def test_a_training_that_diverges_has_no_finite_loss() -> None:
    config = training.held_out(experiment(**{"client.lr": 1e30, "client.optimizer": {"name": "sgd", "momentum": 0.0}}))
    assert not np.isfinite(training.Trainings().loss(config, steps=3, samples=0))


def valley_shaped(best_of: Callable[[str, float], float]) -> Callable[..., Any]:
    """In place of a sweep: loss 2 + |log2(value / best)| / 10, with a best value for each scheme and density."""

    def pretend(name: str, asked: Options, *, quick: bool, width: int = 128) -> Any:
        shape = (len(asked.schemes), 1, len(asked.densities), len(asked.values), asked.seeds)
        found = np.empty(shape)
        for i, scheme in enumerate(asked.schemes):
            for j, density in enumerate(asked.densities):
                away = np.log2(np.array(asked.values) / best_of(scheme, density))
                found[i, 0, j] = 2 + np.abs(away)[:, None] / 10
        return transfer._summarized(experiment(), dataclasses.replace(asked, widths=(width,)), found)

    return pretend


def metrics_of(recipe: Recipe, *, quick: bool) -> Metrics:
    measured = recipe.measure(quick)
    assert isinstance(measured, tuple)
    return measured[0]


def test_a_recipes_figures_are_those_of_hand_made_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best rate is 2^-9, or where nothing is corrected 2^-9 / density: at 1/32 and 2^-9 the loss is 2.5.

    The proxy's best is 2^-9 as well, so that SmuPar loses nothing by it and the others 2.5 / 2 - 1.
    """
    pretend = valley_shaped(lambda scheme, density: 2.0**-9 / (1 if scheme == "smupar" else density))
    monkeypatch.setattr(smupar_transfer, "swept", pretend)
    metrics = metrics_of(smupar_transfer.smupar_lr_transfer, quick=False)
    assert (metrics["smupar_moved"], metrics["sp_moved"], metrics["mup_moved"]) == (0, 5, 5)
    assert metrics["kept_to_sp"] == metrics["kept_to_mup"] == pytest.approx(2 / 2.5)
    assert metrics["best_to_sp"] == metrics["best_to_mup_low"] == 1 and metrics["smupar_excess"] == 0
    assert metrics["smupar_excess_from_width_64"] == 0
    assert metrics["sp_excess_from_width_64"] == pytest.approx(0.25)
    assert metrics["optima_at_an_edge"] == 0


def test_the_figures_of_starts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best start is the model's, or without correction 2^3 times it at 1/32, where the loss at the model's is
    2.3.
    """
    pretend = valley_shaped(
        lambda scheme, density: INIT_STD * (8 if (scheme, density) in (("sp", 1 / 32), ("mup", 1 / 32)) else 1)
    )
    monkeypatch.setattr(smupar_transfer, "swept", pretend)
    metrics = metrics_of(smupar_transfer.smupar_init_transfer, quick=False)
    assert (metrics["smupar_moved"], metrics["sp_raised"], metrics["mup_raised"]) == (0, 3, 3)
    assert metrics["smupar_excess"] == 0 and metrics["sp_excess"] == metrics["mup_excess"] == pytest.approx(0.15)
    assert metrics["kept_to_sp"] == metrics["kept_to_mup"] == pytest.approx(2 / 2.3)
    assert metrics["best_to_sp"] == metrics["best_to_mup_high"] == 1 and metrics["optima_at_an_edge"] == 0


def test_the_figures_of_half_of_the_corrections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where half is missing the best value at 1/32 is 4 times that of the dense model, of rates and of starts."""

    def pretend(name: str, asked: Options, *, quick: bool) -> Any:
        base = INIT_STD if asked.setting == "init" else 2.0**-9
        half = valley_shaped(lambda scheme, density: base * (4 if scheme != "smupar" and density < 1 else 1))
        return half(name, asked, quick=quick)

    monkeypatch.setattr(smupar_transfer, "swept", pretend)
    metrics = metrics_of(smupar_transfer.smupar_ablation, quick=False)
    for half in ("init_only", "rate_only"):
        assert metrics[f"{half}_moved"] == metrics[f"{half}_start_raised"] == 2
        assert metrics[f"{half}_excess"] == metrics[f"{half}_start_excess"] == pytest.approx(0.1)
        assert metrics[f"both_to_{half}"] == pytest.approx(2 / 2.2) and metrics[f"best_start_both_to_{half}"] == 1
    assert metrics["both_moved"] == metrics["both_start_raised"] == metrics["both_start_excess"] == 0
    quick = metrics_of(smupar_transfer.smupar_ablation, quick=True)
    assert not any("start" in name for name in quick)
