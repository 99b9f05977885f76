"""Aggregation of adapters: exact where it claims to be, its error that of dense matrices, the same on every path."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from clients.partial.adapted_model import AdaptedModel
from clients.state.store import ClientStore
from clients.trainer import SequentialTrainer
from fedsign.config import ExperimentConfig, from_dict
from fedsign.errors import ConfigError, ReplyError
from fedsign.models.transform import plain_model
from fedsign.optim.lora import Adapters, adapt
from fedsign.partial.adapter_updates import AdapterUpdates
from fedsign.partial.adapters import AdapterMean, LoraSettings
from fedsign.records import ObjectiveSpec, Role, Tensors, TrainReply, roles_of, tensors_of
from fedsign.seeding import Purpose, global_stream
from fedsign.storage.checkpoints import load_latest
from fedsign.workload import Workload
from simulations import Run, run
from strategies.base import Strategy
from strategies.fedavg import FedAvg
from tests.contract.test_strategies import lines
from tests.contract.transported import over_flowers_transport
from tests.partial.test_lora import MODELS, SETTINGS
from tests.training.requests import request

EXACT = ("ffa", "flora", "fedex")
ALL = ("average", *EXACT)
NUM_EXAMPLES = (3, 1, 7, 5)


class ByMessages(FedAvg):
    """FedAvg over messages: it overrides how they are built."""

    def configure_train(self, *given: Any) -> Any:
        return super().configure_train(*given)


def model_of(name: str, aggregation: str) -> torch.nn.Module:
    model: torch.nn.Module = MODELS[name]()
    with global_stream(0, Purpose.ADAPTERS):
        adapt(model, SETTINGS | {"aggregation": aggregation})
    return model.double()


def adapters_in(model: torch.nn.Module) -> Adapters:
    (found,) = (each for each in vars(model)["_fedsign_transforms"] if isinstance(each, Adapters))
    return found


def whole_weights(model: torch.nn.Module, tensors: Tensors) -> Tensors:
    """The weights of the plain model, merged by peft."""
    model = copy.deepcopy(model)
    model.load_state_dict(tensors)
    return tensors_of(plain_model(model))


def moved(tensors: Tensors, model: torch.nn.Module, seed: int) -> Tensors:
    """What a client trains, moved at random."""
    generator = torch.Generator().manual_seed(seed)
    trained = {name for name, _ in model.named_parameters()}
    return {
        name: tensor + torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype) * 0.3
        for name, tensor in tensors.items()
        if name in trained
    }


def reply_of(tensors: Tensors, roles: Mapping[str, Role], *, partition: int, round: int) -> TrainReply:
    return TrainReply(
        round=round,
        partition=partition,
        tensors=tensors,
        roles=roles,
        num_examples=NUM_EXAMPLES[partition],
        metrics={},
    )


def distance(one: Tensors, other: Tensors, names: Sequence[str]) -> float:
    return math.sqrt(sum(float((one[name] - other[name]).square().sum()) for name in names))


@pytest.mark.parametrize("aggregation", ALL)
@pytest.mark.parametrize(
    ("name", "weighting"),
    [
        *(("mlp", weighting) for weighting in ("uniform", "examples", "weights")),
        ("gpt", "examples"),
        ("transformers GPT-2", "weights"),
    ],
)
def test_the_aggregate_is_the_mean_of_the_clients_whole_models_or_off_by_the_reported_error(
    name: str, aggregation: Any, weighting: str
) -> None:
    """Against dense matrices merged by peft, in double precision, over two rounds."""
    weights = {"uniform": (1.0, 1, 1, 1), "examples": NUM_EXAMPLES, "weights": (0.5, 2, 0.1, 3)}[weighting]
    by_name: dict[str, Any] = {"weights": weights} if weighting == "weights" else {"weighting": weighting}
    strategy: Strategy = FedAvg(**by_name)
    model = model_of(name, aggregation)
    settings = LoraSettings(aggregation=aggregation, rank=3, ranks=())
    mean = strategy.aggregator = AdapterMean(settings, lambda: adapters_in(model).adapters, seed=0)
    served = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    layers = [each.layer + ".weight" for each in adapters_in(model).adapters]
    for round in (1, 2):
        base = whole_weights(model, {key: each * (0 if ".lora_B." in key else 1) for key, each in served.items()})
        clients = [moved(served, model, seed=10 * round + client) for client in range(4)]
        strategy.request(round, served, range(4), cohort_size=4, seed=0)
        replies = [
            reply_of(tensors, roles_of(model), partition=client, round=round) for client, tensors in enumerate(clients)
        ]
        after = strategy.aggregate(round, replies)
        assert after is not None and after.keys() == served.keys()
        whole = [whole_weights(model, served | tensors) for tensors in clients]
        exact = {
            key: sum(weight * each[key] for weight, each in zip(weights, whole, strict=True)) / sum(weights)
            for key in base
        }
        found = whole_weights(model, after)
        assert distance(exact, base, layers) > 0.1  # not vacuous
        error = distance(found, exact, layers) / distance(exact, base, layers)
        assert mean.error == pytest.approx(error, rel=1e-10, abs=1e-14)
        assert (error < 1e-12) == (aggregation in EXACT)
        assert error < 1e-12 or error > 1e-3
        others = [key for key in exact if key not in layers]
        assert distance(found, exact, others) <= 1e-12 * (1 + distance(exact, base, others))
        served = after


def test_the_error_is_that_of_the_tensors_as_they_are_stored() -> None:
    """In bfloat16, adding a small update to the base rounds most of it away, and the error says so."""
    model = model_of("mlp", "flora").bfloat16()
    strategy = FedAvg()
    settings = LoraSettings(aggregation="flora", rank=3, ranks=())
    mean = strategy.aggregator = AdapterMean(settings, lambda: adapters_in(model).adapters, seed=0)
    served = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    adapters = adapters_in(model).adapters
    small = {each.a: served[each.a] * 1e-2 for each in adapters}
    small |= {each.b: torch.full_like(served[each.b], 1e-2) for each in adapters}
    strategy.request(1, served, range(4), cohort_size=1, seed=0)
    after = strategy.aggregate(1, [reply_of(small, roles_of(model), partition=0, round=1)])
    assert after is not None and mean.error is not None and mean.error > 0.1
    off = total = 0.0
    for each in adapters:
        update = each.scale * small[each.b].double() @ small[each.a].double()
        off += float((after[each.base].double() - served[each.base].double() - update).square().sum())
        total += float(update.square().sum())
    assert mean.error == pytest.approx(math.sqrt(off / total), rel=1e-10)


def test_large_matrices_are_changed_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedsign.partial import adapters as module

    found = []
    for block in (2**21, 40):  # all rows at once; three rows of twelve, and five of seven
        monkeypatch.setattr(module, "_BLOCK", block)
        model, strategy = model_of("mlp", "fedex"), FedAvg()
        settings = LoraSettings(aggregation="fedex", rank=3, ranks=())
        strategy.aggregator = AdapterMean(settings, partial(getattr, adapters_in(model), "adapters"), seed=0)
        served = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        strategy.request(1, served, range(4), cohort_size=4, seed=0)
        replies = [
            reply_of(moved(served, model, seed=client), roles_of(model), partition=client, round=1)
            for client in range(4)
        ]
        after = strategy.aggregate(1, replies)
        assert after is not None
        found.append(after)
    for key in found[0]:
        torch.testing.assert_close(found[1][key], found[0][key], rtol=1e-12, atol=1e-14)


def tree(root: Path, aggregation: str = "flora", *, strategy: Any = None, **changes: Any) -> dict[str, Any]:
    """Four rounds of two of three clients."""
    optimizer = {"name": "lora", "rank": 4, "aggregation": aggregation, **changes.pop("optimizer", {})}
    return {
        "rounds": 4,
        "callbacks": [],
        "partition": {"num_clients": 3, "alpha": 1.0},
        "server": {"cohort_size": 2},
        "client": {"local_steps": 3, "lr": 0.02, "optimizer": optimizer},
        "model": {"name": "mlp", "hidden": [8, 6]},
        "strategy": strategy or {"name": "fedavg", "weighting": "examples"},
        "results": {"root": str(root), "checkpoint_every": 1, "keep_checkpoints": 10},
        **changes,
    }


MIXED = {"ranks": [1, 4, 2]}
KINDS: dict[str, dict[str, Any]] = {
    **{each: {"aggregation": each} for each in ALL},
    "average, mixed ranks": {"aggregation": "average", "optimizer": MIXED},
    "flora, mixed ranks": {"aggregation": "flora", "optimizer": {**MIXED, "head": True, "targets": ["0"]}},
}


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A run in one process, and the replies that its server took."""

    kind: str
    done: Run
    replies: list[TrainReply]


