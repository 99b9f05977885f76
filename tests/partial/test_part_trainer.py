"""A client's round with LISA: a hand-written loop, which tensors change, and what is in memory."""

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from clients.on_device import OnDevice
from clients.partial.model import PartModel
from clients.state.store import ClientStore
from clients.trainer import SequentialTrainer, check_training
from fedsign import plugins
from fedsign.config import from_dict
from fedsign.errors import ConfigError
from fedsign.numerics import Numerics
from fedsign.objectives.base import LocalContext, Objective
from fedsign.optim.lisa import LISA, ClientLISA
from fedsign.records import Failure, ObjectiveSpec, Role, Tensors, TrainReply, TrainRequest, tensors_of
from fedsign.seeding import Purpose, generator
from fedsign.workload import Workload
from tests.training.requests import request

HERE = __name__
LISA_SETTINGS = {"name": "lisa", "num_sampled_layers": 1, "period": 2, "blocks": "blocks.*"}
NUM_STEPS = 5  # two whole periods, and a step of the third
OBJECTIVES = {
    "plain": ObjectiveSpec(),
    "fedprox": ObjectiveSpec(name="fedprox", settings={"mu": 0.5}),
    "fedsign": ObjectiveSpec(name="fedsign", settings={"gamma": 0.3}),
    "fedsign-mean": ObjectiveSpec(name="fedsign", settings={"gamma": 30.0, "reduction": "mean"}),
    "fedsign-tensor-mean": ObjectiveSpec(name="fedsign", settings={"gamma": 30.0, "reduction": "tensor_mean"}),
    "feddyn": ObjectiveSpec(name="feddyn", settings={"alpha": 0.3}),
    "moon": ObjectiveSpec(name="moon", settings={"mu": 1.0}),
}


