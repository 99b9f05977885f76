"""`fedsign analyze`: from a run, a checkpoint or a file to numbers, arrays, figures and a section of the page."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from typer.testing import CliRunner

import fedsign
from fedsign.capabilities import CAPABILITIES
from fedsign.errors import ConfigError, FedSignError
from fedsign.landscape.directions import NOISES, SPECIAL, noise
from fedsign.storage.checkpoints import save_model
from simulations.api import Run, run
from simulations.cli import app
from simulations.landscape.target import target_of
from tests.e2e.command import analyze

SHORT = {"rounds": 10, "callbacks": ["report"], "client": {"local_epochs": 2}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Two runs, of two seeds."""
    root = tmp_path_factory.mktemp("runs")
    kept = {"checkpoint_every": 2, "keep_checkpoints": 5}
    first = {**kept, **({"signs": True} if "signs" in CAPABILITIES else {})}
    return [
        run({**SHORT, "seed": seed, "results": {"root": str(root), **more}}) for seed, more in ((0, first), (1, {}))
    ]


def refused(*words: Any) -> str:
    with pytest.raises(FedSignError) as caught:
        CliRunner().invoke(app, ["analyze", *map(str, words)], catch_exceptions=False)
    assert isinstance(caught.value, ConfigError) or caught.value.exit_code == 2
    return str(caught.value)


def test_the_valley_of_a_run_is_in_files_and_on_its_page(trained: list[Run], tmp_path: Path) -> None:
    folder = shutil.copytree(trained[0].path, tmp_path / "run")
    words = ("valley", folder, "--directions", "gaussian,sign", "--draws", 2, "--scales", "0.5,1", "--points", 11)
    found = analyze(*words)
    assert {Path(file).name for file in found["files"]} == {
        "valley.json",
        "valley.npz",
        *(f"valley-{what}.{format}" for what in ("error", "loss") for format in ("svg", "pdf", "png")),
    }
    assert all(Path(file).stat().st_size > 500 for file in found["files"])
    assert [(row["direction"], row["draw"], row["scale"]) for row in found["curves"]] == [
        (name, draw, scale) for name, draw in (("gaussian", 0), ("gaussian", 1), ("sign", 0)) for scale in (0.5, 1.0)
    ]
    with np.load(folder / "analysis" / "valley.npz") as arrays:
        assert arrays["error"].shape == arrays["loss"].shape == (3, 2, 11)
        center = arrays["error"][:, :, 5]
        assert np.allclose(
            center, 1 - trained[0].rounds[-1]["accuracy"]
        )  # lambda = 0 is the model that was evaluated last
        assert np.allclose(arrays["loss"][:, :, 5], trained[0].rounds[-1]["loss"], rtol=1e-5)
    page = (folder / "report.html").read_text()
    assert page.count("Valley, s =") == 2 and "sign(θf)" in page
    pairs, single = (row for row in found["summary"] if row["scale"] == 1)
    for text in (f"0 ± {pairs['asymmetry_of_one']:.3f}", f"{single['asymmetry']:+.3f}".replace("-", "−")):
        assert f">{text}</td>" in page  # in the table below the charts
    one = [row["error"]["asymmetry"] for row in found["curves"] if row["direction"] == "gaussian" and row["scale"] == 1]
    assert (pairs["num_draws"], pairs["asymmetry"], pairs["asymmetry_low"]) == (2, 0.0, None)
    assert pairs["asymmetry_of_one"] == pytest.approx(np.abs(one).mean()) and any(one)
    assert (single["num_draws"], single["asymmetry_low"]) == (1, None) and single["asymmetry"] != 0
    before = {file: Path(file).read_bytes() for file in found["files"]}
    analyze(*words)
    assert before == {file: Path(file).read_bytes() for file in found["files"]}


def test_a_surface(trained: list[Run], tmp_path: Path) -> None:
    found = analyze("valley", trained[0].path, "--surface", "--points", 5, "--out", tmp_path)
    with np.load(tmp_path / "surface.npz") as arrays:
        assert arrays["error"].shape == (5, 5)
        assert arrays["error"][2, 2] == pytest.approx(1 - trained[0].rounds[-1]["accuracy"])
    assert found["facts"]["rows"] == "G(0, 1), draw 0" and (tmp_path / "surface-error.png").stat().st_size > 2000


NAMES = (*NOISES, *SPECIAL)


