"""`make same-numbers` detects differences, and reports no others: on snapshots made here, without a run."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from clients.state.database import StateDatabase
from tests.same_numbers import compare
from tests.same_numbers.__main__ import CONFIGURATIONS, _keep, _load, _verdict
from tests.same_numbers.compare import Difference, Snapshot, difference
from tests.same_numbers.runner import merged

LINE = {"round": 1, "loss": 0.5, "clients": [0, 2], "failures": [{"client": 2, "reason": "late"}], "epsilon": None}
MODEL = {"w": torch.tensor([[1.0, -4.0]]), "steps": torch.tensor(3), "mask": torch.tensor([True, False])}


def snapshot_of(
    folder: Path, *, line: dict[str, Any] = LINE, model: dict[str, Tensor] = MODEL, seconds: float = 1.0
) -> Snapshot:
    """What a run leaves, as far as it matters."""
    checkpoint = folder / "run" / "checkpoints" / "round-000001"
    checkpoint.mkdir(parents=True)
    save_file(model, checkpoint / "served.safetensors")
    (folder / "run" / "rounds.jsonl").write_text(json.dumps(line) + "\n")
    (folder / "run" / "timings.jsonl").write_text(json.dumps({"round": 1, "train_s": seconds}) + "\n")
    (folder / "run" / "partition.json").write_text(json.dumps({"counts": [[3, 4]], "seconds": seconds}))
    states = StateDatabase(folder / "run" / "clients")
    states.write(2, 1, {"h": model["w"] / 2})
    states.commit()
    states.close()
    return Snapshot.of(folder)


def changed(name: str, change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    return {**MODEL, name: change(MODEL[name].clone())}


def test_the_same_run_is_the_same_whatever_time_it_took_and_however_it_is_worded(tmp_path: Path) -> None:
    reworded = {**LINE, "failures": [{"client": 2, "reason": "no reply in time"}]}
    base, other = snapshot_of(tmp_path / "a"), snapshot_of(tmp_path / "b", line=reworded, seconds=2.0)
    assert difference(base, other) is None
    assert set(base.numbers) >= {"run/rounds.jsonl/0/failures/0/client", "run/partition.json/counts/0/1"}
    assert base.tensors.keys() == {
        *(f"run/checkpoints/round-000001/served.safetensors/{name}" for name in MODEL),
        "run/clients/000002/round-000001.safetensors/h",
    }


def flipped(tensor: Tensor) -> Tensor:
    """The last bit of the first element is another one."""
    tensor.view(torch.uint8).flatten()[0] ^= 1
    return tensor


@pytest.mark.parametrize(
    ("model", "said", "largest"),
    [
        (changed("w", flipped), "served.safetensors/w: 1 of 2 elements", 2.0**-23 / 4),
        (changed("w", torch.Tensor.double), "w: torch.float32 [1, 2] -> torch.float64 [1, 2]", math.inf),
        (changed("w", lambda w: w[0]), "w: torch.float32 [1, 2] -> torch.float32 [2]", math.inf),
        (changed("w", lambda w: w * math.nan), "w: 2 of 2 elements", math.inf),
        (changed("steps", lambda steps: steps + 1), "steps: 1 of 1 elements", math.inf),
        (changed("mask", torch.logical_not), "mask: 2 of 2 elements", math.inf),
        ({"w": MODEL["w"], "steps": MODEL["steps"]}, "served.safetensors/mask is missing", math.inf),
        ({**MODEL, "v": torch.zeros(1)}, "served.safetensors/v is new", math.inf),
    ],
)
def test_a_difference_in_a_tensor_is_seen_and_measured(
    model: dict[str, Tensor], said: str, largest: float, tmp_path: Path
) -> None:
    served = "run/checkpoints/round-000001/served.safetensors/"
    base, other = snapshot_of(tmp_path / "a"), snapshot_of(tmp_path / "b", model=model)
    other.tensors["run/clients/000002/round-000001.safetensors/h"] = MODEL["w"] / 2
    found = difference(base, other)
    assert found is not None and found.first.startswith(served) and found.first.endswith(said)
    assert found.count == 1 and found.largest == pytest.approx(largest)


def test_negative_zero_is_not_zero(tmp_path: Path) -> None:
    number = difference(Snapshot({}, {"loss": 0.0}), Snapshot({}, {"loss": -0.0}))
    assert number == Difference(first="loss: 0.0 -> -0.0", count=1, largest=0.0)
    zero = {**MODEL, "w": torch.tensor([0.0, 1.0])}
    base, other = (
        snapshot_of(tmp_path / "a", model=zero),
        snapshot_of(tmp_path / "b", model={**zero, "w": torch.tensor([-0.0, 1.0])}),
    )
    assert difference(base, other) == Difference(
        first="run/checkpoints/round-000001/served.safetensors/w: 1 of 2 elements", count=2, largest=0.0
    )


def test_a_clients_state_is_seen(tmp_path: Path) -> None:
    base, other = snapshot_of(tmp_path / "a"), snapshot_of(tmp_path / "b")
    name = "run/clients/000002/round-000001.safetensors/h"
    other.tensors[name] = flipped(other.tensors[name].clone())
    found = difference(base, other)
    assert found is not None and found.first == f"{name}: 1 of 2 elements"


@pytest.mark.parametrize(
    ("line", "said", "largest"),
    [
        ({**LINE, "loss": 0.25}, "loss: 0.5 -> 0.25", 0.5),
        ({**LINE, "loss": math.nextafter(0.5, 1)}, "loss: 0.5 -> 0.5000000000000001", 2.0**-52),
        ({**LINE, "clients": [0, 1]}, "clients/1: 2 -> 1", math.inf),
        ({**LINE, "round": 1.0}, "round: 1 -> 1.0", math.inf),
        ({**LINE, "epsilon": 0.0}, "epsilon: None -> 0.0", math.inf),
        ({**LINE, "clients": [0]}, "clients/1 is missing", math.inf),
        ({**LINE, "drift": 0.1}, "drift is new", math.inf),
    ],
)
def test_a_difference_in_a_record_is_seen_and_measured(
    line: dict[str, Any], said: str, largest: float, tmp_path: Path
) -> None:
    found = difference(snapshot_of(tmp_path / "a"), snapshot_of(tmp_path / "b", line=line))
    assert found is not None and found.first == f"run/rounds.jsonl/0/{said}" and found.count == 1
    assert found.largest == pytest.approx(largest)


def test_a_key_that_was_renamed_is_the_same_once_it_is_an_alias(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renamed = {("objective" if key == "loss" else key): value for key, value in LINE.items()}
    before = tmp_path / "a", tmp_path / "b"
    found = difference(snapshot_of(before[0]), snapshot_of(before[1], line=renamed))
    assert found is not None and found.first == "run/rounds.jsonl/0/loss is missing"
    monkeypatch.setitem(compare.ALIASES, "loss", "objective")
    assert difference(Snapshot.of(before[0]), Snapshot.of(before[1])) is None


def test_a_verdict_lets_pass_what_is_within_the_tolerance_and_says_so(tmp_path: Path) -> None:
    base = snapshot_of(tmp_path / "a")
    near, far = (
        snapshot_of(tmp_path / name, line={**LINE, "loss": loss}) for name, loss in (("b", 0.5 + 1e-8), ("c", 0.6))
    )
    assert _verdict(base, near, 0.0)[0] is False
    assert _verdict(base, near, 1e-6) == (True, "same within 1e-06 (1 differ, largest relative deviation 2.0e-08)")
    assert _verdict(base, far, 1e-6)[0] is False
    assert _verdict(Snapshot({}, {"loss": 0.0}), Snapshot({}, {"loss": -0.0}), 0.0)[0] is False
    assert [_verdict(*each, 0.0) for each in ((None, base), (base, None), (None, None))] == [
        (False, "failed on the base"),
        (False, "failed on the working tree"),
        (False, "failed on both"),
    ]


def test_what_is_kept_of_the_base_is_what_was_run_and_does_not_count_when_it_is_damaged(tmp_path: Path) -> None:
    folder, snapshot = tmp_path / "kept", snapshot_of(tmp_path / "a")
    assert _load(folder) is None
    _keep(snapshot, folder)
    kept = _load(folder)
    assert kept is not None and difference(snapshot, kept) is None
    numbers = folder / "numbers.json"
    numbers.write_text(numbers.read_text().replace("0.5", "0.4"))
    assert _load(folder) is None


def test_a_table_with_another_name_takes_the_place_of_the_former_one() -> None:
    tree = {"model": {"name": "mlp", "hidden": [8]}, "rounds": 3}
    assert merged(tree, {"model": {"hidden": [4]}}) == {"model": {"name": "mlp", "hidden": [4]}, "rounds": 3}
    assert merged(tree, {"model": {"name": "cnn"}}) == {"model": {"name": "cnn"}, "rounds": 3}


def test_there_are_configurations() -> None:
    assert len(CONFIGURATIONS) >= 40