class Rows(nn.Module):
    """Blocks of Linear and BatchNorm on rows: parameters, buffers, and layers around the blocks."""

    def __init__(self, num_features: int, num_outputs: int, width: int) -> None:
        super().__init__()
        self.start = nn.Linear(num_features, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()) for _ in range(4)
        )
        self.head = nn.Linear(width, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def rows(input_shape: tuple[int, ...], num_outputs: int, *, width: int = 12) -> nn.Module:
    return Rows(*input_shape, num_outputs, width)


def workload(*, width: int = 12, optimizer: Mapping[str, Any] = LISA_SETTINGS, **changes: Any) -> Workload:
    client = {"local_steps": NUM_STEPS, "lr": 0.01, "weight_decay": 0.1, "batch_size": 8, "optimizer": dict(optimizer)}
    given = {
        "partition": {"num_clients": 6, "alpha": 1.0},
        "server": {"cohort_size": 3},
        "model": {"name": f"{HERE}:rows", "width": width},
    }
    return Workload(from_dict({**given, **changes, "client": {**client, **changes.get("client", {})}}))


def train(work: Workload, folder: Path, asked: TrainRequest, *, copies: bool = True) -> TrainReply:
    return SequentialTrainer(work, copies=copies).train(asked, ClientStore(folder))


def draws_of(work: Workload, *, partition: int = 2, round: int = 1) -> list[int]:
    """Return the block of each step of a client's round, from the documented streams: (seed, client, steps //
    period).
    """
    first = (round - 1) * NUM_STEPS
    streams = [
        generator(work.config.seed, Purpose.LAYERS, round=step // 2, partition=partition)
        for step in range(first, first + NUM_STEPS)
    ]
    return [int(stream.permutation(4)[0]) for stream in streams]


def by_hand(
    work: Workload,
    start: Tensors,
    objective: Objective,
    state: Mapping[str, Tensor],
    *,
    partition: int = 2,
    round: int = 1,
) -> tuple[nn.Module, set[str]]:
    """LISA by definition: freeze, AdamW on the rest, with the objective's penalty over all parameters, frozen or
    not.
    """
    model = work.make_model().train()
    model.load_state_dict(start)
    blocks = draws_of(work, partition=partition, round=round)
    samples, settings = work.samples_of(partition), {"lr": 0.01, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    received = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    sizes = {name: tensor.numel() for name, tensor in received.items()}
    context = LocalContext(received=received, state=state, shared={}, unit_displacement=None, sizes=sizes)
    rng = generator(work.config.seed, Purpose.BATCHES, round=round, partition=partition)
    order: list[int] = []
    trained: set[str] = set()
    for step, block in enumerate(blocks):
        if len(order) < 8:
            order = list(rng.permutation(len(samples)))
        index, order = order[:8], order[8:]
        for name, parameter in model.named_parameters():
            active = not name.startswith("blocks.") or name.startswith(f"blocks.{block}.")
            parameter.requires_grad_(active)
            parameter.grad = None
            if not active or (step and step % 2 == 0 and name.startswith("blocks.") and block != blocks[step - 1]):
                optimizer.state.pop(parameter, None)  # has left the set
            if active:
                trained.add(name)
        loss = functional.cross_entropy(model(samples.features[index]), samples.targets[index])
        penalty = objective.penalty(dict(model.named_parameters()), context)
        (loss if penalty is None else loss + penalty).backward()
        optimizer.step()
    return model, trained


def served(work: Workload) -> Tensors:
    return tensors_of(work.make_model())


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "moon"])
def test_a_clients_round_is_the_loop_of_the_paper_with_the_penalty_over_all_parameters(
    name: str, tmp_path: Path
) -> None:
    """What is frozen is constant in the penalty: the same gradients, whether it is summed up there or left out."""
    work, spec = workload(), OBJECTIVES[name]
    assert len(work.samples_of(2)) >= NUM_STEPS * 8  # one epoch
    start = served(work)
    objective = plugins.build("objective", spec.name, spec.settings)
    model, trained = by_hand(work, start, objective, objective.initial_state(start))
    reply = train(work, tmp_path, request(start, objective=spec))
    roles = work.roles  # not those of the model at its last step, of which some blocks are frozen
    buffers = {name for name in start if roles[name] is Role.BUFFER}
    assert reply.tensors.keys() == trained | buffers and buffers
    assert len({name.split(".")[1] for name in trained if name.startswith("blocks.")}) in (2, 3)
    for name, tensor in reply.tensors.items():
        torch.testing.assert_close(tensor, model.state_dict()[name], msg=lambda text, name=name: f"{name}: {text}")
    assert reply.roles == roles


@pytest.mark.parametrize("name", ["feddyn", "moon"])
def test_the_state_after_a_round_is_that_of_the_whole_model(name: str, tmp_path: Path) -> None:
    """FedDyn: h_k + (theta_k - theta_t), so h_k to the bit where nothing was trained; MOON: the whole local model."""
    work, spec, store = workload(), OBJECTIVES[name], ClientStore(tmp_path)
    trainer = SequentialTrainer(work)
    tensors = served(work)
    first = trainer.train(request(tensors, objective=spec), store)
    between = store.load(request(tensors, state_version=1))
    assert between is not None
    tensors = {**tensors, **first.tensors}
    again = request(tensors, round=2, objective=spec, state_version=1, needed_versions=frozenset({1}))
    second = trainer.train(again, store)
    state = store.load(request(tensors, round=2, state_version=2))
    assert state is not None and state.keys() == dict(work.make_model().named_parameters()).keys()
    after = {**tensors, **second.tensors}
    untouched = state.keys() - second.tensors.keys()
    assert untouched and any(between[name].abs().sum() > 0 for name in untouched)
    for key, tensor in state.items():
        wanted = between[key] + (after[key] - tensors[key]) if name == "feddyn" else after[key]
        assert torch.equal(tensor, wanted), key


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("moments", ["drop", "reset", "offload", "keep"])
def test_what_was_received_never_changes_by_one_bit(name: str, moments: str, tmp_path: Path) -> None:
    work = workload(optimizer={**LISA_SETTINGS, "moments": moments})
    tensors = served(work)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    replies = [train(work, tmp_path, request(tensors, objective=OBJECTIVES[name]), copies=copies) for copies in (0, 1)]
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)
    for reply in replies:
        assert any(not torch.equal(reply.tensors[name], before[name]) for name in reply.tensors)
        ours = {tensor.data_ptr() for tensor in tensors.values()}
        assert not ours & {tensor.data_ptr() for tensor in reply.tensors.values()}


def test_a_trainers_clients_do_not_know_of_each_other(tmp_path: Path) -> None:
    """The second client's reply equals that of a fresh trainer, and the first reply stays unchanged."""
    work = workload()
    tensors, trainer = served(work), SequentialTrainer(work)
    first = trainer.train(request(tensors, partition=2), ClientStore(tmp_path))
    kept = {name: tensor.clone() for name, tensor in first.tensors.items()}
    second = trainer.train(request(tensors, partition=3), ClientStore(tmp_path))
    alone = train(work, tmp_path, request(tensors, partition=3))
    assert second.tensors.keys() == alone.tensors.keys() != first.tensors.keys()
    assert all(torch.equal(second.tensors[name], tensor) for name, tensor in alone.tensors.items())
    assert all(torch.equal(first.tensors[name], tensor) for name, tensor in kept.items())


