"""The experiment's tree: complete, frozen, printable, and every mistake is one sentence."""

import math
import re
import sys
import tomllib
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fedsign import capabilities, plugins
from fedsign.capabilities import CAPABILITIES
from fedsign.config import ExperimentConfig, from_dict, from_toml, load, without_unused
from fedsign.errors import ConfigError
from fedsign.extensions import load as load_target
from fedsign.overrides import parse_override
from fedsign.registry import KINDS, resolve

DEFAULT_EXPERIMENT = {
    "task": "classification",
    "seed": 0,
    "rounds": 40,
    "data": {
        "name": "digits",
        "test_fraction": 0.2,
        "flat": True,
        "normalize": "default",
        "mean": [],
        "std": [],
        "augment": "none",
        "validation_fraction": 0.0,
    },
    "partition": {"name": "dirichlet", "num_clients": 50, "alpha": 0.1, "min_partition_size": 4},
    "model": {"name": "mlp", "start": "", "output": "", "init_scale": 1.0, "hidden": [128, 128], "projection_dim": 0},
    "strategy": {"name": "fedavg", "weighting": "uniform", "weights": []},
}

trees = st.fixed_dictionaries(
    {},
    optional={
        "name": st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
        "seed": st.integers(0, 2**31 - 1),
        "rounds": st.integers(1, 10**6),
        "callbacks": st.lists(st.sampled_from(["progress", "report"]), max_size=2),
        "metrics": st.lists(st.sampled_from(["accuracy", "rmse"]), unique=True),
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


KNOWN = tomllib.loads(Path(capabilities.__file__).with_name("known.toml").read_text(encoding="utf-8"))
UNUSED = KNOWN["digested"], KNOWN["undigested"]
DEFAULT_LEAVES = leaves(load().model_dump(mode="json"))
NUMBERS = {path: value for path, value in DEFAULT_LEAVES.items() if type(value) in (int, float, bool)}
COMPANIONS = {
    path: companion
    for path, companion in {
        "faults.delay_s": "faults.delay_rate=0.1",
        "attack.fraction": "attack.name=sign_flip",
        "client.sharding.intra_gbps": "client.sharding.ranks=4",
        "client.sharding.inter_gbps": "client.sharding.ranks=4",
        "client.sharding.prefetch": "client.sharding.ranks=4",
        "results.keep_best": "data.validation_fraction=0.1",
        "results.patience": "data.validation_fraction=0.1",
    }.items()
    if path in NUMBERS
}  # without which it has no effect
NOT_HALVED = {
    "client.sharding.groups",
    "client.sharding.memory_gb",
    "client.sharding.machines",
    "client.sharding.join_s",
    "client.sharding.insecure_network",
}  # likewise: tests.sharding.test_sharding_capabilities


def other(value: float) -> float:
    """Another value that a setting may have."""
    return not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else value / 2 + 0.001


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
    client = {"local_epochs": 5, "local_steps": 0, "batch_size": 16, "lr": 0.05, "weight_decay": 0.0}
    untouched = {
        "clip_norm": 0.0,
        "label_smoothing": 0.0,
        "temperature": 1.0,
        "schedule": {"name": "constant", "per": "round"},
    }
    untouched |= {"micro_batch": 0, "path": "sequential", "state_cache_mib": 256.0}
    expected = client | untouched | {"optimizer": {"name": "sgd", "momentum": 0.9, "nesterov": False}}
    assert {key: tree["client"][key] for key in expected} == expected
    assert tree["server"]["optimizer"] == {"name": "none"}
    assert (tree["server"]["cohort_size"], tree["engine"]["name"], tree["engine"]["threads"]) == (10, "in_process", 1)


def as_without(capabilities: Iterable[str], tree: dict[str, Any]) -> dict[str, Any]:
    """What is left of a tree in an installation without these capabilities."""
    for trees in UNUSED:
        for name in trees.keys() & set(capabilities):
            tree = without_unused(tree, trees[name], name)
    return tree


def test_a_configuration_that_uses_no_capability_is_read_without_any() -> None:
    """What it says of them is all in `known.toml`, so that only the core's keys are left, whatever is installed."""
    left = leaves(as_without({name for trees in UNUSED for name in trees}, load().model_dump(mode="json")))
    assert left and left.keys() <= DEFAULT_LEAVES.keys()
    owned = {
        f"{path}.{key}"
        for each in CAPABILITIES.values()
        for path, target in each.sections.items()
        for key in load_target(target).model_fields
    }
    assert owned & left.keys() <= {"client.path"}, "the core's, to which a capability adds a choice"


@pytest.mark.parametrize(
    ("capability", "override", "expected"),
    [
        (
            "privacy",
            {"privacy": {"name": "local"}},
            "privacy.name='local' was given, but needs the capability 'privacy'",
        ),
        ("sharding", {"client": {"lr": 1.0, "sharding": {"machines": 2}}}, "client.sharding.machines=2 .* 'sharding'"),
        ("signs", {"results": {"signs": True}}, "results.signs=true .* 'signs', .*; install one that has it"),
    ],
)
def test_a_configuration_that_uses_a_capability_is_refused_without_it(
    capability: str, override: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        as_without([capability], override)


def test_a_choice_that_a_capability_adds_to_a_key_of_the_core_is_refused_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fedsign.config.absent", lambda what: KNOWN["choices"] if what == "choices" else {})
    with pytest.raises(ConfigError, match=r"client\.path='cohort' was given, but needs the capability 'cohort'"):
        from_dict({"client": {"path": "cohort"}})


def test_tiny_is_an_experiment(tiny: dict[str, Any]) -> None:
    config = from_dict(tiny)
    assert (config.rounds, config.partition.num_clients, config.callbacks) == (2, 4, ())


@pytest.mark.parametrize("path", DEFAULT_LEAVES)
def test_every_leaf_can_be_set(path: str) -> None:
    assert load(None, [as_override(path, DEFAULT_LEAVES[path])]) == load()


@pytest.mark.parametrize("path", [path for path in NUMBERS if path not in COMPANIONS.keys() | NOT_HALVED])
def test_setting_a_leaf_changes_that_leaf_alone(path: str) -> None:
    changed = other(NUMBERS[path])
    after = leaves(load(None, [as_override(path, changed)]).model_dump(mode="json"))
    instead = {"client.local_epochs": 0} if path == "client.local_steps" else {}  # the one replaces the other
    assert after == DEFAULT_LEAVES | {path: changed} | instead


@pytest.mark.parametrize("path", COMPANIONS)
def test_a_leaf_from_which_nothing_would_follow_is_refused(path: str) -> None:
    changed = other(NUMBERS[path])
    override, companion = as_override(path, changed), COMPANIONS[path]
    with pytest.raises(ConfigError, match=re.escape(f"{path}=")):
        load(None, [override])
    assert leaves(load(None, [override, companion]).model_dump(mode="json"))[path] == changed


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("sed=1", "'sed'. Did you mean 'seed'?"),
        ("client.batch_sise=8", "'client.batch_sise'. Did you mean 'batch_size'?"),
        ("client.learning_rte=0.1", "'client.learning_rte'. Did you mean 'lr'?"),
        ("client.batchsize=8", "'client.batchsize'. Did you mean 'batch_size'?"),
        ("client.epochs=2", "'client.epochs'. Did you mean 'local_epochs'?"),
        ("model.layers=[3]", "'model.layers'. Did you mean 'hidden'?"),
        ("num_rounds=2", "'num_rounds'. Did you mean 'rounds'?"),
        ("server.clients_per_round=2", "'server.clients_per_round'. Did you mean 'cohort_size'?"),
        ("fraction_fit=0.1", "'fraction_fit'. Did you mean 'server.cohort_size'?"),
        ("lr=0.1", "'lr'. Did you mean 'client.lr'?"),
        ("weighting=uniform", "'weighting'. Did you mean 'strategy.weighting'?"),
        ("alpha=0.1", "'alpha'. Did you mean 'partition.alpha'?"),
        ("client.momentum=0.1", "'client.momentum'. Did you mean 'client.optimizer.momentum'?"),
        ("zzz=1", "'zzz'. Known here: name, seed, rounds,"),
        ("client.optimizer.momentun=0.5", "'client.optimizer.momentun'. Did you mean 'momentum'?"),
        ("strategy.weigting=uniform", "'strategy.weigting'. Did you mean 'weighting'?"),
        ("partition.num_client=5", "'partition.num_client'. Did you mean 'num_clients'?"),
        ("strategy.gamma=1", "'strategy.gamma'. It needs strategy.name=fedsign; strategy.name is fedavg."),
        ("strategy.mu=1", "'strategy.mu'. It needs strategy.name=fedprox or moon; strategy.name is fedavg."),
        ("model.channels=[4]", "It needs model.name=cnn, mcmahan_cnn, niid_cnn or pfl_cnn; model.name is mlp."),
        ("engine.thread=2", "'engine.thread'. Did you mean 'threads'?"),
        ("strategy.name=fedsing", "strategy 'fedsing' is not known. Did you mean 'fedsign'? Expected one of"),
        ("client.optimizer.name=sdg", "Did you mean 'sgd'?"),
        ("task=clasification", "Did you mean 'classification'?"),
        ('metrics=["acuracy"]', "Did you mean 'accuracy'?"),
        ('callbacks=["progres"]', "Did you mean 'progress'?"),
    ],
)
def test_an_unknown_name_is_answered_with_the_component_that_has_it_or_the_nearest(
    override: str, expected: str
) -> None:
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
        (
            ["strategy.name=fedsign", "strategy.reduction=max"],
            ["strategy.reduction='max'", "'sum', 'tensor_mean' or 'mean'"],
        ),
        (["name=a/b"], ["name='a/b'"]),
        (["server.cohort_size=51"], ["server.cohort_size=51", "50 clients"]),
        (["server.min_replies=11"], ["server.min_replies=11", "server.cohort_size=10"]),
        (["strategy=fedavg"], ["strategy='fedavg'", "a table with a name", "--set strategy.name=fedavg"]),
        (["client.optimizer=adamw"], ["--set client.optimizer.name=adamw"]),
        (
            ["client=3"],
            [
                "client=3",
                "a table with the keys local_epochs, local_steps, batch_size, lr,",
                "--set client.local_epochs=",
            ],
        ),
        (["metrics=accuracy"], ["metrics='accuracy'", 'a list such as ["accuracy"]', "--set 'metrics=[\"accuracy\"]'"]),
        (["metrics=f1, auc"], ['--set \'metrics=["f1", "auc"]\'']),
        (["metrics=[f1]"], ["--set 'metrics=[\"f1\"]'"]),
        (["model.hidden=3"], ["model.hidden=3", "a list such as [128, 128]"]),
        (["model.hidden=[8,0]"], ["model.hidden[1]=0", "greater than 0", "--set model.hidden=VALUE"]),
        (["model.hidden=[true]"], ["model.hidden=", "not true or false"]),
        (["model.name=cnn", "model.channels=[0,3]"], ["model.channels[0]=0", "greater than 0"]),
        (["model.name=cnn", "model.channels=[1]"], ["model.channels"]),
        (["engine.threads=4097"], ["engine.threads=4097", "less than or equal to 4096"]),
        (["engine.threads=0"], ["engine.threads=0", "greater than or equal to 1"]),
        (["seed=2147483648"], ["seed=2147483648", "less than or equal to 2147483647"]),
        (["seed=-1"], ["seed=-1", "greater than or equal to 0"]),
        (["rounds=true"], ["rounds=true", "a number, not true or false"]),
        (["client.lr=true"], ["client.lr=true", "a number, not true or false"]),
        (["client.lr=inf"], ["client.lr=inf", "a finite number"]),
        (["strategy.name=fedsign", "strategy.gamma=true"], ["strategy.gamma=true", "a number, not true or false"]),
        (["client.optimizer.nesterov=true", "client.optimizer.momentum=0"], ["nesterov=true", "momentum above 0"]),
        (["client.optimizer.name=adamw", "client.optimizer.beta1=1"], ["beta1=1", "less than 1"]),
        (['metrics=["accuracy","accuracy"]'], ["'accuracy' 2 times"]),
        (['metrics=["sklearn.metrics:accuracy_score","own:accuracy_score"]'], ["own"]),
        (["client..lr=3"], ["KEY=VALUE", "'client..lr=3'"]),
        ([".lr=3"], ["KEY=VALUE", "'.lr=3'"]),
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
    for leaked in ("valid tuple", "valid dictionary", "instance of", "String should", "pydantic", "setting_"):
        assert leaked not in sentence


@pytest.mark.needs("tables")
@pytest.mark.parametrize("override", ["data.path=my wine.csv", "data.name=my wine.csv", "data=my wine.csv"])
def test_a_data_file_without_its_reader_is_answered_with_the_settings_that_read_it(override: str) -> None:
    sentence = sentence_of(override)
    assert sentence.startswith(f"{override} was given")
    assert "use --set data.name=csv --set 'data.path=my wine.csv' --set data.target=COLUMN." in sentence
    assert "--set data.name=NAME --set data.path=x.dat, where NAME is one of csv, " in sentence_of("data.path=x.dat")
    assert load(None, ["data.name=csv", "data.path=my wine.csv", "data.target=kind"]).data.name == "csv"


@pytest.mark.needs("tables")
def test_a_data_file_in_the_place_of_a_configuration_is_answered_with_the_settings_that_read_it(tmp_path: Path) -> None:
    (tmp_path / "a.npz").touch()
    for file in (tmp_path / "a.npz", tmp_path / "none.npz"):
        with pytest.raises(
            ConfigError, match=rf"{file.name} was given, where .* use --set data.name=npz --set data.path="
        ):
            load(file)


def test_an_override_is_one_value() -> None:
    with_second_line = parse_override("name=1\nseed = 3")
    assert with_second_line == ("name", "1\nseed = 3")
    assert parse_override("engine.name= ray ") == ("engine.name", "ray")


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
    assert load().replace(**{"strategy.name": "fedavg"}).strategy.settings == {"weighting": "uniform", "weights": []}


def test_the_order_of_overrides_does_not_matter() -> None:
    overrides = ["strategy.mu=0.25", "strategy.name=fedprox"]
    assert load(None, overrides[::-1]).strategy.settings["mu"] == 0.25
    assert load(None, overrides) == load(None, overrides[::-1])


def test_a_configuration_is_frozen() -> None:
    config = load()
    for part, key in ((config, "seed"), (config.client, "lr"), (config.strategy, "name"), (config.strategy, "weights")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(part, key, 1)
    config.strategy.settings["weights"] = [1.0]
    assert config == ExperimentConfig(**load().model_dump())


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, entry in KINDS.items() for name in entry.table])
def test_every_name_in_the_registry_leads_to_a_factory(kind: str, name: str) -> None:
    assert callable(resolve(kind, name))