@pytest.fixture(scope="module", params=KINDS)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    Remembering.replies.clear()
    named = {"name": f"{__name__}:Remembering", "weighting": "examples"}
    done = run(kind_of(request.param, tmp_path_factory.mktemp("whole"), strategy=named))
    return Whole(kind=request.param, done=done, replies=[*Remembering.replies])


def kind_of(kind: str, root: Path, **changes: Any) -> dict[str, Any]:
    return tree(root, **copy.deepcopy(KINDS[kind]), **changes)


class Remembering(FedAvg):
    """FedAvg that remembers what came."""

    replies: list[TrainReply] = []  # noqa: RUF012 - emptied by each run

    def weight(self, reply: TrainReply) -> float:
        self.replies.append(reply)
        return super().weight(reply)


def test_messages_give_the_lines_and_the_model_of_one_process(whole: Whole, tmp_path: Path) -> None:
    here = whole.done
    assert here.rounds[-1]["train_loss"] < here.rounds[0]["train_loss"]
    assert not any(line["failures"] for line in here.rounds)
    named = {"name": f"{__name__}:{ByMessages.__name__}", "weighting": "examples"}
    there = run(kind_of(whole.kind, tmp_path, strategy=named))
    assert lines(here) == lines(there)
    assert (here.path / "model.safetensors").read_bytes() == (there.path / "model.safetensors").read_bytes()


