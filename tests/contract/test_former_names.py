"""Every name that was changed works under its former name, with one sentence that says the new one."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedsign import former_names
from fedsign.config import from_dict, load, merged
from fedsign.errors import ConfigError
from fedsign.federation.aggregation import Aggregate
from fedsign.records import Role, Tensors
from simulations import load_run, run
from simulations.jobs import digest_of
from strategies.base import Strategy
from strategies.feddyn import FedDyn

KEYS = [
    pytest.param(
        {"data": {"normalise": "unit"}},
        {"data": {"normalize": "unit"}},
        ("data.normalise", "data.normalize"),
        id="data",
    ),
    pytest.param(
        {"parameterisation": {"name": "sp"}},
        {"parameterization": {"name": "sp"}},
        ("parameterisation", "parameterization"),
        id="parameterization",
        marks=pytest.mark.needs("sparsity"),
    ),
]


def flat(tree: dict[str, Any]) -> str:
    ((section, keys),) = tree.items()
    ((key, value),) = keys.items()
    return f"{section}.{key}={value}"


@pytest.mark.parametrize(("former", "today", "names"), KEYS)
def test_a_former_key_is_taken_with_a_warning(
    former: dict[str, Any], today: dict[str, Any], names: tuple[str, str], tmp_path: Path
) -> None:
    """In a dictionary, in a file, with --set and in `replace`."""
    expected, said = from_dict(today), rf"^{names[0]} is now {names[1]}; the former name will be removed in 0\.3$"
    file = tmp_path / "experiment.toml"
    ((section, keys),) = former.items()
    file.write_text(f"[{section}]\n" + "".join(f'{key} = "{value}"\n' for key, value in keys.items()))
    key, _, value = flat(former).partition("=")
    with pytest.warns(FutureWarning, match=said):
        assert from_dict(former) == expected
    with pytest.warns(FutureWarning, match=said):
        assert load(file) == expected
    with pytest.warns(FutureWarning, match=said):
        assert load(None, [flat(former)]) == expected
    with pytest.warns(FutureWarning, match=said):
        assert from_dict({}).replace(**{key: value}) == expected
    assert expected.get(key, "") == value
    with pytest.raises(ConfigError, match=rf"^{names[0]} and {names[1]} were both given, .*; keep {names[1]}\.$"):
        from_dict(merged(former, today))


@pytest.mark.parametrize(("former", "today", "names"), KEYS)
def test_a_digest_is_that_of_the_former_names(
    former: dict[str, Any], today: dict[str, Any], names: tuple[str, str]
) -> None:
    """Else a comparison would run its finished cells again."""
    counted = former_names.former_tree(from_dict(today).result_settings())
    assert former_names.current_tree(counted, warns=False) == from_dict(today).result_settings() != counted
    assert digest_of(from_dict(today)) != digest_of(from_dict({}))


def test_a_run_that_was_stored_under_the_former_names_is_read_and_resumed_without_a_warning(
    tiny: dict[str, Any],
) -> None:
    done = run({**tiny, "data": {**tiny.get("data", {}), "normalize": "unit"}})
    file = done.path / "config.toml"
    then = file.read_text().replace("normalize", "normalise").replace("parameterization", "parameterisation")
    file.write_text(
        "".join(line for line in then.splitlines(keepends=True) if line.startswith("# run") or line[0] != "#")
    )
    stored = load_run(done.path)
    assert stored.config == done.config
    resumed = run({"rounds": 3}, resume=done.path)
    assert len(resumed.rounds) == 3
    assert "normalise" not in file.read_text()
    with pytest.raises(ConfigError, match="was started with another 'data'"), pytest.warns(FutureWarning):
        run({"data": {"normalise": "none"}}, resume=done.path)


MODULES = [
    ("fedsign.data.normalise", "fedsign.data.normalize", "Normalization"),
    pytest.param(
        "fedsign.parameterisation.roles",
        "fedsign.parameterization.roles",
        "ModelRoles",
        marks=pytest.mark.needs("sparsity"),
    ),
    pytest.param(
        "fedsign.parameterisation.sparsity.base",
        "fedsign.parameterization.sparsity.base",
        "MaskRule",
        marks=pytest.mark.needs("sparsity"),
    ),
    pytest.param(
        "simulations.comparison.play",
        "simulations.comparison.execution",
        "compare",
        marks=pytest.mark.needs("comparison"),
    ),
    pytest.param(
        "simulations.ablation.play", "simulations.ablation.execution", "ablate", marks=pytest.mark.needs("ablation")
    ),
]


@pytest.mark.parametrize(("former", "today", "name"), MODULES)
def test_a_former_module_is_imported_with_a_warning(former: str, today: str, name: str) -> None:
    for each in [each for each in sys.modules if each.startswith(("fedsign.parameterisation", former))]:
        del sys.modules[each]
    with pytest.warns(FutureWarning, match=r"is now (fedsign|simulations)\."):
        found = importlib.import_module(former)
    assert getattr(found, name) is getattr(importlib.import_module(today), name)


def test_the_analyses_have_their_former_name_too() -> None:
    import fedsign

    sys.modules.pop("fedsign.analyse", None)
    vars(fedsign).pop("analyse", None)
    with pytest.warns(FutureWarning, match=r"^fedsign\.analyse is now fedsign\.analyze; "):
        assert fedsign.analyse is fedsign.analyze
    with pytest.warns(FutureWarning, match=r"^fedsign\.analyze\.Found is now fedsign\.analyze\.Analysis; "):
        assert getattr(fedsign.analyze, "Found") is fedsign.analyze.Analysis  # noqa: B009


@pytest.mark.needs("sparsity")
def test_a_former_command_is_taken_with_a_warning() -> None:
    from simulations.cli import app

    arguments = ["--set", "parameterization.name=sp", "--json"]
    said = CliRunner().invoke(app, ["analyze", "parameterization", *arguments], catch_exceptions=False)
    with pytest.warns(FutureWarning, match="^fedsign analyse is now fedsign analyze; "):
        former = CliRunner().invoke(app, ["analyse", "parameterisation", *arguments], catch_exceptions=False)
    assert former.stdout == said.stdout and json.loads(said.stdout)


@pytest.mark.needs("comparison")
def test_the_results_of_a_cell_have_their_former_name_too() -> None:
    from fedsign.comparison.folder import load_comparison

    done = load_comparison(Path(__file__).parents[1] / "fixtures" / "a987b81" / "comparison")
    cell = done.plan.cells[0]
    with pytest.warns(FutureWarning, match=r"^Comparison\.played is now Comparison\.result_of; "):
        assert done.played(cell) == done.result_of(cell)


@pytest.mark.needs("tracking")
def test_a_tracker_may_take_its_last_round_under_the_former_name(tiny: dict[str, Any]) -> None:
    from simulations.callbacks.tracking import Earlier, Tracker

    class Old(Tracker):
        name, label, begun = "old", "Old", list[int]()

        def begin(self, earlier: Earlier | None, *, last_played: int) -> tuple[str, int]:  # type: ignore[override]
            self.begun.append(last_played)
            return "page 1", 0

        def log(self, round: int, numbers: Any) -> None: ...

        def end(self, outcome: Any, final: Any) -> None: ...

    with pytest.warns(FutureWarning, match="^last_played is now last_recorded; "):
        run(tiny, callbacks=[Old()])
    assert Old.begun == [0]


def test_an_analysis_that_was_stored_under_the_former_names_is_read(tmp_path: Path) -> None:
    from fedsign.report.analysis import read_analysis
    from fedsign.storage.digests import sealed_json

    told = {
        "kind": "valley",
        "name": "valley",
        "facts": {"centre": {"loss": 0.5}, "own_centre": {"loss": 0.4}},
        "summary": [{"direction": "sgp_centred", "centre": 0.5}],
        "curves": [],
    }
    (tmp_path / "valley.json").write_text(sealed_json(told))
    with (tmp_path / "valley.npz").open("wb") as file:
        np.savez(file, centre=np.zeros(1))
    found = read_analysis(tmp_path / "valley.json")
    assert found.facts == {"center": {"loss": 0.5}, "own_center": {"loss": 0.4}}
    assert found.summary == [{"direction": "sgp_centered", "center": 0.5}] and list(found.arrays) == ["center"]


@pytest.mark.parametrize(("base", "expected"), [(Strategy, 0.5), (FedDyn, 0.75)])
def test_a_strategy_with_a_former_method_works_with_a_warning(base: type[Strategy], expected: float) -> None:
    """Half of the mean, 1; and half of FedDyn's mean + 1/2 (mean - served) with one of two clients and h = 0."""
    warning = r"^Halved\.move is now server_update; the former name will be removed in 0\.3$"
    with pytest.warns(FutureWarning, match=warning) as caught:

        class Halved(base):  # type: ignore[misc, valid-type]
            def move(self, round: Aggregate) -> Tensors:
                return {name: tensor / 2 for name, tensor in super().move(round).items()}

    assert caught[0].filename == __file__
    aggregate = Aggregate(
        round=1,
        served={"a": torch.zeros(2)},
        mean={"a": torch.ones(2)},
        extra={},
        roles={"a": Role.PARAMETER},
        num_replies=1,
        num_clients=2,
        num_sent={"a": 1},
        weight_sent={"a": 1.0},
    )
    assert Halved().server_update(aggregate)["a"].tolist() == [expected] * 2