OWN_PART = """
from typing import Annotated
from pathlib import Path
import torch
from pydantic import Field

def net(shape, outputs, *, width: int = 3): ...
number = 4
def odd_names(shape, outputs, *, copy: int = 1, json: float = 0.5, schema: str = "s", _under: bool = True): ...
def values(shape, outputs, *, sizes: tuple[int, ...] = (1, 2), where: Path = Path("."), \
dtype: torch.dtype = torch.float32,
           rate: float = None, bound: float = Field(0.5, gt=0), act=torch.nn.ReLU, huge: int = 2**70):
    return {"sizes": sizes, "where": where, "dtype": dtype, "rate": rate, "bound": bound}
def raises(shape, outputs, *, width: int = 3):
    raise ValueError(f"width {width} is odd\\nmore")
def undefined(shape, outputs, *, width: "Widht" = 3): ...
def unfit(shape, outputs, *, width: Annotated[str, Field(gt=0, multiple_of="x")] = "a"): ...
def bad_default(shape, outputs, *, width: int = "wide"): ...
def too_few(shape): ...
def by_position(shape, outputs, width, /): ...
def named(shape, outputs, *, name: str = "x"): ...
def dealt(samples, num_clients_, rng, *, num_clients: int = 3): ...
class Engine:
    def __init__(self, *, threads: int = 3): ...
class Extended:
    def __init__(self, *, beta: float = 0.9, **others): self.others = others
def needs_more(outputs, targets, *, beta: float): ...
def loss(outputs, targets): ...
"""