@pytest.mark.parametrize("second", NAMES)
def test_a_plane_is_spanned_by_the_two_directions_that_are_named(second: str, trained: list[Run]) -> None:
    """Corners are recomputed from two vectors: theta + s (row first + column second), both of the norm of theta."""
    run, workload = trained[0], target_of(trained[0]).workload
    model, test = run.model(), workload.dataset.test
    theta = parameters_to_vector(model.parameters()).detach()
    initial = parameters_to_vector(workload.make_model().parameters()).detach()
    parts = [each.detach().reshape(-1) for each in model.parameters()]
    centered = torch.cat([each - each.mean() for each in parts])
    special = {
        "initial": initial,
        "final": theta,
        "sign": theta.sign(),
        "sign_centered": centered.sign(),
        "sgp": (theta > 0).float(),
        "sgp_centered": (centered > 0).float(),
        "ones": torch.ones_like(theta),
    }

    def direction(name: str, draw: int) -> torch.Tensor:
        drawn = special[name] if name in special else noise(name, len(theta), seed=0, index=draw)
        return drawn * theta.norm() / drawn.norm()

    for first in (NAMES[NAMES.index(second) - shift] for shift in (1, 4)):
        found = fedsign.analyze.valley(run, directions=(first, second), points=3, scales=(0.2, 0.7), surface=True)
        # the second of two noises is another draw: draws of one number share a stream
        draws = (0, int(first not in special and second not in special))
        vectors = [direction(name, draw) for name, draw in zip((first, second), draws, strict=True)]
        for axis, name, draw in zip(("rows", "columns"), (first, second), draws, strict=True):
            label = f"{NOISES[name][0]}, draw {draw}" if name in NOISES else SPECIAL[name]
            assert found.facts[axis] == label
        for row, column in ((0, 0), (0, 2), (2, 1)):
            vector_to_parameters(theta + 0.7 * ((row - 1) * vectors[0] + (column - 1) * vectors[1]), model.parameters())
            with torch.no_grad():
                expected = cross_entropy(model(test.features), test.targets)
            assert found.arrays["loss"][row, column] == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("name", [name for name in NOISES if name != "ones"])
def test_the_plane_of_one_noise_is_that_of_two_draws(name: str, trained: list[Run]) -> None:
    found = fedsign.analyze.valley(trained[0], directions=name, points=3, samples=50, surface=True)
    assert [found.facts[axis] for axis in ("rows", "columns")] == [f"{NOISES[name][0]}, draw {draw}" for draw in (0, 1)]
    both = fedsign.analyze.valley(trained[0], directions=(name, name), points=3, samples=50, surface=True)
    assert (both.arrays["loss"] == found.arrays["loss"]).all()


def test_the_trajectory_of_a_run_begins_at_its_start_and_ends_at_its_model(trained: list[Run], tmp_path: Path) -> None:
    folder = shutil.copytree(trained[0].path, tmp_path / "run")
    found = analyze("trajectory", folder, "--points", 5)
    path, rounds = found["curves"], trained[0].rounds
    assert [row["round"] for row in path] == [0, 2, 4, 6, 8, 10]
    assert (path[-1]["x"], path[-1]["y"]) == (0, 0) and path[0]["x"] > 0
    for row in path[1:]:  # each checkpoint has the loss and the error that its round was evaluated with
        line = rounds[row["round"] - 1]
        assert row["loss"] == pytest.approx(line["loss"], rel=1e-4)
        assert row["error"] == pytest.approx(1 - line["accuracy"])
    assert 0.5 < sum(found["facts"]["explained"]) <= 1
    assert 'alt="Test loss over the plane of the two principal directions' in (folder / "report.html").read_text()
    assert "expected 4 or more to draw its path; run it again with --set results.checkpoint_every=1" in refused(
        "trajectory", trained[1].path
    )
    assert "has no path behind it" in refused("trajectory", folder / "model.safetensors")
    assert "is not a run" in refused("trajectory", folder / "checkpoints" / "round-000004")
    assert "--points=2" in refused("trajectory", folder, "--points", 2)


def test_with_batch_norm_the_evaluated_model_is_told_from_the_center(tmp_path: Path) -> None:
    settings = {"rounds": 2, "callbacks": [], "model": {"name": "cnn"}, "results": {"root": str(tmp_path)}}
    # after two rounds, errors are near those of guessing, and on other splits equal by chance
    split = {"partition": {"name": "dirichlet_prefix"}, "strategy": {"name": "fedsign"}}
    done = run({**settings, **split, "client": {"local_epochs": 1}})
    words = ("--points", 3, "--draws", 1, "--scales", 1, "--out", tmp_path)
    anew, own = (analyze("valley", done.path, *words, "--statistics", num) for num in (50, 0))
    evaluated = {"loss": done.rounds[-1]["loss"], "error": 1 - done.rounds[-1]["accuracy"]}
    assert anew["facts"]["own_center"] == own["facts"]["center"] == pytest.approx(evaluated, rel=1e-4)
    assert anew["facts"]["center"]["loss"] != pytest.approx(evaluated["loss"], rel=1e-2)
    assert "own_center" not in own["facts"] and own["curves"][0]["loss"]["center"] == pytest.approx(evaluated["loss"])
    ends = analyze("interpolate", done.path, done.path, "--points", 4, "--samples", 50, "--out", tmp_path)["facts"]
    assert ends["own_ends"][0] == ends["own_ends"][1] and ends["own_ends"][0]["error"] != ends["first"]


