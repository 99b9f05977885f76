"""The experiment's tree: complete, frozen, printed back, and every mistake is one sentence."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fedsign.config import ExperimentConfig, from_dict, from_toml, load
from fedsign.errors import ConfigError
from fedsign.registry import KINDS, resolve

DEFAULT_EXPERIMENT = {
    "task": "classification",
    "seed": 0,
    "rounds": 40,
    "data": {"name": "digits", "test_fraction": 0.2},
    "partition": {"name": "dirichlet", "num_clients": 50, "alpha": 0.1, "min_partition_size": 4},
    "model": {"name": "mlp", "hidden": [128, 128]},
    "strategy": {"name": "fedsign", "gamma": 0.003, "reduction": "sum", "weighting": "uniform"},
}

trees = st.fixed_dictionaries(
    {},
    optional={
        "name": st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
        "seed": st.integers(0, 2**63 - 1),
        "rounds": st.integers(1, 10**6),
        "callbacks": st.lists(st.sampled_from(["progress", "report"]), max_size=2),
        "metrics": st.lists(st.sampled_from(["accuracy", "rmse"]), max_size=2),
        "model": st.one_of(
            st.fixed_dictionaries({"name": st.just("mlp"), "hidden": st.lists(st.integers(1, 512), max_size=4)}),
            st.fixed_dictionaries({"name": st.just("linear"), "bias": st.booleans()}),
        ),
        "partition": st.fixed_dictionaries(
            {"num_clients": st.integers(10, 10**6), "alpha": st.floats(0, 1e6, exclude_min=True)}
        ),
        "client": st.fixed_dictionaries({"lr": st.floats(1e-300, 1e300), "weight_decay": st.floats(0, 1)}),
        "server": st.fixed_dictionaries({"round_timeout_s": st.floats(1e-3, math.inf)}),
        "results": st.fixed_dictionaries({"root": st.text(st.characters(exclude_categories=["Cs"]))}),
    },
)


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Path -> value of every leaf of a tree of tables."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def as_override(path: str, value: Any) -> str:
    return f"{path}={tomli_w.dumps({'v': value}).removeprefix('v = ')}"


DEFAULT_LEAVES = leaves(load().model_dump(mode="json"))
NUMBERS = {path: value for path, value in DEFAULT_LEAVES.items() if type(value) in (int, float, bool)}


def sentence_of(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(None, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@given(trees)
def test_a_configuration_printed_and_read_back_is_equal(tree: dict[str, Any]) -> None:
    config = from_dict(tree)
    assert from_toml(config.to_toml()) == config
    assert config.replace() == config


def test_the_default_is_the_documented_experiment() -> None:
    tree = from_dict({}).model_dump(mode="json")
    assert {section: tree[section] for section in DEFAULT_EXPERIMENT} == DEFAULT_EXPERIMENT
    client = {"local_epochs": 5, "batch_size": 16, "lr": 0.05, "weight_decay": 0.0}
    assert tree["client"] == client | {"optimizer": {"name": "sgd", "momentum": 0.9, "nesterov": False}}
    assert (tree["server"]["cohort_size"], tree["engine"]["name"], tree["engine"]["threads"]) == (10, "in_process", 1)


def test_tiny_is_an_experiment(tiny: dict[str, Any]) -> None:
    config = from_dict(tiny)
    assert (config.rounds, config.partition.num_clients, config.callbacks) == (2, 4, ())


@pytest.mark.parametrize("path", DEFAULT_LEAVES)
def test_every_leaf_can_be_set(path: str) -> None:
    assert load(None, [as_override(path, DEFAULT_LEAVES[path])]) == load()


@pytest.mark.parametrize("path", NUMBERS)
def test_setting_a_leaf_changes_that_leaf_alone(path: str) -> None:
    value = NUMBERS[path]
    changed = not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else value / 2 + 0.001
    after = leaves(load(None, [as_override(path, changed)]).model_dump(mode="json"))
    assert after == DEFAULT_LEAVES | {path: changed}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("sed=1", "'sed'. Did you mean 'seed'?"),
        ("client.batch_sise=8", "'client.batch_sise'. Did you mean 'batch_size'?"),
        ("client.learning_rte=0.1", "'client.learning_rte'. Known here: local_epochs, batch_size, lr,"),
        ("client.optimizer.momentun=0.5", "'client.optimizer.momentun'. Did you mean 'momentum'?"),
        ("strategy.gama=0.1", "'strategy.gama'. Did you mean 'gamma'?"),
        ("partition.num_client=5", "'partition.num_client'. Did you mean 'num_clients'?"),
        ("engine.thread=2", "'engine.thread'. Did you mean 'threads'?"),
        ("strategy.name=fedsing", "strategy 'fedsing' is not known; Did you mean 'fedsign'?"),
        ("client.optimizer.name=sdg", "Did you mean 'sgd'?"),
        ("task=clasification", "Did you mean 'classification'?"),
        ('metrics=["acuracy"]', "Did you mean 'accuracy'?"),
        ('callbacks=["progres"]', "Did you mean 'progress'?"),
    ],
)
def test_a_misspelt_name_is_answered_with_the_nearest(override: str, expected: str) -> None:
    assert expected in sentence_of(override)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["partition.alpha=0"], ["partition.alpha=0", "greater than 0"]),
        (["client.lr=0"], ["client.lr=0", "greater than 0"]),
        (["client.lr=nan"], ["client.lr=nan"]),
        (["rounds=0"], ["rounds=0", "greater than 0"]),
        (["rounds=few"], ["rounds='few'", "integer"]),
        (["client.optimizer.momentum=1"], ["client.optimizer.momentum=1", "less than 1"]),
        (["strategy.reduction=max"], ["strategy.reduction='max'", "'sum', 'tensor_mean' or 'mean'"]),
        (["name=a/b"], ["name='a/b'"]),
        (["server.cohort_size=51"], ["server.cohort_size=51", "50 clients"]),
        (["server.min_replies=11"], ["server.min_replies=11", "server.cohort_size=10"]),
        (["strategy=fedavg"], ["strategy='fedavg'", "a table with a name"]),
        (["seed.x=1"], ["seed="]),
        (["client.lr.x=1"], ["client.lr="]),
        (["client.lr"], ["KEY=VALUE", "'client.lr'"]),
        (["=3"], ["KEY=VALUE", "'=3'"]),
        ([""], ["KEY=VALUE", "''"]),
        (["strategy.name=:FedAvg"], ["':FedAvg'"]),
    ],
    ids=str,
)
def test_a_mistake_is_one_sentence_that_names_what_was_given(overrides: list[str], expected: list[str]) -> None:
    sentence = sentence_of(*overrides)
    assert all(part in sentence for part in expected), sentence


@pytest.mark.parametrize("content", [b"seed = ", b"seed = 1\nseed = 2\n", b"name = '\xff\xfe'\n"], ids=str)
def test_a_damaged_file_is_one_sentence_that_names_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"mine\.toml"):
        load(path)


def test_an_unreadable_file_is_one_sentence_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.toml cannot be read: No such file"):
        load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load(tmp_path)


def test_a_file_is_changed_by_overrides(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('seed = 3\n[strategy]\nname = "fedprox"\nmu = 0.5\n')
    config = load(path, ["seed=4"])
    assert (config.seed, config.strategy.name, config.strategy.settings["mu"]) == (4, "fedprox", 0.5)


def test_naming_another_part_drops_the_settings_of_the_former(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[strategy]\nname = "fedprox"\nmu = 0.5\n[partition]\nnum_clients = 20\nalpha = 3.0\n')
    config = load(path, ["strategy.name=feddyn", "strategy.alpha=0.2", "partition.name=iid"])
    assert config.strategy.settings == {"alpha": 0.2}
    assert (config.partition.num_clients, config.partition.settings) == (20, {})
    assert load(path, ["strategy.name=fedprox"]).strategy.settings["mu"] == 0.5, "the same name drops nothing"
    assert load().replace(**{"strategy.name": "fedavg"}).strategy.settings == {"weighting": "uniform"}


def test_the_order_of_overrides_does_not_matter() -> None:
    overrides = ["strategy.mu=0.25", "strategy.name=fedprox"]
    assert load(None, overrides[::-1]).strategy.settings["mu"] == 0.25
    assert load(None, overrides) == load(None, overrides[::-1])


def test_a_configuration_is_frozen() -> None:
    config = load()
    for part, key in ((config, "seed"), (config.client, "lr"), (config.strategy, "name"), (config.strategy, "gamma")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(part, key, 1)
    config.strategy.settings["gamma"] = 1.0
    assert config == ExperimentConfig(**load().model_dump())


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, entry in KINDS.items() for name in entry.table])
def test_every_name_in_the_registry_leads_to_a_factory(kind: str, name: str) -> None:
    assert callable(resolve(kind, name))


@pytest.fixture
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """The current folder holds a user's modules; none of them stays imported."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_part.py").write_text("def net(shape, outputs, *, width: int = 3): ...\nnumber = 4\n")
    (tmp_path / "own_broken.py").write_text("import own_dependency_that_is_missing\n")
    yield
    for module in ("own_part", "own_broken"):
        sys.modules.pop(module, None)


@pytest.mark.usefixtures("own_modules")
def test_a_module_in_the_current_folder_is_found_and_its_settings_are_checked() -> None:
    assert load(None, ["model.name=own_part:net"]).model.settings == {"width": 3}
    assert load(None, ["model.name=own_part:net", "model.width=5"]).model.settings == {"width": 5}
    assert "Did you mean 'width'?" in sentence_of("model.name=own_part:net", "model.widht=5")


@pytest.mark.usefixtures("own_modules")
def test_what_is_missing_of_a_module_is_named(tmp_path: Path) -> None:
    sentence = sentence_of("model.name=own_prat:net")
    assert "no module 'own_prat'" in sentence
    assert str(tmp_path) in sentence
    assert "no module 'own_part.deeper'" in sentence_of("model.name=own_part.deeper:net")
    assert "has no 'nett'. Did you mean 'net'?" in sentence_of("model.name=own_part:nett")
    assert "is a int; expected a class or a function" in sentence_of("model.name=own_part:number")


@pytest.mark.usefixtures("own_modules")
def test_a_module_whose_own_import_fails_shows_what_it_lacks() -> None:
    with pytest.raises(ModuleNotFoundError, match="own_dependency_that_is_missing"):
        load(None, ["model.name=own_broken:net"])
