"""Runs on text give the same bits in process, in workers, and at nodes with their own lines."""

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from clients.deployment.node import TOKENIZER_KEY
from fedsign.config import from_dict
from fedsign.data.base import fingerprint
from fedsign.data.text.hugging_face import hugging_face
from fedsign.errors import EngineError
from fedsign.flower.partition_grid import PartitionGrid
from fedsign.storage.results import RunFolder
from fedsign.workload import Workload
from simulations import Run, run
from simulations.backends.base import intra_op_threads
from tests.contract.transported import run_with
from tests.deployment.test_nodes import sites_of
from tests.language.language_samples import save_tokenizer, sums, write_lines
from tests.unit.test_flower_wire import Deployment

pytestmark = pytest.mark.needs("partial")
LISA = {"name": "lisa", "num_sampled_layers": 1, "period": 2}


@pytest.fixture(autouse=True)
def _threads_are_lent() -> Iterator[None]:
    """A node takes the experiment's number of threads, for good: it is a process of its own elsewhere."""
    with intra_op_threads(torch.get_num_threads()):
        yield


def tree(root: Path, **changes: Any) -> dict[str, Any]:
    """A tiny GPT on half-empty blocks of instructions."""
    return {
        "rounds": 2,
        "callbacks": [],
        "task": "language",
        "metrics": ["perplexity", "token_accuracy", "rouge_l"],
        "model": {"name": "gpt", "width": 16, "depth": 2, "num_heads": 2},
        "client": {"local_steps": 3, "batch_size": 4, "lr": 1e-2, "optimizer": LISA},
        "strategy": {"name": "fedavg"},
        "server": {"cohort_size": 2, "answers": 4, "answers_every": 2, "max_new_tokens": 8},
        "results": {"root": str(root), "checkpoint_every": 1},
        **changes,
    }


def lines_of(root: Path, **settings: Any) -> dict[str, Any]:
    path = write_lines(root / "lines.jsonl", sums(40))
    return {"name": "jsonl", "path": path, "owner": "who", "prompt": "short", "block_length": 96, **settings}


def same_files(one: Path, other: Path, *names: str) -> None:
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.needs("workers")
@pytest.mark.slow
def test_workers_give_the_bits_of_one_process(tmp_path: Path) -> None:
    split = {"name": "natural", "num_clients": 2}
    data = lines_of(tmp_path)
    alone = run(tree(tmp_path / "alone", data=data, partition=split))
    shared = run(tree(tmp_path / "shared", data=data, partition=split, engine={"name": "in_process", "workers": 2}))
    same_files(alone.path, shared.path, "rounds.jsonl", "model.safetensors")
    assert alone.rounds[-1]["perplexity"] < alone.rounds[0]["perplexity"]


def test_a_run_on_text_is_resumed_to_the_same_bits(tmp_path: Path) -> None:
    split = {"name": "natural", "num_clients": 2}
    tree_of = partial(tree, tmp_path, data=lines_of(tmp_path), partition=split)
    whole, half = run(tree_of(rounds=4)), run(tree_of(rounds=3))
    resumed = run({"rounds": 4}, resume=half.path)
    same_files(whole.path, resumed.path, "rounds.jsonl", "model.safetensors")
    assert ["rouge_l" in record for record in resumed.rounds] == [False, True, False, True]


@pytest.fixture(scope="module")
def silos(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("silos")
    long = {"instruction": "Add.", "output": "9" * 200}
    for k in range(2):
        write_lines(folder / f"silo {k}" / "lines.jsonl", [*sums(12 + k, first=100 * k), long])
    return [str(folder / f"silo {k}") for k in range(2)]


def at_sites(root: Path, roots: list[str], **changes: Any) -> dict[str, Any]:
    data = {"name": "jsonl", "path": "lines.jsonl", "prompt": "short", "block_length": 96}
    split = {"name": "sites", "num_clients": 2, "roots": roots, "names": ["clinic 0", "clinic 1"]}
    return tree(root, data=data, partition=split, **changes)


def test_silos_at_nodes_give_the_bits_of_the_run_in_process(
    silos: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here: Run = run(at_sites(tmp_path, silos))
    config = from_dict(at_sites(tmp_path, [], engine={"name": "superlink"}))
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="fedsign"):
        there = run_with(config, RunFolder(tmp_path / "transported"), sites_of(config, tmp_path, silos))
    same_files(here.path, there.path, "rounds.jsonl", "sites.jsonl", "model.safetensors")
    said = [record.getMessage() for record in caplog.records]
    assert any(note.startswith("site 'clinic 0': 1 of") and "were cut" in note for note in said), said


def test_a_silo_with_another_tokenizer_than_the_server_stops_the_run_at_the_roll_call(
    silos: list[str], tmp_path: Path
) -> None:
    own, other = (
        hugging_face(save_tokenizer(tmp_path / name, end=end)) for name, end in (("a", "<s>"), ("b", "<|im_end|>"))
    )
    assert own.vocabulary_size == other.vocabulary_size and own.fingerprint != other.fingerprint
    tree_ = at_sites(tmp_path, [], engine={"name": "superlink"})
    config = from_dict(tree_ | {"data": tree_["data"] | {"tokenizer": str(tmp_path / "a")}})
    work = Workload(config)
    nodes = Deployment(sites_of(config, tmp_path, silos))
    grid = PartitionGrid(nodes, num_partitions=2, roles=work.roles, leaves_process=True)
    grid.roll_call(timeout_s=5, question={TOKENIZER_KEY: fingerprint(work.dataset.text)})
    grid = PartitionGrid(nodes, num_partitions=2, roles=work.roles, leaves_process=True)
    with pytest.raises(EngineError, match=r"a node cannot take part: .*/a has other tokens here than at the server"):
        grid.roll_call(timeout_s=5, question={TOKENIZER_KEY: fingerprint(other)})