def test_a_checkpoint_a_file_of_weights_and_a_name_are_looked_at_as_the_run_is(
    trained: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = trained[0]
    words = ("--points", 5, "--draws", 1, "--scales", 1)
    whole = analyze("valley", done.path, *words, "--out", tmp_path / "a")
    checkpoint = analyze("valley", done.path / "checkpoints" / "round-000010", *words, "--out", tmp_path / "b")
    weights = tmp_path / "weights.safetensors"
    save_file(load_file(done.path / "model.safetensors"), weights)
    of_file = analyze("valley", weights, "--model", "mlp", *words, "--out", tmp_path / "c")
    assert whole["curves"] == checkpoint["curves"] == of_file["curves"]
    (tmp_path / "runs").symlink_to(done.path.parents[1])
    monkeypatch.chdir(tmp_path)
    assert (
        analyze("valley", "/".join(done.path.parts[-2:]), *words, "--out", tmp_path / "e")["curves"] == whole["curves"]
    )
    earlier = analyze("valley", done.path / "checkpoints" / "round-000006", *words, "--out", tmp_path / "d")
    assert earlier["curves"] != whole["curves"]
    assert not (done.path / "analysis" / "valley.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--directions", "gausian"], "direction 'gausian' is not known. Did you mean 'gaussian'?"),
        (["--scaling", "norms"], "--scaling=norms was given. Did you mean 'norm'?"),
        (["--scales", "1,x"], "--scales 1,x was given, but expected numbers"),
        (["--scales", "0"], "numbers above 0"),
        (["--points", "10"], "0 being one"),
        (["--signs", "2"], "from 0 to 1"),
        (["--draws", "0"], "--draws=0"),
        (["--samples", "0"], "0 samples were asked for"),
        (["--group", "BN"], "group 'BN' has no parameters in this model"),
        (["--set", "model.name=cnn"], "--set model.name was given with the run"),
        (["--model", "cnn"], "drop --model"),
        (["--surface", "--draws", "1"], "one direction was given for a surface"),
        (["--surface", "--directions", "sign"], "one direction was given for a surface"),
        (["--surface", "--directions", "ones"], "one direction was given for a surface"),
        (["--surface", "--directions", "gaussian,sign,ones"], "3 directions were given for a surface"),
        (["--surface", "--directions", "sgp,sgp"], "sgp(θf) and sgp(θf) were given for a surface, but they lie on one"),
        (["--surface", "--directions", "ones,sign", "--signs", "1"], "but they lie on one line; name two that differ"),
    ],
)
def test_what_cannot_be_drawn_is_one_sentence(words: list[str], said: str, trained: list[Run], tmp_path: Path) -> None:
    assert said in refused("valley", trained[0].path, *words, "--out", tmp_path)
    assert not list(tmp_path.iterdir())


def test_paths_that_are_nothing(trained: list[Run], tmp_path: Path) -> None:
    assert "is not a run" in refused("valley", tmp_path)
    weights = tmp_path / "weights.safetensors"
    save_file({"a": torch.ones(2)}, weights)
    assert "name it with --model" in refused("valley", weights)
    assert "does not fit the model" in refused("valley", weights, "--model", "mlp")
    begun = shutil.copytree(trained[0].path, tmp_path / "begun")
    shutil.rmtree(begun / "checkpoints")
    (begun / "model.safetensors").unlink()
    assert "model.safetensors is missing" in refused("valley", begun)
    for name in ("outcome.json", "rounds.jsonl"):  # as if it were killed in its first round
        (begun / name).unlink()
    assert "has no checkpoint yet" in refused("valley", begun)


