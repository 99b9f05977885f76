"""A resumed run goes on with the split that it was started with, or ends with one sentence that says what to set."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsign.data.partition.base import Split
from fedsign.data.partition.lazy import LazyShares
from fedsign.errors import ConfigError
from fedsign.storage.results import update_config
from simulations import load_run, run
from tests.e2e.command import fedsign

TREE: dict[str, Any] = {
    "rounds": 1,
    "callbacks": [],
    "partition": {"name": "dirichlet", "num_clients": 6},
    "server": {"cohort_size": 2},
    "model": {"name": "mlp", "hidden": [8]},
    "client": {"local_steps": 1},
}


def started(root: Path, **partition: Any) -> Path:
    changes = {"partition": {**TREE["partition"], **partition}, "results": {"root": str(root)}}
    return Path(run({**TREE, **changes}).path)


def as_of_version_0_2(path: Path) -> None:
    """What FedSign 0.2 would have written: the name that the cut had then, and counts without a digest."""
    done = load_run(path)
    record = {key: value for key, value in done.folder.partition.items() if key != "split"}
    done.folder.write_json("partition.json", record)
    update_config(done.folder, done.config.to_toml().replace("_prefix", ""))


@pytest.mark.parametrize("partition", [{}, {"name": "quantity"}, {"name": "virtual", "num_clients": 100_000}])
def test_a_run_with_its_own_split_is_resumed(partition: dict[str, Any], tmp_path: Path) -> None:
    path = started(tmp_path, **partition)
    assert len(load_run(path).folder.partition["split"]) == 64
    assert len(run({"rounds": 2}, resume=path).rounds) == 2


def test_another_cut_is_refused_and_leaves_the_configuration_as_it_was(tmp_path: Path) -> None:
    path = started(tmp_path)
    before = (path / "config.toml").read_bytes()
    with pytest.raises(ConfigError, match=r"partition\.name=dirichlet_prefix draws another split than the run in "):
        run({"rounds": 2, "partition": {"name": "dirichlet_prefix"}}, resume=path)
    assert (path / "config.toml").read_bytes() == before
    assert len(run({"rounds": 2}, resume=path).rounds) == 2


def test_the_command_names_the_cut_and_keeps_the_other_settings(tmp_path: Path) -> None:
    """`--set partition.name=...` drops the settings of the former partition, which a resumed run gets back."""
    path = started(tmp_path, name="dirichlet_prefix", alpha=0.5)
    as_of_version_0_2(path)
    words = ("run", "--resume", str(path), "--set", "rounds=2")
    refused = fedsign(*words, folder=tmp_path)
    assert refused.returncode == 2 and "--set partition.name=dirichlet_prefix" in refused.stderr
    done = fedsign(*words, "--set", "partition.name=dirichlet_prefix", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    resumed = load_run(path)
    assert len(resumed.rounds) == 2 and resumed.config.partition.settings["alpha"] == 0.5
    other = fedsign(*words, "--set", "partition.num_clients=5", folder=tmp_path)
    assert other.returncode == 2 and "another 'partition'" in other.stderr


def test_a_changed_partition_is_said_where_the_counts_are_the_same(tmp_path: Path) -> None:
    path = started(tmp_path, name="iid")
    folder = load_run(path).folder
    folder.write_json("partition.json", {**folder.partition, "split": "0" * 64})
    with pytest.raises(ConfigError, match=r"partition\.name=iid draws another split .* put them back"):
        run({"rounds": 2}, resume=path)


def test_the_digest_tells_clients_and_samples_apart() -> None:
    def digest(*parts: list[int]) -> str:
        return Split(indices=[np.array(part, dtype=np.int64) for part in parts]).digest()

    assert len({digest([0, 1], [2]), digest([0], [1, 2]), digest([2], [0, 1]), digest([0, 1, 2], [])}) == 4
    lazy = LazyShares(2, lambda client: np.array([[0, 1], [2]][client], dtype=np.int64), largest=2)
    assert Split(indices=lazy).digest() == digest([0, 1], [2])