def test_with_all_blocks_a_round_is_adamws_bit_for_bit(tmp_path: Path) -> None:
    ours, torchs = (
        workload(optimizer={**LISA_SETTINGS, "num_sampled_layers": 4}),
        workload(optimizer={"name": "adamw"}),
    )
    mine, its = (train(work, tmp_path, request(served(work))) for work in (ours, torchs))
    assert mine.tensors.keys() == its.tensors.keys()
    assert all(torch.equal(tensor, its.tensors[name]) for name, tensor in mine.tensors.items())
    assert mine.metrics == its.metrics


@pytest.mark.parametrize("copies", [False, True])
def test_a_network_of_images_keeps_its_layout_and_all_stages_are_adamws(copies: bool, tmp_path: Path) -> None:
    """Convolutions are channels-last in the model's own memory; nothing is borrowed, and the bits equal AdamW's."""
    model = {"name": "cnn", "channels": [2, 3]}
    steps = {"local_steps": 3}
    ours, few, torchs = (
        workload(model=model, optimizer=optimizer, client=steps)
        for optimizer in (
            {**LISA_SETTINGS, "blocks": "1,5", "num_sampled_layers": 2},
            {**LISA_SETTINGS, "blocks": "1,5", "num_sampled_layers": 1, "redraw": False},
            {"name": "adamw"},
        )
    )
    tensors = served(ours)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    mine, part, its = (train(work, tmp_path, request(tensors), copies=copies) for work in (ours, few, torchs))
    assert mine.tensors.keys() == its.tensors.keys() > part.tensors.keys()
    assert all(torch.equal(tensor, its.tensors[name]) for name, tensor in mine.tensors.items())
    assert all(torch.equal(tensors[name], tensor) for name, tensor in before.items())
    assert {name for name in tensors if name not in part.tensors} in ({"1.weight"}, {"5.weight"})


@pytest.mark.parametrize("name", ["plain", "fedsign", "feddyn"])
def test_tensors_that_cannot_be_borrowed_are_copied_into_the_models_own_memory(name: str, tmp_path: Path) -> None:
    """Of another type, as those on another device: the same bits, in memory that is taken once for all rounds."""
    work = workload()
    same = served(work)
    other = {key: tensor.double() if tensor.is_floating_point() else tensor for key, tensor in same.items()}
    expected = train(work, tmp_path / "same", request(same, objective=OBJECTIVES[name]))
    trainer = SequentialTrainer(work)
    places = []
    for partition in (1, 2):
        store = ClientStore(tmp_path / "other")
        found = trainer.train(request(other, objective=OBJECTIVES[name], partition=partition), store)
        places.append([parameter.data_ptr() for parameter in trainer._model.parameters.values()])
    assert found.tensors.keys() == expected.tensors.keys()
    assert all(torch.equal(found.tensors[key], tensor) for key, tensor in expected.tensors.items())
    assert places[0] == places[1] and not {tensor.data_ptr() for tensor in found.tensors.values()} & set(places[1])


def test_clipping_takes_the_norm_of_the_gradients_that_are_there(tmp_path: Path) -> None:
    """One step from zero moments moves by lr sign(g) whatever the norm, so only AdamW's eps reveals the clipping."""
    work = workload(
        optimizer={**LISA_SETTINGS, "eps": 1.0}, client={"local_steps": 1, "clip_norm": 1e-3, "weight_decay": 0.0}
    )
    start = served(work)
    block = draws_of(work)[0]
    model = work.make_model().train()
    index = generator(0, Purpose.BATCHES, round=1, partition=2).permutation(len(work.samples_of(2)))[:8]
    samples = work.samples_of(2)
    functional.cross_entropy(model(samples.features[index]), samples.targets[index]).backward()
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if not name.startswith("blocks.") or name.startswith(f"blocks.{block}.")
    }
    norm = torch.cat([gradient.flatten() for gradient in gradients.values() if gradient is not None]).norm()
    assert norm > 0.1
    reply = train(work, tmp_path, request(start))
    for name, gradient in gradients.items():
        assert gradient is not None
        g = gradient * (1e-3 / (norm + 1e-6))
        torch.testing.assert_close(reply.tensors[name] - start[name], -0.01 * g / (g.abs() + 1), rtol=1e-3, atol=1e-7)


