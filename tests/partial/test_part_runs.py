"""Runs with partial training: the same records on every path, and bytes that match the tensors."""

from collections.abc import Mapping
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch

from fedsign.config import from_dict
from fedsign.records import Tensors, TrainReply
from fedsign.storage.checkpoints import load_latest
from fedsign.storage.results import RunFolder
from fedsign.workload import Workload
from simulations import Run, run
from strategies.base import Strategy
from tests.contract.test_exchange import OURS, _ByMessages
from tests.contract.test_strategies import lines
from tests.contract.transported import over_flowers_transport

STRATEGIES = sorted(OURS.keys() - {"scaffold"})
NUM_CLIENTS, BLOCKS = 4, "0,2,4"  # the hidden layers; the last one, "6", is the head, which always trains
for _name in STRATEGIES:
    globals()[f"{_name}_by_messages"] = type(
        f"{_name}_by_messages", (_ByMessages, OURS[_name]), {"__module__": __name__}
    )


def tree(root: Path, strategy: str = "fedavg", *, draws: str = "per_client", **changes: Any) -> dict[str, Any]:
    """Six rounds of two of four clients, with one of three layers each."""
    lisa = {"name": "lisa", "blocks": BLOCKS, "num_sampled_layers": 1, "period": 3, "draws": draws}
    return {
        "rounds": 6,
        "callbacks": [],
        "partition": {"num_clients": NUM_CLIENTS, "alpha": 1.0},
        "server": {"cohort_size": 2},
        "client": {"local_steps": 3, "lr": 0.01, "optimizer": lisa},
        "model": {"name": "mlp", "hidden": [8, 8, 8]},
        "strategy": {"name": strategy},
        "results": {"root": str(root), "checkpoint_every": 1, "keep_checkpoints": 10},
        **changes,
    }


def with_norms(root: Path) -> dict[str, Any]:
    """The same of a model with BatchNorm."""
    lisa = {"name": "lisa", "blocks": "1,5", "num_sampled_layers": 1, "period": 3}
    model = {"model": {"name": "cnn", "channels": [2, 2]}}
    return tree(root, **model, client={"local_steps": 3, "lr": 0.01, "optimizer": lisa})


class Remembering(Strategy):
    """FedAvg that remembers what came."""

    rounds: list[tuple[Tensors, list[TrainReply], Tensors | None]] = []  # noqa: RUF012 - emptied by each test

    def aggregate(self, round: int, replies: Any) -> Tensors | None:
        held = list(replies)
        served = super().aggregate(round, held)
        self.rounds.append((self._served, held, served))
        return served


LOSSES = {"faults": {"drop_rate": 0.5}, "server": {"cohort_size": 4, "min_replies": 1}}


@pytest.mark.parametrize(
    "changes",
    [pytest.param({}, id="all reply"), pytest.param(LOSSES, id="some fail", marks=pytest.mark.needs("robustness"))],
)
def test_clients_send_what_they_trained_and_the_lines_count_it(changes: dict[str, Any], tmp_path: Path) -> None:
    """Against the replies themselves: bytes up are theirs, bytes down what has changed since a client's last reply."""
    Remembering.rounds.clear()
    done = run(tree(tmp_path, f"{__name__}:Remembering", **changes))
    assert any(line["failures"] for line in done.rounds) == bool(changes)
    names = [*done.model().state_dict()]
    last_seen: dict[int, Tensors] = {}
    for line, (served, replies, after) in zip(done.rounds, Remembering.rounds, strict=True):
        assert after is not None
        down = up = 0
        for client in line["clients"]:
            known = last_seen.get(client)
            down += sum(
                served[name].nbytes for name in names if known is None or not torch.equal(known[name], served[name])
            )
        for reply in replies:
            hidden = {name.partition(".")[0] for name in reply.tensors} - {"6"}
            assert len(hidden) == 1 and "6" in {name.partition(".")[0] for name in reply.tensors}
            up += sum(tensor.nbytes for tensor in reply.tensors.values())
            last_seen[reply.partition] = served
        assert (line["bytes_up"], line["bytes_down"]) == (up, down)
        sent = {name for reply in replies for name in reply.tensors}
        assert all(torch.equal(after[name], served[name]) for name in names if name not in sent)
    whole = sum(tensor.nbytes for tensor in Remembering.rounds[0][0].values())
    assert done.rounds[0]["bytes_down"] == len(done.rounds[0]["clients"]) * whole > done.rounds[-1]["bytes_down"]


@pytest.mark.parametrize("name", STRATEGIES)
def test_without_messages_a_run_has_the_same_lines_to_the_last_bit(name: str, tmp_path: Path) -> None:
    assert lines(run(tree(tmp_path, name))) == lines(run(tree(tmp_path, f"{__name__}:{name}_by_messages")))


@pytest.mark.parametrize(
    "changes",
    [
        *({"strategy": {"name": name}} for name in STRATEGIES),
        {"server": {"cohort_size": 2, "optimizer": {"name": "adam"}}},
        {"faults": {"drop_rate": 0.3}, "server": {"cohort_size": 4, "min_replies": 1}},
        {"results": {"checkpoint_every": 1, "signs": True}},
    ],
    ids=[*STRATEGIES, "server-adam", "lost-replies", "signs"],
)
def test_a_resumed_run_ends_like_one_that_was_not_stopped(changes: Mapping[str, Any], tmp_path: Path) -> None:
    base = tree(tmp_path)
    base |= {**changes, "results": {**base["results"], **changes.get("results", {})}}
    whole, half = run(base), run({**base, "rounds": 3})
    resumed = run({"rounds": 6}, resume=half.path)
    assert lines(resumed) == lines(whole)
    one, other = load_latest(resumed.folder.checkpoints), load_latest(whole.folder.checkpoints)
    assert one is not None and other is not None and (one.facts, one.tables) == (other.facts, other.tables)
    assert one.tables["received"] and set(one.facts["changed_in"]) <= one.served.keys()