@pytest.fixture
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """The current folder holds a user's modules; none of them stays imported."""
    monkeypatch.chdir(tmp_path)
    files = {
        "own_part": OWN_PART,
        "own_broken": "import own_dependency_that_is_missing\n",
        "own_syntax": "x = 1\ndef net(:\n",
        "own_raising": "\n\nraise KeyError('table')\n",
        "own_leaving": "import sys\nsys.exit(2)\n",
    }
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    yield
    for module in files:
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
    assert "is of type int; expected a class or a function" in sentence_of("model.name=own_part:number")


@pytest.mark.usefixtures("own_modules")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("own_broken:net", ["ModuleNotFoundError", "own_dependency_that_is_missing", "own_broken.py:1)"]),
        ("own_syntax:net", ["SyntaxError", "own_syntax.py:2)"]),
        ("own_raising:net", ["KeyError: 'table'", "own_raising.py:3)"]),
        ("own_leaving:net", ["SystemExit: 2", "own_leaving.py:2)"]),
        ("own_part:undefined", ["NameError", "Widht", "own_part.py:"]),
        ("own_part:unfit", ["own_part.py:"]),
        ("own_part:too_few", ["takes 1 arguments by position", "gives a model 2"]),
        ("own_part:by_position", ["takes 'width' by position only"]),
        ("own_part:named", ["has a parameter 'name'", "every table [model]", "rename the parameter"]),
        ("own_part:bad_default", ["the default model.width='wide' does not fit its own type"]),
    ],
)
def test_what_is_wrong_in_a_users_module_is_a_sentence_with_its_place(name: str, expected: list[str]) -> None:
    sentence = sentence_of(f"model.name={name}")
    assert all(part in sentence for part in (*expected, "model")), sentence