@pytest.mark.parametrize("kind", ["ffa", "fedex", "flora, mixed ranks"])
def test_serialized_messages_give_the_lines_of_one_process(kind: str, tmp_path: Path) -> None:
    folder, here = over_flowers_transport(tmp_path, kind_of(kind, tmp_path)), run(kind_of(kind, tmp_path))
    assert folder.rounds() == here.rounds


@pytest.mark.needs("workers")
@pytest.mark.parametrize("kind", [pytest.param("fedex", marks=pytest.mark.slow), "flora, mixed ranks"])
def test_workers_give_the_lines_and_the_model_of_one_process(kind: str, tmp_path: Path) -> None:
    here, there = (run(kind_of(kind, tmp_path, engine={"workers": num})) for num in (1, 2))
    assert lines(here) == lines(there)
    assert (here.path / "model.safetensors").read_bytes() == (there.path / "model.safetensors").read_bytes()


def test_a_resumed_run_ends_like_one_that_was_not_stopped(whole: Whole, tmp_path: Path) -> None:
    half = run({**kind_of(whole.kind, tmp_path), "rounds": 2})
    resumed = run({"rounds": 4}, resume=half.path)
    assert lines(resumed) == lines(whole.done)
    one, other = load_latest(resumed.folder.checkpoints), load_latest(whole.done.folder.checkpoints)
    assert one is not None and other is not None and (one.facts, one.tables) == (other.facts, other.tables)
    assert all(torch.equal(one.served[name], other.served[name]) for name in other.served)


def test_the_loaded_model_is_the_evaluated_one_and_merges_to_it(whole: Whole) -> None:
    done = whole.done
    work, model = Workload(done.config), done.model()
    assert work.evaluate(model)["loss"] == done.rounds[-1]["loss"]
    features = work.dataset.test.batch(torch.arange(8))[0]
    expected = model(features)
    torch.testing.assert_close(plain_model(model)(features), expected, rtol=1e-4, atol=1e-5)


def test_bytes_are_those_of_the_trained_rows_and_of_the_factors_that_a_client_lacks(whole: Whole) -> None:
    """Layer 0 is [8, 64], layer 2 [6, 8], and the head [10, 6] with a bias; numbers take four bytes."""
    done, kind = whole.done, whole.kind
    aggregation, ranks = KINDS[kind]["aggregation"], MIXED["ranks"] if "mixed" in kind else [4, 4, 4]
    shapes, head = ([(8, 64)], 10 * 6 + 10) if kind == "flora, mixed ranks" else ([(8, 64), (6, 8)], 0)
    added: dict[int, int] = {}
    last: dict[int, int] = {}
    for line in done.rounds:
        clients = line["clients"]
        sides = sum(out if aggregation == "ffa" else out + into for out, into in shapes)
        assert line["bytes_up"] == 4 * sum(head + ranks[client] * sides for client in clients)
        down = 0
        for client in clients:
            down += head + (0 if aggregation == "flora" else ranks[client] * sides)
            lacking = sum(rank for round, rank in added.items() if round >= last.get(client, 0))
            if aggregation in ("flora", "fedex"):
                down += sum(min(out * into, lacking * (out + into)) for out, into in shapes)
            last[client] = line["round"]
        assert line["bytes_down"] == 4 * down
        added[line["round"]] = sum(ranks[client] for client in clients) if aggregation == "flora" else 4
    assert len(whole.replies) == 8
    for reply in whole.replies:
        for name, tensor in reply.tensors.items():
            assert not (".lora_A." in name and tensor[ranks[reply.partition] :].any())
            assert not (".lora_B." in name and tensor[:, ranks[reply.partition] :].any())