def test_a_run_in_which_all_is_trained_has_no_account_and_the_checkpoint_of_before(tmp_path: Path) -> None:
    done = run(tree(tmp_path, client={"local_steps": 3, "optimizer": {"name": "adamw"}}, rounds=1))
    (folder,) = done.folder.checkpoints.iterdir()
    assert {path.name for path in folder.iterdir()} == {"served.safetensors", "state.json"}
    assert "changed_in" not in (folder / "state.json").read_text()


def test_per_round_all_clients_of_a_round_train_the_same_layers(tmp_path: Path) -> None:
    Remembering.rounds.clear()
    run(tree(tmp_path, f"{__name__}:Remembering", draws="per_round"))
    for _, replies, _ in Remembering.rounds:
        assert len({frozenset(reply.tensors) for reply in replies}) == 1


def test_with_all_layers_drawn_a_run_is_that_of_adamw_to_the_last_bit_but_for_what_is_downloaded(
    tmp_path: Path,
) -> None:
    """Every tensor changes in every round, so that bytes down are those of everything too."""
    optimizer = {"name": "lisa", "blocks": BLOCKS, "num_sampled_layers": 3, "period": 3}
    parts = run(tree(tmp_path, client={"local_steps": 3, "lr": 0.01, "optimizer": optimizer}))
    whole = run(tree(tmp_path, client={"local_steps": 3, "lr": 0.01, "optimizer": {"name": "adamw"}}))
    assert lines(parts) == lines(whole)


# Over Flower's transport


def same(folder: RunFolder, reference: Run) -> bool:
    """The lines, the model that is served, and the account."""
    one, other = load_latest(folder.checkpoints), load_latest(reference.folder.checkpoints)
    assert one is not None and other is not None
    return (
        (folder.path / "rounds.jsonl").read_text() == lines(reference)
        and all(torch.equal(tensor, other.served[name]) for name, tensor in one.served.items())
        and (one.facts, one.tables) == (other.facts, other.tables)
    )


@pytest.mark.parametrize("name", STRATEGIES)
def test_transported_messages_give_the_bits_of_the_run_in_process(name: str, tmp_path: Path) -> None:
    assert same(over_flowers_transport(tmp_path, tree(tmp_path, name)), run(tree(tmp_path, name)))


def test_a_model_with_buffers_is_transported_too(tmp_path: Path) -> None:
    folder, reference = over_flowers_transport(tmp_path, with_norms(tmp_path)), run(with_norms(tmp_path))
    assert same(folder, reference)


@pytest.mark.needs("language")
def test_a_language_model_is_transported_too(tmp_path: Path) -> None:
    """Its head is its embedding: one tensor, which everybody sends."""
    language = {
        "data": {"name": "pytext", "block_length": 32},
        "partition": {"name": "natural", "num_clients": NUM_CLIENTS},
        "task": "language",
        "metrics": ["perplexity"],
        "model": {"name": "gpt", "depth": 3, "width": 16, "num_heads": 2},
        "client": {"local_steps": 2, "batch_size": 4, "optimizer": {"name": "lisa", "num_sampled_layers": 1}},
    }
    experiment = tree(tmp_path, "fedsign", rounds=3, **language)
    assert same(over_flowers_transport(tmp_path, experiment), run(experiment))


def test_clients_whose_disk_is_cleared_between_rounds_change_no_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def clear(round: int, clients: Path) -> None:
        if round in (2, 4):
            assert list((clients / "received").iterdir())
            rmtree(clients / "received")

    folder = over_flowers_transport(tmp_path, tree(tmp_path), before=clear)
    assert same(folder, run(tree(tmp_path)))
    told = [record.getMessage() for record in caplog.records if "IncompleteModelError" in record.getMessage()]
    assert len(told) == 1 and not (folder.path / "failures.jsonl").exists()


def test_a_server_that_goes_on_from_an_older_checkpoint_finds_clients_that_are_ahead_of_it(tmp_path: Path) -> None:
    """Killed after round 6, resumed after round 3: what clients keep is the model of a round that is run again."""
    folder = over_flowers_transport(tmp_path, tree(tmp_path))
    for number in (4, 5, 6):
        rmtree(folder.checkpoints / f"round-{number:06d}")
    recorded = (folder.path / "rounds.jsonl").read_text().splitlines(keepends=True)
    (folder.path / "rounds.jsonl").write_text("".join(recorded[:3]))
    again = over_flowers_transport(tmp_path, tree(tmp_path))
    assert again.path == folder.path and (again.path / "rounds.jsonl").read_text() == "".join(recorded)
    assert same(again, run(tree(tmp_path)))


def test_what_a_client_keeps_is_one_model(tmp_path: Path) -> None:
    folder = over_flowers_transport(tmp_path, tree(tmp_path))
    kept = list((folder.clients / "received").glob("*"))
    assert len(kept) == len(Workload(from_dict(tree(tmp_path))).make_model().state_dict())