@pytest.mark.usefixtures("own_modules")
def test_a_constructor_that_raises_is_a_sentence_with_its_place() -> None:
    part = load(None, ["model.name=own_part:raises", "model.width=5"]).model
    with pytest.raises(ConfigError) as caught:
        part.build((1,), 2)
    line = next(number for number, text in enumerate(OWN_PART.splitlines(), 1) if "raise ValueError" in text)
    place = f"{Path.cwd() / 'own_part.py'}:{line}"
    assert str(caught.value) == f"model 'own_part:raises': ValueError: width 5 is odd ({place})"


@pytest.mark.usefixtures("own_modules")
def test_a_parameter_may_not_have_the_name_of_a_key_of_its_section() -> None:
    assert "'num_clients' is a key of every table [partition]" in sentence_of("partition.name=own_part:dealt")
    assert "'threads' is a key of every table [engine]" in sentence_of("engine.name=own_part:Engine")


@pytest.mark.usefixtures("own_modules")
def test_a_parameter_may_have_a_name_that_pydantic_uses() -> None:
    part = load(None, ["model.name=own_part:odd_names", "model.copy=5", "model._under=false"]).model
    assert part.settings == {"copy": 5, "json": 0.5, "schema": "s", "_under": False}


@pytest.mark.usefixtures("own_modules")
def test_a_factory_gets_values_of_the_types_that_it_asks_for() -> None:
    overrides = ["model.name=own_part:values", "model.sizes=[3,4]", "model.where=/x", "model.bound=2"]
    config = load(None, overrides)
    assert config.model.settings == {"sizes": [3, 4], "where": "/x", "bound": 2.0}, "what TOML cannot say is left out"
    assert from_toml(config.to_toml()) == config
    built = config.model.build((1,), 2)
    assert built == {"sizes": (3, 4), "where": Path("/x"), "dtype": torch.float32, "rate": None, "bound": 2.0}
    assert load(None, ["model.name=own_part:values", "model.rate=2"]).model.build((1,), 2)["rate"] == 2.0
    assert "model.dtype='float16'" in sentence_of("model.name=own_part:values", "model.dtype=float16")