def test_what_a_round_of_fedex_adds_has_the_rank_that_is_counted(tmp_path: Path) -> None:
    done = run(tree(tmp_path, "fedex", model={"name": "mlp", "hidden": [40]}))
    served = [checkpoint_of(done, round) for round in (1, 2)]
    added = served[1]["0.base_layer.weight"].double() - served[0]["0.base_layer.weight"].double()
    values = torch.linalg.svdvals(added)
    assert values[3] > 1e-4 * values[0] and values[4] < 1e-5 * values[0]  # (2 - 1) x 4


def checkpoint_of(done: Run, round: int) -> Tensors:
    from fedsign.storage.checkpoints import load

    return load(done.folder.checkpoints / f"round-{round:06d}").served


def test_adapters_are_fresh_in_every_round_of_flora(tmp_path: Path) -> None:
    done = run(tree(tmp_path, "flora"))
    rounds = [Workload(done.config).make_model().state_dict(), *(checkpoint_of(done, round) for round in (1, 2))]
    for one, other in pairwise(rounds):
        assert not torch.equal(one["0.lora_A.default.weight"], other["0.lora_A.default.weight"])
        assert not other["0.lora_B.default.weight"].any()
        assert other["0.lora_A.default.weight"].abs().max() <= 1 / 8  # Kaiming's bound with a = sqrt(5), 64 inputs
        assert not torch.equal(one["0.base_layer.weight"], other["0.base_layer.weight"])


def test_a_client_of_a_lower_rank_trains_as_with_an_adapter_of_that_rank(tmp_path: Path) -> None:
    """Rank 2 of 4 with alpha 8 equals rank 2 with alpha 4, also under FedProx's pull."""
    cut, small = (
        Workload(from_dict(tree(tmp_path, "average", optimizer={"rank": rank, "alpha": 2.0 * rank, "ranks": ranks})))
        for rank, ranks in ((4, [2, 4, 4]), (2, []))
    )
    served = {name: torch.randn(each.shape) * 0.3 for name, each in cut.make_model().state_dict().items()}
    before = {name: each.clone() for name, each in served.items()}
    rows = {name: each[:2] if ".lora_A." in name else each[:, :2] for name, each in served.items()}

    def trained(work: Workload, tensors: Tensors) -> Tensors:
        asked = request(tensors, 0, objective=ObjectiveSpec(name="fedprox", settings={"mu": 1.0}))
        (reply,) = SequentialTrainer(work).train_many([asked], ClientStore(tmp_path / "states"))
        assert isinstance(reply, TrainReply)
        return reply.tensors

    found, expected = trained(cut, served), trained(small, rows)
    for name, tensor in found.items():
        kept, beyond = (tensor[:2], tensor[2:]) if ".lora_A." in name else (tensor[:, :2], tensor[:, 2:])
        torch.testing.assert_close(kept, expected[name], rtol=1e-4, atol=1e-6)
        assert not beyond.any() and not torch.equal(kept, rows[name])
        assert torch.equal(served[name], before[name])  # others may use them


def test_the_base_is_in_memory_once(tmp_path: Path) -> None:
    """Two models that load it hold the served tensors themselves, and a reply leaves them out."""
    work = Workload(from_dict(tree(tmp_path, "flora")))
    served = tensors_of(work.make_model())
    trainer = SequentialTrainer(work)
    other = work.make_model()
    other.load_state_dict(served)
    (reply,) = trainer.train_many([request(served, 0)], ClientStore(tmp_path / "states"))
    assert isinstance(trainer._model, AdaptedModel) and isinstance(reply, TrainReply)
    name = "0.base_layer.weight"
    for model in (other, trainer._model.module):
        assert dict(model.named_buffers())[name].data_ptr() == served[name].data_ptr()
    assert name in served and name not in reply.tensors and reply.roles[name] is Role.BUFFER