class Fails(Objective):
    """Raises in the third step."""

    def __init__(self) -> None:
        self.num_steps = 0

    def penalty(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensor | None:
        self.num_steps += 1
        if self.num_steps == 3:
            raise RuntimeError("the third step")
        return None


def test_a_client_that_fails_leaves_nothing_frozen_for_the_next_one(tmp_path: Path) -> None:
    work = workload()
    tensors, trainer = served(work), SequentialTrainer(work)
    failing = request(tensors, partition=1, objective=ObjectiveSpec(name=f"{HERE}:Fails"))
    (failure,) = trainer.train_many([failing], ClientStore(tmp_path))
    assert isinstance(failure, Failure) and "the third step" in failure.reason
    assert all(parameter.requires_grad for parameter in trainer._model.parameters.values())
    reply = trainer.train(request(tensors), ClientStore(tmp_path))
    alone = train(work, tmp_path, request(tensors))
    assert all(torch.equal(reply.tensors[name], tensor) for name, tensor in alone.tensors.items())


def test_a_model_that_does_not_fit_is_told_so_and_the_next_one_trains(tmp_path: Path) -> None:
    work = workload()
    tensors, trainer = served(work), SequentialTrainer(work)
    wrong = {**tensors, "head.weight": torch.zeros(3, 3)}
    results = list(trainer.train_many([request(wrong), request(tensors)], ClientStore(tmp_path)))
    assert isinstance(results[0], Failure) and "size mismatch for head.weight" in results[0].reason
    assert isinstance(results[1], TrainReply)


def test_batches_in_pieces_train_the_same_blocks(tmp_path: Path) -> None:
    """A step of pieces draws once, in the first."""
    settings: dict[str, Any] = {
        "optimizer": {**LISA_SETTINGS, "blocks": "0,2"},
        "model": {"name": "mlp", "hidden": [8, 8]},
    }
    whole, pieces = (
        train(work, tmp_path, request(served(work)))
        for work in (workload(**settings), workload(**settings, client={"micro_batch": 3}))
    )
    assert whole.tensors.keys() == pieces.tensors.keys()
    for name, tensor in whole.tensors.items():
        torch.testing.assert_close(tensor, pieces.tensors[name], rtol=1e-3, atol=1e-4)


# --- Memory


BATCH = 8


def trained_bytes(reply: TrainReply) -> int:
    return sum(tensor.nbytes for name, tensor in reply.tensors.items() if reply.roles[name] is Role.PARAMETER)


def activation_bytes(width: int) -> int:
    """One step keeps, for each of 4 blocks, the outputs of Linear, BatchNorm, ReLU and the sum, and their gradients.

    Features and outputs come on top; all of it twice, for temporary buffers of the kernels.
    """
    return 2 * 4 * BATCH * (2 * 4 * (4 * width) + 64 + 4 * 10)


@pytest.mark.needs("memory")
@pytest.mark.parametrize("name", ["plain", "fedprox", "fedsign"])
def test_a_client_takes_no_more_than_what_it_trains_beyond_what_it_received(name: str, tmp_path: Path) -> None:
    """Peak bytes beyond the received tensors: the weights trained in the round, and for those trained at a time the
    gradient and two moments.

    A penalty keeps up to four tensors of their size for its backward pass (FedSign: the sign, the absolute value, their
    product with the weights, the logistic function of that).
    """
    from fedsign.memory.live import LiveBytes

    width = 256
    work = workload(width=width, client={"batch_size": BATCH})
    tensors, store = served(work), ClientStore(tmp_path)
    trainer = SequentialTrainer(work)
    work.training_samples, work.training_task  # noqa: B018 - made on first use, and no client's
    with LiveBytes() as live:
        live.name("received", [*tensors.values(), work.training_samples.features, work.training_samples.targets])
        reply = trainer.train(request(tensors, objective=OBJECTIVES[name]), store)
        beyond = live.peak.total_bytes - live.peak.by_category["received"]
    model_bytes = sum(tensor.nbytes for tensor in tensors.values())
    around = sum(tensor.nbytes for key, tensor in tensors.items() if key.startswith(("start", "head")))
    block = sum(tensor.nbytes for key, tensor in tensors.items() if key.startswith("blocks.0"))
    at_a_time = around + block
    temporaries = 0 if name == "plain" else 4 * at_a_time
    bound = trained_bytes(reply) + (1 + 2) * at_a_time + temporaries + activation_bytes(width)
    assert beyond <= bound
    if name == "plain":
        assert bound < 2.4 * model_bytes  # AdamW takes four models, this one's own copy included: not vacuous
        assert beyond > 0.7 * (bound - activation_bytes(width))


def language_models() -> dict[str, Callable[[], nn.Module]]:
    from fedsign.data.text import libraries as llm
    from fedsign.models.causal_lm import CausalLM

    found: dict[str, Callable[[], nn.Module]] = {
        "gpt": lambda: plugins.build("model", "gpt", {"width": 8, "depth": 3, "num_heads": 2}, (4,), 11)
    }
    if importlib.util.find_spec("transformers") is not None:
        library = llm.transformers("a test")
        sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
        config = library.LlamaConfig(**sizes, vocab_size=11, pad_token_id=0)
        found["llama"] = lambda: CausalLM(library.AutoModelForCausalLM.from_config(config))
    return found


@pytest.mark.needs("language")
def test_language_models_borrow_what_is_frozen_and_copy_what_is_drawn() -> None:
    for name, make in language_models().items():
        module = make().train()
        given = tensors_of(module)
        model = PartModel(module, Numerics(device=torch.device("cpu")))
        model.load(given)
        expected = make()
        expected.load_state_dict(given)
        tokens = torch.arange(4)[None]
        assert torch.equal(module(tokens), expected(tokens))
        optimizer = plugins.build("optimizer", "lisa", {"num_sampled_layers": 1}, module, 0.1, 0.0)
        optimizer.before_training = model.take
        optimizer.begin(seed=0, client=0, round=1, first_step=0)
        theirs = {tensor.data_ptr() for tensor in given.values()}
        for parameter_name, parameter in model.parameters.items():
            assert (parameter.data_ptr() in theirs) != parameter.requires_grad, (name, parameter_name)
        assert model.in_training.keys() == {key for key, each in model.parameters.items() if each.requires_grad}
        assert 0 < len(model.in_training) < len(model.parameters)


def test_between_rounds_a_trainer_holds_no_model(tmp_path: Path) -> None:
    work = workload(width=64)
    trainer = SequentialTrainer(work)
    tensors = served(work)
    reply = trainer.train(request(tensors), ClientStore(tmp_path))
    assert sum(parameter.nbytes for parameter in trainer._model.parameters.values()) == 0
    assert trained_bytes(reply) > 0


def test_what_is_read_on_a_device_is_moved_when_it_is_asked_for() -> None:
    """The device `meta` has no memory, but moves like any other."""
    host = {name: torch.ones(3) for name in "abc"}
    held = OnDevice(host, torch.device("meta"), keep=["a"])
    assert held["a"] is held["a"] and held["a"].device.type == "meta"
    assert held["b"] is not held["b"]
    first = held["a"]
    held.keep(["b"])
    assert held["b"] is held["b"] and held["a"] is not first
    assert list(held) == list(host) and len(held) == 3
    assert OnDevice(host, torch.device("cpu"))["a"] is host["a"]


# --- What it does not go with


@pytest.mark.needs("cohort")
def test_the_cohort_path_is_refused_and_auto_is_sequential() -> None:
    from clients.cohort.paths import on_path

    refused = workload(client={"path": "cohort"}, model={"name": "mlp"}, optimizer={**LISA_SETTINGS, "blocks": "0,2"})
    with pytest.raises(ConfigError, match="lisa trains other layers of each client; use"):
        check_training(refused, ObjectiveSpec())
    auto = refused.with_section("client", path="auto")
    assert on_path(auto, ObjectiveSpec()).config.client.path == "sequential"


@pytest.mark.parametrize(
    ("changes", "objective", "sentence"),
    [
        ({}, ObjectiveSpec(name="scaffold"), "needs an optimizer that does not rescale gradients"),
        (
            {"engine": {"compile": True}},
            ObjectiveSpec(),
            "name=lisa trains a part .* engine.compile=true would compile",
        ),
        ({"model": {"name": "mlp"}, "optimizer": {"name": "lisa"}}, ObjectiveSpec(), "no list of blocks was found"),
        ({"optimizer": {**LISA_SETTINGS, "num_sampled_layers": 9}}, ObjectiveSpec(), "the model has 4 blocks"),
    ],
)
def test_what_lisa_cannot_do_is_said_before_a_run(changes: Any, objective: ObjectiveSpec, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_training(workload(**changes), objective)


def test_making_the_optimizer_freezes_nothing() -> None:
    """Checks and warm-ups make one and throw it away."""
    model = rows((64,), 10)
    optimizer = plugins.build("optimizer", "lisa", {"blocks": "blocks"}, model, 0.1, 0.0)
    assert isinstance(optimizer, ClientLISA) and isinstance(optimizer, LISA)
    assert all(parameter.requires_grad for parameter in model.parameters())
