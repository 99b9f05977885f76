"""Combinations with sharded clients: supported ones train, all others raise a one-sentence error, by a rule."""

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.compatibility import strategy
from benchmarks.openings import differences, watching
from clients.sharding.decide import sharded, task_of
from clients.sharding.group import ShardGroup
from clients.sharding.rules import SHARDING
from clients.state.store import ClientStore
from clients.trainer import SequentialTrainer, check_training
from clients.working_model import WorkingModel
from fedsign.compatibility import Experiment
from fedsign.config import from_dict
from fedsign.errors import ConfigError
from fedsign.models.gpt import gpt
from fedsign.records import ObjectiveSpec, TrainReply, TrainRequest
from fedsign.registry import KINDS
from fedsign.sharding.layout import Grouping
from fedsign.sharding.plan import StateBytes, Task, estimate
from fedsign.sharding.strategy import STRATEGIES
from fedsign.sharding.traffic import Network, Rings
from fedsign.workload import Workload
from simulations.api import make_strategy
from strategies.base import Strategy
from tests.distributed import federation, low

RANKS = 2
SHARDED = ("fedavg", "fedprox", "fedsign", "fedpan", "control", "scaffold", "feddyn")  # a control by its objective
FLAT = {"model": {"name": f"{__name__}:flat"}}  # without buffers, of which noise would make nonsense
GROUPED: dict[str, list[dict[str, Any]]] = {
    "all of Flower's": [
        {"strategy": strategy(row), **FLAT} for row in KINDS["strategy"].table if row.startswith("flower_")
    ],
    "all other strategies": [
        {"strategy": strategy(row)}
        for row in KINDS["strategy"].table
        if not row.startswith("flower_") and row not in SHARDED
    ],
    "sparse clients": [{"parameterization": {"name": "smupar", "density": 0.5, "base_width": 7}}],
    "language models": [
        {
            "data": {"name": "pytext", "block_length": 16},
            "partition": {"name": "natural", "num_clients": 4},
            "task": "language",
            "metrics": ["perplexity"],
            "model": {"name": f"{__name__}:exact_gpt"},
            "client": {"local_epochs": 0, "local_steps": 2, "batch_size": 3},
        }
    ],
    "weights in bf16": [
        {"model": {"name": f"{low.__name__}:low_deep"}, "client": {"low_precision": low_precision}}
        for low_precision in ("master", "stochastic", "plain")
    ],
    "weights in bf16, BatchNorm and dropout": [{"model": {"name": "tests.distributed.parity:low_noisy"}}],
    "privacy": [
        {**FLAT, "privacy": {"name": "central", "clip_norm": 0.5, "noise_multiplier": 1.0, "delta": 0.01}},
    ],
    "attacks, faults": [
        {"attack": {"name": "sign_flip", "fraction": 0.4}},
        {"faults": {"crash_rate": 0.2}},
    ],
}
ONE: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedpan": {"strategy": strategy("fedpan")},
    "scaffold": {"strategy": strategy("scaffold")},
    "feddyn": {"strategy": strategy("feddyn")},
    "feddyn, frozen parameters": {"strategy": strategy("feddyn"), "model": {"name": f"{__name__}:freezing"}},
    "fedprox": {"strategy": {"name": "fedprox", "mu": 0.5}},
    "fedsign": {"strategy": {"name": "fedsign", "gamma": 0.2, "reduction": "mean"}},
    "fedsign, reduction=tensor_mean": {"strategy": {"name": "fedsign", "reduction": "tensor_mean"}},
    "engine.name=superlink": {"engine": {"name": "superlink"}},
    "engine.name=ray": {"engine": {"name": "ray"}},
    "client.sharding.machines": {
        "client": {"sharding": {"groups": 2, "machines": 2, "listen": "127.0.0.1:29400"}},
    },
    "engine.workers": {"engine": {"name": "in_process", "workers": 2}},
    "client.path=cohort": {"client": {"path": "cohort"}},
    "client.loss=model": {"model": {"name": f"{__name__}:labeled"}, "client": {"loss": "model"}},
    "client.optimizer.name=adamw": {"client": {"optimizer": {"name": "adamw"}}},
    "client.optimizer.name=lisa": {"client": {"optimizer": {"name": "lisa"}}},
    "client.optimizer.name=galore": {"client": {"optimizer": {"name": "galore"}}},
    "an optimizer that declares nothing": {"client": {"optimizer": {"name": f"{__name__}:undeclared"}}},
    "client.optimizer.name=lora": {"client": {"optimizer": {"name": "lora"}}},
    "client.optimizer.ranks": {
        "client": {"optimizer": {"name": "lora", "aggregation": "flora", "ranks": [8, 4, 2, 1]}},
    },
    "client.optimizer.quantization": {"client": {"optimizer": {"name": "lora", "quantization": "nf4"}}},
    "client.optimizer.moments=offload": {"client": {"optimizer": {"name": "lisa", "moments": "offload"}}},
    "client.optimizer.moments=reset": {"client": {"optimizer": {"name": "lisa", "moments": "reset"}}},
    "masks that change": {
        "sparsity": {"name": "rigl", "every": 2, "last_step": 10},
        "parameterization": {"name": "sp", "density": 0.5},
    },
    "engine.sparse_products=csr": {"engine": {"name": "in_process", "sparse_products": "csr"}},
    "client.micro_batch": {"client": {"micro_batch": 2}},
    "data.augment": {
        "data": {"name": f"{__name__}:images", "augment": "flip"},
        **FLAT,
    },
    "BatchNorm": {"model": {"name": f"{__name__}:normalizing"}},
    "dropout": {"model": {"name": f"{__name__}:dropping"}},
    "dropout in pieces": {"model": {"name": f"{__name__}:dropping"}, "client": {"micro_batch": 2}},
    "dropout of channels": {"model": {"name": f"{__name__}:dropping_channels"}},
    "dropout of a function": {"model": {"name": f"{__name__}:dropping_alone"}},
    "a buffer that training changes": {"model": {"name": f"{__name__}:counting"}},
    "samples that depend on each other": {"model": {"name": f"{__name__}:mixing"}},
    "a complex parameter": {"model": {"name": f"{__name__}:turning"}},
    "engine.precision=bf16": {"engine": {"name": "in_process", "precision": "bf16"}},
    "engine.compile": {"engine": {"name": "in_process", "compile": True}},
    "engine.channels_last": {"engine": {"name": "in_process", "channels_last": "on"}},
    "tied blocks": {"model": {"name": f"{__name__}:tied"}, "client": {"optimizer": {"name": "lisa"}}},
    "GPUs": {"engine": {"name": "in_process", "device": "cuda"}},
}
REASONS = {
    "all other strategies": "objective '.*' reads whole parameters.* fedprox, fedsign, scaffold or feddyn",
    "fedsign, reduction=tensor_mean": "objective 'fedsign' reads whole parameters",
    "engine.name=ray": "engine.name=ray gives a client one process; use in_process or superlink",
    "engine.workers": "engine.workers=2 .* use engine.workers=1",
    "client.path=cohort": "client.path=cohort .* use client.path=sequential",
    "client.loss=model": "client.loss=model is one number for a whole batch; use client.loss=task",
    "an optimizer that declares nothing": "does not declare an element_rule, .* use sgd",
    "client.optimizer.ranks": "client.optimizer.ranks cuts adapters .* leave it out",
    "client.optimizer.quantization": "client.optimizer.quantization packs whole .* use quantization=none",
    "client.optimizer.moments=offload": "client.optimizer.moments=offload .* use drop or keep",
    "client.optimizer.moments=reset": "client.optimizer.moments=reset .* use drop or keep",
    "masks that change": "sparsity.name=rigl .* use sparsity.name=static",
    "engine.sparse_products=csr": "engine.sparse_products=csr .* use auto or dense",
    "dropout in pieces": "client.micro_batch=2 .* piece by piece; set it to 0",
    "dropout of channels": "has a layer FeatureAlphaDropout, .* use nn.Dropout",
    "dropout of a function": "draws random numbers that are not nn.Dropout's",
    "a buffer that training changes": "changes the buffer 'count'",
    "samples that depend on each other": "lets samples of a batch depend on each other",
    "a complex parameter": "has a complex parameter 'turn'",
    "engine.precision=bf16": "engine.precision=bf16 .* use engine.precision=float32",
    "engine.compile": "engine.compile=true .* use engine.compile=false",
    "engine.channels_last": "engine.channels_last=on .* use auto or off",
    "tied blocks": "shares parameters between a block and other layers",
}
LORA = "client.optimizer.name=lora"
OF_LORA = {"client.optimizer.ranks": "peft", "client.optimizer.quantization": "bitsandbytes"}
ALL = {**ONE, **GROUPED}
NEEDS = {
    "privacy": "privacy",
    "attacks, faults": "robustness",
    "sparse clients": "sparsity",
    "masks that change": "sparsity",
    "engine.sparse_products=csr": "sparsity",
    "language models": "language",
    "engine.name=superlink": "deployment",
    "engine.name=ray": "ray",
    "client.path=cohort": "cohort",
    "tied blocks": "partial",
    "fedsign, masked": "sparsity",
    "fedsign, sum, with LISA": "partial",
    **{
        row: "partial"
        for row in ONE
        if any(name in row for name in ("lisa", "galore", "lora", "moments", "ranks", "quant"))
    },
}