@pytest.mark.usefixtures("own_modules")
def test_a_factory_that_takes_any_keyword_gets_it() -> None:
    part = load(None, ["strategy.name=own_part:Extended", "strategy.weighting=examples"]).strategy
    assert part.settings == {"beta": 0.9, "weighting": "examples"}
    assert part.build().others == {"weighting": "examples"}


@pytest.mark.usefixtures("own_modules")
def test_a_metric_has_no_settings_and_no_reserved_name() -> None:
    assert "parameter 'beta' without a default, but a metric takes no settings" in sentence_of(
        'metrics=["own_part:needs_more"]'
    )
    assert "metric 'own_part:loss' would be written as 'loss'" in sentence_of('metrics=["own_part:loss"]')


@pytest.mark.parametrize("own", ["strategies.py", "strategies/mine.py"])
def test_a_users_file_that_a_package_hides_is_pointed_out(
    own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / own).parent.mkdir(exist_ok=True)
    (tmp_path / own).write_text("class Mine: ...\n")
    module = own.removesuffix(".py").replace("/", ".")
    said = sentence_of(f"strategy.name={module}:Mine")
    assert "a package of FedSign" in said and said.endswith((": rename it.", ": rename yours."))


def test_nesterov_without_momentum_is_refused_where_it_is_built_too() -> None:
    given = {"momentum": 0.0, "nesterov": True}
    with pytest.raises(ConfigError, match="nesterov=true needs a momentum above 0"):
        plugins.build("optimizer", "sgd", given, [torch.nn.Parameter(torch.zeros(1))], 0.1, 0.0)