def test_between_two_runs(trained: list[Run], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = analyze("interpolate", trained[0].path, trained[1].path, "--points", 31, "--out", tmp_path)
    assert "hold out other test samples" in caplog.text  # the seeds differ
    facts = found["facts"]
    first, second = (1 - done.rounds[-1]["accuracy"] for done in trained)
    assert facts["first"] == pytest.approx(first)
    # the second model on the first one's test samples, some of which it was trained on
    assert facts["second"] <= second + 0.1
    assert facts["midpoint_gap"] == pytest.approx((facts["first"] + facts["second"]) / 2 - facts["middle"])
    assert facts["barrier"] >= facts["middle"] - max(facts["first"], facts["second"])
    assert [row["group"] for row in found["curves"]] == ["CLF weight", "CLF bias", "Other weight", "Other bias"]
    assert (tmp_path / "interpolation-error.svg").exists()
    other = run({**SHORT, "rounds": 1, "model": {"name": "linear"}, "results": {"root": str(tmp_path / "other")}})
    assert "not of one architecture" in refused("interpolate", trained[0].path, other.path)


@pytest.mark.needs("signs")
def test_signs_of_runs(trained: list[Run], tmp_path: Path) -> None:
    alone = analyze("signs", trained[0].path, "--out", tmp_path / "alone")
    assert alone["summary"][0]["first"] == "initial" and alone["summary"][0]["same_sign_ratio"] > 0.7
    assert (tmp_path / "alone" / "signs-rounds.svg").exists()  # this run watched its clients
    pair = analyze("signs", trained[0].path, trained[1].path, "--out", tmp_path / "pair")
    assert pair["summary"][0]["same_sign_ratio"] == pytest.approx(0.5, abs=0.1)  # of two random starts
    assert "the same path was given twice" in refused("signs", trained[0].path, trained[0].path)


@pytest.mark.parametrize(
    ("command", "num_runs", "options"),
    [
        ("valley", 1, {"points": 5, "draws": 2}),
        ("valley", 1, {"points": 3, "surface": True}),
        ("interpolate", 2, {"points": 5}),
        ("trajectory", 1, {"points": 3}),
        pytest.param("signs", 1, {}, marks=pytest.mark.needs("signs")),
        ("curvature", 1, {"draws": 2, "samples": 50}),
    ],
)
def test_python_finds_what_the_command_finds(
    command: str, num_runs: int, options: dict[str, int], trained: list[Run], tmp_path: Path
) -> None:
    runs = trained[:num_runs]
    words = [word for name, value in options.items() for word in (f"--{name}", value)[: 1 if value is True else 2]]
    expected = analyze(command, *(each.path for each in runs), *words, "--out", tmp_path / "command")
    for sources in (runs, [str(each.path) for each in runs]):
        found = getattr(fedsign.analyze, command)(*sources, **options)
        assert found.as_json() | {"files": expected["files"]} == expected
    written = found.write(tmp_path / "python")
    assert [path.name for path in written] == [Path(file).name for file in expected["files"]]
    assert all(path.read_bytes() == (tmp_path / "command" / path.name).read_bytes() for path in written)
    shown = found._repr_html_()
    assert shown.count("<svg") == len(found.figures)
    assert len(found.frame()) == len(found.summary or found.rows or [found.facts]) > 0
    assert found.figures or "<table" in shown


def test_curvature_of_a_run(trained: list[Run], tmp_path: Path) -> None:
    facts = analyze("curvature", trained[0].path, "--draws", 8, "--samples", 100, "--out", tmp_path)["facts"]
    assert facts["smallest"] < facts["largest"] and facts["trace"] > 0
    assert abs(facts["cosine_signs_gradient"]) < 0.2


@pytest.mark.parametrize(
    ("command", "num_runs", "options", "said"),
    [
        ("valley", 1, ["--points", 5, "--draws", 2], "asymmetry"),
        ("interpolate", 2, ["--points", 5], "midpoint gap"),
        ("trajectory", 1, ["--points", 3], "explained variance"),
        pytest.param("signs", 1, [], "same signs", marks=pytest.mark.needs("signs")),
        ("curvature", 1, ["--draws", 2, "--samples", 50], "largest eigenvalue"),
    ],
)
def test_tables_for_people(
    command: str, num_runs: int, options: list[Any], said: str, trained: list[Run], tmp_path: Path
) -> None:
    words = [command, *(done.path for done in trained[:num_runs]), *options, "--out", tmp_path]
    done = CliRunner().invoke(app, ["analyze", *map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0 and said in done.output


@pytest.mark.parametrize("what", ["valley", "curvature", "signs", "interpolate"])
def test_a_model_that_is_not_finite_is_refused(trained: list[Run], tmp_path: Path, what: str) -> None:
    folder = shutil.copytree(trained[1].path, tmp_path / "run")
    weights = load_file(folder / "model.safetensors")
    name = next(iter(weights))
    weights[name].view(-1)[3] = torch.nan
    save_model(folder / "model.safetensors", weights)
    paths = [folder, trained[0].path] if what in ("signs", "interpolate") else [folder]
    said = refused(what, *paths)
    assert said.startswith(
        f"the model in {folder} holds NaN or infinite values in tensor '{name}': its training diverged; give"
    )