def encoding_of(tmp_path: Path) -> tuple[AdapterUpdates, Tensors, Mapping[str, Role]]:
    work = Workload(from_dict(tree(tmp_path, "flora", optimizer=MIXED)))
    encoding = work.make_update_encoding()
    assert isinstance(encoding, AdapterUpdates)
    return encoding, tensors_of(work.make_model()), work.roles


def test_a_reply_with_other_tensors_or_another_rank_is_refused(tmp_path: Path) -> None:
    encoding, served, roles = encoding_of(tmp_path)
    whole = reply_of({name: each for name, each in served.items() if "base" not in name}, roles, partition=0, round=1)

    def decoded(tensors: Tensors) -> Tensors:
        return encoding.decode(reply_of(tensors, roles, partition=0, round=1), served)

    sent = encoding.encode(whole, served)
    back = decoded(sent)
    name = "0.lora_A.default.weight"
    assert sent[name].shape == (1, 64) and back[name].shape == served[name].shape
    assert torch.equal(back[name][:1], served[name][:1]) and not back[name][1:].any()
    with pytest.raises(ReplyError, match=r"missing \['0\.lora_A\.default\.weight'\], unknown \[\]"):
        decoded({key: each for key, each in sent.items() if key != name})
    with pytest.raises(ReplyError, match=r"missing \[\], unknown \['0\.base_layer\.weight'\]"):
        decoded({**sent, "0.base_layer.weight": served["0.base_layer.weight"]})
    with pytest.raises(ReplyError, match=r"has the shape \[2, 64\]; expected \[1, 64\], for rank 1"):
        decoded({**sent, name: torch.zeros(2, 64)})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"strategy": {"name": "flower_fedavg"}}, r"aggregation=flora changes the base model, but strategy flower_fed"),
        ({"strategy": {"name": "feddyn"}}, r"strategy feddyn has a method server_update of its own"),
        ({"strategy": {"name": "moon"}}, r"objective 'moon' keeps tensors of adapters to an earlier base"),
        ({"server": {"cohort_size": 2, "optimizer": {"name": "adam"}}}, r"server\.optimizer\.name=adam would take"),
        ({"optimizer": {"ranks": [1, 2]}}, r"ranks was given, but holds 2 ranks for 3 clients"),
        ({"optimizer": {"ranks": [1, 2, 8]}}, r"ranks was given, but 8 in it is above client\.optimizer\.rank=4"),
        ({"aggregation": "ffa", "optimizer": MIXED}, r"client\.optimizer\.aggregation=ffa gives all clients one"),
        ({"aggregation": "fedex", "optimizer": MIXED}, r"client\.optimizer\.aggregation=fedex gives all clients one"),
        ({"aggregation": "mean"}, r"client\.optimizer\.aggregation"),
        ({"optimizer": {"ranks": [0, 1, 2]}}, r"client\.optimizer\.ranks"),
    ],
)
def test_what_cannot_be_aggregated_is_a_sentence(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        run(tree(tmp_path, **changes))


@pytest.mark.needs("privacy")
def test_with_noise_the_error_of_the_replies_is_not_published(tmp_path: Path) -> None:
    privacy = {"name": "central", "clip_norm": 0.5, "noise_multiplier": 1.0, "delta": 0.01}
    uniform = {"name": "fedavg"}
    done = run(tree(tmp_path, "ffa", strategy=uniform, privacy=privacy))
    assert not any("aggregation_error" in line for line in done.rounds)
    for changes, why in (
        ({"aggregation": "flora"}, "privacy.name=central adds noise to A and B alone"),
        ({"aggregation": "average", "optimizer": MIXED}, "privacy.name=central bounds an update"),
    ):
        with pytest.raises(ConfigError, match=why):
            run(tree(tmp_path, strategy=uniform, privacy=privacy, **changes))


def config_of(tmp_path: Path, **changes: Any) -> ExperimentConfig:
    return from_dict(tree(tmp_path, **changes))


def test_the_column_is_there_with_lora_alone(tmp_path: Path) -> None:
    with_lora, without = run(config_of(tmp_path)), run(config_of(tmp_path, client={"local_steps": 1}))
    assert all(0 <= line["aggregation_error"] < 1e-5 for line in with_lora.rounds)
    assert not any("aggregation_error" in line for line in without.rounds)