@pytest.mark.parametrize("shape", [(1, 3, 8), (9,), (7,)])
def test_a_sample_that_the_cnn_cannot_take_is_a_sentence(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="4x4 or more"):
        plugins.build("model", "cnn", {}, shape, 10)


@pytest.mark.usefixtures("own_modules")
def test_settings_that_the_program_gives_are_checked_too() -> None:
    """A strategy names its objective and the objective's settings in every round."""
    with pytest.raises(ConfigError, match=r"'objective\.gama'. Did you mean 'gamma'"):
        plugins.build("objective", "fedsign", {"gama": 0.1})


def test_a_mistake_is_one_sentence_below_one_traceback() -> None:
    """Not also pydantic's, which names neither the section nor the remedy."""
    for tree in ({"rouns": 3, "strategy": {"gama": 1}}, {"client": {"lr": -1}}, {"model": {"hidden": ["x"]}}):
        with pytest.raises(ConfigError) as found:
            from_dict(tree)
        assert "".join(traceback.format_exception(found.value)).count("Traceback") == 1


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_an_experiment_is_read_as_editors_save_it(encoding: str, line_end: str, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_bytes(f"# été{line_end}rounds = 7{line_end}seed = 3".encode(encoding))
    found = load(tmp_path / "plan.toml")
    assert (found.rounds, found.seed) == (7, 3)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("rounds = 7".encode("utf-16-le"), "UTF-16 without a byte order mark"),
        ('name = "été"'.encode("cp1252"), "save it as UTF-8"),
        (b"\xff\xfer", "save it as UTF-8"),
        (b"rounds = 7\nrounds = 8\n", "is not valid TOML: Cannot overwrite a value"),
        (b"[client]\nlr = 1.0\n[client]\nlr = 2.0\n", "is not valid TOML: Cannot declare"),
        (b"rounds = " + b"[" * 10_000, "is not valid TOML"),
    ],
)
def test_a_file_that_is_no_toml_is_one_sentence(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        load(tmp_path / "plan.toml")