def marked(names: Iterable[str]) -> list[Any]:
    """With the capabilities that they configure."""
    return [pytest.param(row, marks=[pytest.mark.needs(NEEDS[row])] if row in NEEDS else []) for row in names]


def rows(names: Iterable[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", marked(names))


def images(seed: int) -> Any:
    whole = federation.exact_digits(seed)
    parts = {key: getattr(whole, key) for key in ("train", "test")}
    return replace(
        whole, **{key: replace(part, features=part.features.reshape(-1, 1, 8, 8)) for key, part in parts.items()}
    )


def flat(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, num_outputs)).double()


def exact_gpt(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return gpt(input_shape, num_outputs, depth=2, width=8, num_heads=2).double()


def dropping(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return nn.Sequential(nn.Dropout(0.1), federation.deep(input_shape, num_outputs))


def normalizing(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(64), federation.deep(input_shape, num_outputs)).double()


def freezing(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    model = federation.deep(input_shape, num_outputs)
    model.get_parameter("embed.bias").requires_grad_(False)
    return model


def dropping_channels(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return nn.Sequential(nn.FeatureAlphaDropout(0.1), federation.deep(input_shape, num_outputs))


class DroppingAlone(federation.Deep):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.5, self.training))


def dropping_alone(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return DroppingAlone(input_shape[0], num_outputs).double()


def undeclared(parameters: Any, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=lr, weight_decay=weight_decay)


class Labeled(nn.Linear):
    def forward(self, features: Tensor, labels: Tensor | None = None) -> Any:
        logits = super().forward(features)
        return logits if labels is None else {"loss": functional.cross_entropy(logits, labels)}


def labeled(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return Labeled(input_shape[0], num_outputs)


def tied(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    model = federation.deep(input_shape, num_outputs)
    assert isinstance(model, federation.Deep) and isinstance(model.blocks[0], federation.Block)
    model.again = nn.Linear(7, 5)
    model.again.weight = model.blocks[0].up.weight
    return model


class Counting(federation.Deep):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x)


def counting(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return Counting(input_shape[0], num_outputs).double()


class Mixing(federation.Deep):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


def mixing(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return Mixing(input_shape[0], num_outputs).double()


class Turning(federation.Deep):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.turn = nn.Parameter(torch.ones((), dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.turn.abs()


def turning(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return Turning(input_shape[0], num_outputs).double()


def given(root: Path, changes: Mapping[str, Any], **sharding: Any) -> Workload:
    client = changes.get("client", {})
    client = {**client, "sharding": {"ranks": RANKS, "strategy": "IIG", **client.get("sharding", {}), **sharding}}
    return Workload(from_dict(federation.tree(root, **{**changes, "client": client})))


def lacks(row: str) -> bool:
    """Whether it needs a library that is not here."""
    return row in OF_LORA and not all(map(find_spec, ("peft", OF_LORA[row])))


def taken(workload: Workload) -> Workload:
    """As a run begins."""
    made = make_strategy(workload)
    check_training(workload, made.objective(1) if isinstance(made, Strategy) else ObjectiveSpec(), made)
    return sharded(workload)


@rows(row for row in ALL if row not in REASONS)
def test_what_is_sharded_is_taken(row: str, tmp_path: Path) -> None:
    if row == "GPUs" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    if row == LORA and find_spec("peft") is None:
        pytest.skip("peft is not installed")
    for changes in GROUPED.get(row, [ONE.get(row, {})]):
        work = taken(given(tmp_path, changes))
        assert work.config.client.sharding.ranks == RANKS and work.config.client.path == "sequential"


@rows(REASONS)
def test_what_is_not_is_an_error_of_one_sentence(row: str, tmp_path: Path) -> None:
    if lacks(row):
        pytest.skip(f"{OF_LORA[row]} is not installed")
    for changes in GROUPED.get(row, [ONE.get(row, {})]):
        with pytest.raises(ConfigError, match=f"client.sharding.ranks=2 was given, but .*{REASONS[row]}") as raised:
            taken(given(tmp_path, changes))
        assert str(raised.value).endswith(".") and "\n" not in str(raised.value)


@pytest.mark.needs(*sorted({*NEEDS.values()}))
def test_every_rule_is_broken_by_a_row(tmp_path: Path) -> None:
    """But for the one of devices, see below; the first broken rule counts."""
    broken = set()
    for row in REASONS:
        for changes in GROUPED.get(row, [ONE.get(row, {})]):
            if not lacks(row):
                workload = given(tmp_path, changes)
                strategy = make_strategy(workload)
                spec = strategy.objective(1) if isinstance(strategy, Strategy) else ObjectiveSpec()
                experiment = Experiment(workload=workload, spec=spec, strategy=strategy)
                broken.add(next(rule for rule in SHARDING.all_rules if rule.refusal(experiment)))
    left = {rule.sentence.partition(" ")[0] for rule in {*SHARDING.all_rules} - broken}
    assert left <= {
        "engine.device={config.engine.device}",
        *filter(lacks, OF_LORA),
    }


def test_devices_between_which_no_backend_sends_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedsign.workload.device_of", torch.device)
    with pytest.raises(ConfigError, match=r"engine\.device=meta has no way for ranks to talk; use .*cpu or cuda\."):
        taken(given(tmp_path, {"engine": {"name": "in_process", "device": "meta"}}))


PENALTIES: dict[str, dict[str, Any]] = {
    "fedprox, clipped, in micro-batches": {
        **ONE["fedprox"],
        "client": {"clip_norm": 0.05, "micro_batch": 2, "local_epochs": 3},
    },
    "fedsign, masked": {**ONE["fedsign"], **GROUPED["sparse clients"][0]},
    "fedsign, sum, with LISA": {
        "strategy": {"name": "fedsign", "gamma": 0.2},
        "client": {
            "optimizer": {"name": "lisa", "num_sampled_layers": 1, "period": 2},
            "local_epochs": 0,
            "local_steps": 5,
        },
    },
}
ON_GPUS = pytest.param("GPUs", marks=pytest.mark.gpu)


@pytest.mark.slow
@pytest.mark.parametrize(
    "row", [*marked(["data.augment", "language models", "fedprox", "fedsign", *PENALTIES]), ON_GPUS]
)
def test_draws_means_and_penalties_are_those_of_the_whole_batch_and_the_whole_model(row: str, tmp_path: Path) -> None:
    """Random numbers per batch, means over something other than samples, and penalties of objectives."""
    if row == "GPUs" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    (changes,) = GROUPED.get(row, [ONE.get(row, PENALTIES.get(row, {}))])
    work, alone = taken(given(tmp_path, changes)), Workload(from_dict(federation.tree(tmp_path, **changes)))
    made = make_strategy(alone)
    assert isinstance(made, Strategy)
    asked = [
        TrainRequest(
            round=1, partition=partition, tensors=WorkingModel(alone.make_model(), alone.numerics).copies(),
            objective=made.objective(1), state_version=0, needed_versions=frozenset({0}),
        )
        for partition in range(2)
    ]  # fmt: skip
    expected = list(SequentialTrainer(alone).train_many(asked, ClientStore(tmp_path)))
    with (
        watching([psutil.Process()], {"run": tmp_path}) as seen,
        closing(ShardGroup(work, logs=tmp_path / "logs")) as group,
    ):
        for reply, other in zip(group.train_many(asked, ClientStore(tmp_path)), expected, strict=True):
            assert isinstance(reply, TrainReply) and isinstance(other, TrainReply), reply
            found, wanted = (torch.cat([each.flatten() for each in one.tensors.values()]) for one in (reply, other))
            assert reply.tensors.keys() == other.tensors.keys()
            start = torch.cat([asked[0].tensors[name].flatten() for name in reply.tensors])
            # of how far all went together: the bias of an attention's keys has no gradient but rounding
            assert found.dtype == torch.float64 and (found - wanted).norm() <= 1e-10 * (wanted - start).norm()
            assert reply.metrics["train-loss"] == pytest.approx(other.metrics["train-loss"], rel=1e-10)
    assert differences(seen, "`client.sharding.ranks`", "A run") == ([], [])


# auto


def test_auto_is_the_least_of_the_fastest_that_fit(tmp_path: Path) -> None:
    """Four ranks in two groups; AdamW keeps 16 bytes per element in float64, parameters and gradients take 8 each."""
    changes = {"client": {"optimizer": {"name": "adamw"}, "micro_batch": 1, "batch_size": 12}}
    size = sum(parameter.numel() for parameter in given(tmp_path, changes).make_model().parameters())
    task = Task(params=size, trainable=size, accumulate=3, sizes=StateBytes(param=8, gradient=8, state=16))
    grouping = Grouping(groups=2, per_group=2)
    network = Network(intra_bps=100e9, inter_bps=1e9, rings=Rings.TWO_LEVEL)
    every = [estimate(one, task, grouping=grouping, network=network) for one in STRATEGIES.values()]
    chosen = set()
    for limit in (inf, *(each.memory_bytes for each in every)):
        sharding = {"ranks": 4, "groups": 2, "strategy": "auto", "memory_gb": 0.0 if limit == inf else limit / 1e9}
        work = taken(given(tmp_path, changes, **sharding, intra_gbps=100, inter_gbps=1))
        name = work.config.client.sharding.strategy
        chosen.add(name)
        (mine,) = [each for each in every if each.strategy.name == name]
        fits = [each for each in every if each.memory_bytes <= limit * (1 + 1e-9)]
        near = [each for each in fits if each.step_s <= 1.05 * min(other.step_s for other in fits)]
        assert mine in near and mine.memory_bytes == min(each.memory_bytes for each in near)
    assert len(chosen) > 2 and "GGG" in chosen


@pytest.mark.parametrize(
    ("low_precision", "sizes"),
    [
        ("master", StateBytes(param=2, gradient=4, state=12)),
        ("stochastic", StateBytes(param=2, gradient=4, state=8)),
        ("plain", StateBytes(param=2, gradient=2, state=4)),
    ],
)
def test_auto_counts_weights_in_bf16_as_ranks_keep_them(low_precision: str, sizes: StateBytes, tmp_path: Path) -> None:
    """Gradients and moments in float32 unless steps are in bf16, and a float32 master."""
    model = {"name": "tests.training.low_models:network"}
    client = {"optimizer": {"name": "adamw"}, "low_precision": low_precision}
    work = given(tmp_path, {"model": model, "client": client}, ranks=4, groups=2)
    assert task_of(work, work.make_model()).sizes == sizes


def test_auto_says_what_the_least_is(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"client\.sharding\.memory_gb=1e-06 .* the least .* GB, with GGG; give more ranks"
    ):
        taken(given(tmp_path, {}, ranks=4, groups=2, strategy="auto", memory_gb=1e-6))


@pytest.mark.parametrize(
    ("sharding", "sentence"),
    [
        ({"ranks": 4, "groups": 3}, "groups=3 was given with client.sharding.ranks=4; .* divisor"),
        ({"ranks": 4, "strategy": "INN"}, "sharding strategy 'INN' was given: .* choose one of"),
        ({"groups": 2}, "client.sharding.groups=2 was given with client.sharding.ranks=1, which shards nothing"),
        ({"ranks": 4, "strategies": "IIG"}, "client.sharding.strategies"),
        ({"ranks": 4, "groups": 3, "machines": 3}, "groups=3 was given with client.sharding.ranks=4; .* divisor"),
        (
            {"ranks": 4, "groups": 4, "machines": 3},
            "machines=3 was given with client.sharding.ranks=4; .* multiple of machines",
        ),
        (
            {"ranks": 4, "groups": 1, "machines": 2},
            "machines=2 was given with client.sharding.groups=1; .* whole groups",
        ),
        ({"ranks": 2, "join_s": 9.0}, "client.sharding.join_s=9.0 was given with client.sharding.machines=1"),
        (
            {"ranks": 2, "insecure_network": True},
            "client.sharding.insecure_network=True was given with client.sharding.machines=1",
        ),
        (
            {"ranks": 2, "listen": "a:1"},
            "client.sharding.listen=a:1 was given with client.sharding.machines=1, which no other one joins",
        ),
        (
            {"ranks": 2, "groups": 2, "machines": 2, "listen": "a"},
            "client.sharding.listen=a was given; expected HOST:PORT",
        ),
    ],
)
def test_a_mistake_in_the_section_is_one_sentence(sharding: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        from_dict({"client": {"sharding": sharding}})
