"""--data, --data-root and --model: any data, and the estimated cost before a recipe is checked."""

import re
from pathlib import Path

import numpy as np
import pytest

from fedsign.errors import ConfigError
from simulations.recipes import table as recipes
from simulations.recipes.base import Verdict
from simulations.recipes.where import Budget, Where, cost, where_of
from tests.e2e.command import fedsign


def arrays(folder: Path) -> Path:
    """Two classes that a line parts."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 120)
    x = (rng.normal(size=(120, 6)) + 3 * y[:, None]).astype(np.float32)
    np.savez(folder / "mine.npz", x=x, y=y)
    return folder / "mine.npz"


def test_data_is_a_named_set_a_folder_of_classes_or_an_npz(tmp_path: Path) -> None:
    assert where_of("mnist", str(tmp_path)).data == {"name": "mnist", "root": str(tmp_path)}
    assert where_of(str(tmp_path)).data == {"name": "image_folder", "root": str(tmp_path)}
    assert where_of(str(arrays(tmp_path)), model="mlp").title == "mine.npz with mlp"
    with pytest.raises(ConfigError, match=r"neither an .npz file nor a folder .*Did you mean 'mnist'"):
        where_of("mnistt")
    with pytest.raises(ConfigError, match="drop --data-root"):
        where_of("digits", str(tmp_path))
    with pytest.raises(ConfigError, match="Did you mean 'resnet20'"):
        where_of("digits", model="resnet21")


def test_a_verdict_is_expected_only_of_what_was_measured(tmp_path: Path) -> None:
    assert recipes.get("niid-bench").expected is Verdict.IN_PART
    assert recipes.get("niid-bench", data="mnist").expected is None
    assert recipes.get("niid-bench", model="cnn").expected is None
    assert recipes.get("valley-gradient", data="digits").expected is recipes.get("valley-gradient").expected
    assert recipes.get("valley-gradient", data=str(arrays(tmp_path))).expected is None
    with pytest.raises(ConfigError, match="drop --data and --model"):
        recipes.get("relu-demo", data="digits", model="cnn")
    with pytest.raises(ConfigError, match="drop --model"):
        recipes.get("valley-bn-init", model="cnn")
    for name in ("mcmahan-mnist", "flower-niid-bench", "federated-learning-pytorch"):
        with pytest.raises(ConfigError, match=r"--data digits was given, but .* was published on mnist"):
            recipes.get(name, data="digits")


@pytest.mark.parametrize("name", ["digits.npz", "digits"])
def test_data_named_like_a_known_set_are_not_that_set(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    arrays(tmp_path).rename(path) if path.suffix else path.mkdir()
    known, own = where_of("digits"), where_of(str(path))
    assert known.label != own.label, "both would be run in one folder"
    for recipe in ("fedsign-table", "niid-bench", "valley-gradient"):
        assert recipes.get(recipe, data="digits").expected is not None
        assert recipes.get(recipe, data=str(path)).expected is None
    for recipe, model in (("fedsign-table", "vgg8"), ("niid-bench", "niid_cnn")):
        budget = recipes.get(recipe, data="digits").budget
        assert budget is not None
        assert [budget(False, where).experiment["model"]["name"] for where in (known, own)] == ["mlp", model]


def test_a_file_named_like_a_published_set_is_refused_where_other_data_are(tmp_path: Path) -> None:
    data = str(arrays(tmp_path).rename(tmp_path / "mnist.npz"))
    for name in ("mcmahan-mnist", "flower-niid-bench", "federated-learning-pytorch"):
        with pytest.raises(ConfigError, match=r"mnist.npz was given, but .* was published on mnist"):
            recipes.get(name, data=data)


def test_a_path_takes_no_data_root(tmp_path: Path) -> None:
    for data in (tmp_path, arrays(tmp_path)):
        with pytest.raises(ConfigError, match="is a path already: drop --data-root"):
            where_of(str(data), root="/nowhere")


def test_what_a_recipe_trains_is_on_the_data_that_were_asked_for() -> None:
    where = Where(data={"name": "mnist"}, model={"name": "cnn"})
    for name, recipe in recipes.all_recipes().items():
        if recipe.budget is not None:
            full, quick = (recipe.budget(is_quick, where) for is_quick in (False, True))
            if full.known:
                continue  # data and model of its own
            assert full.trainings > quick.trainings >= 1, name
            assert full.experiment["data"]["name"] == "mnist" and full.experiment["model"] == {"name": "cnn"}, name


@pytest.mark.slow
def test_a_combination_that_nobody_measured_says_so_and_its_cost_and_is_no_failure(tmp_path: Path) -> None:
    done = fedsign("reproduce", "valley-gradient", "--data", str(arrays(tmp_path)), "--quick", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    said = (
        r"nobody has measured valley-gradient on mine.npz: 2 trainings of 40 rounds, .* by a timed round of "
        r".* GB a process\."
    )
    assert re.search(said, " ".join(done.stderr.split()))


def test_data_that_are_missing_are_said_before_anything_is_run(tmp_path: Path) -> None:
    experiment = {"data": {"name": "mnist", "root": str(tmp_path)}, "model": {"name": "mlp"}}
    with pytest.raises(ConfigError, match=r"MNIST was not found.* another folder with --data-root PATH") as error:
        cost(Budget(trainings=1, experiment=experiment))
    assert "--set" not in str(error.value)
