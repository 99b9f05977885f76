"""Runs of sparse clients send only values, count their bytes exactly, and give the model of zero-filled tensors.

The reference is the same run with whole tensors sent: a `RowPacking` that packs nothing.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.compatibility import NUM_CLIENTS, strategy
from clients.state.database import StateDatabase
from clients.trainer import make_optimizer
from fedsign.config import from_dict
from fedsign.errors import ConfigError
from fedsign.models.transform import Packing, packing_of
from fedsign.parameterization.apply import parameterized
from fedsign.parameterization.packing import RowPacking
from fedsign.registry import KINDS
from fedsign.storage.checkpoints import load_latest
from fedsign.workload import Workload
from simulations import Run, run
from tests.contract.test_strategies import lines
from tests.contract.transported import over_flowers_transport

DENSITY = 0.25
STRATEGIES = [*KINDS["strategy"].table]
OURS = [name for name in STRATEGIES if not name.startswith("flower_")]
NOISY = {name for name in STRATEGIES if name.startswith("flower_dp_")}
FIGURES_OF_VECTORS = {"update_norm", "client_drift", "cosine"}  # sums over a vector, whose order follows its length


def tree(root: Path, row: str = "fedavg", **changes: Any) -> dict[str, Any]:
    """Two rounds of three steps; SCAFFOLD needs one rate for all, which sp has."""
    scheme = {"name": "sp"} if row == "scaffold" else {"name": "smupar", "base_width": 16}
    return {
        "rounds": 2,
        "callbacks": [],
        "partition": {"num_clients": NUM_CLIENTS, "alpha": 1.0},
        "server": {"cohort_size": NUM_CLIENTS},
        "client": {"local_steps": 3, "lr": 0.05, "weight_decay": 0.01},
        "model": {"name": "mlp", "hidden": [16, 32, 16]},
        "parameterization": {**scheme, "density": DENSITY, "init_std": 0.2},
        "strategy": strategy(row),
        "results": {"root": str(root), "checkpoint_every": 1},
        **changes,
    }


def sizes(done: Run) -> tuple[int, int, int]:
    """Return the bytes of the dense part, of the nonzero weights of the sparse part, and of its whole tensors."""
    model = Workload(done.config).make_model()
    made = parameterized(model)
    assert made is not None and len(made.masks) == 2
    sparse = [model.get_parameter(name) for name in made.masks]
    whole = sum(tensor.nbytes for tensor in sparse)
    there = sum(4 * int(mask.is_present.sum()) for mask in made.masks.values())
    return sum(parameter.nbytes for parameter in model.parameters()) - whole, there, whole


@pytest.fixture
def whole_on_the_wire(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call on, nothing is packed."""

    def identity() -> None:
        for name in ("shape", "packed", "whole", "put"):
            monkeypatch.setattr(RowPacking, name, getattr(Packing, name))

    return identity


def same_figures(one: Run, other: Run) -> None:
    for line, its in zip(one.rounds, other.rounds, strict=True):
        assert line.keys() == its.keys()
        for key in line.keys() - {"bytes_up", "bytes_down"}:
            if key in FIGURES_OF_VECTORS:
                assert line[key] == pytest.approx(its[key], rel=1e-5), key
            elif not key.startswith("signs"):
                assert line[key] == its[key], key


@pytest.mark.parametrize("row", [row for row in STRATEGIES if row not in NOISY])
def test_a_run_is_that_with_whole_tensors_and_zeros_on_the_wire(
    row: str, whole_on_the_wire: Callable[[], None], tmp_path: Path
) -> None:
    packed = run(tree(tmp_path, row))
    whole_on_the_wire()
    dense = run(tree(tmp_path, row))
    same_figures(packed, dense)
    assert all(line["bytes_up"] < its["bytes_up"] for line, its in zip(packed.rounds, dense.rounds, strict=True))
    one, other = (load_file(done.path / "model.safetensors") for done in (packed, dense))
    assert one.keys() == other.keys()
    exact = row in OURS  # others sum over whole vectors: Krum's distances, norms that are clipped
    assert all(
        torch.equal(tensor, other[name]) if exact else torch.allclose(tensor, other[name], rtol=1e-5, atol=1e-7)
        for name, tensor in one.items()
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"server": {"cohort_size": NUM_CLIENTS, "optimizer": {"name": "adam"}}},
        {"server": {"cohort_size": NUM_CLIENTS, "optimizer": {"name": "yogi"}}},
        {"attack": {"name": "sign_flip", "fraction": 0.4}},
        {"client": {"local_steps": 3, "lr": 0.01, "optimizer": {"name": "packed_adamw"}}},
        {"parameterization": {"name": "mup", "base_width": 16, "densities": {"2.weight": 0.1}, "init_std": 0.2}},
        {"model": {"name": "cnn", "channels": [4, 8]}},
    ],
    ids=["server-adam", "server-yogi", "attacked", "packed-adamw", "one-sparse-tensor", "convolutions-and-norms"],
)
def test_whatever_works_on_the_model_need_not_know(
    changes: Mapping[str, Any], whole_on_the_wire: Callable[[], None], tmp_path: Path
) -> None:
    packed = run(tree(tmp_path, "feddyn", **changes))
    whole_on_the_wire()
    dense = run(tree(tmp_path, "feddyn", **changes))
    same_figures(packed, dense)
    one, other = (load_file(done.path / "model.safetensors") for done in (packed, dense))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("row", [row for row in STRATEGIES if row not in NOISY])
def test_bytes_are_the_dense_part_and_the_weights_that_there_are(row: str, tmp_path: Path) -> None:
    done = run(tree(tmp_path, row))
    dense, there, whole = sizes(done)
    assert there < 0.4 * whole  # small tensors: the number of weights is random, and its mean a quarter
    copies = 2 if row == "scaffold" else 1  # control variates travel too, from the second round on
    for line in done.rounds:
        assert line["bytes_up"] == NUM_CLIENTS * copies * (dense + there)
    assert done.rounds[1]["bytes_down"] == NUM_CLIENTS * copies * (dense + there)


# As many weights as the density says

EXACT = {"sparsity": {"draw": "exact"}}
DENSE_PART = 65 * 16 + 32 + 16 + 17 * 10  # first layer, hidden biases, head
HIDDEN_PART = 2 * 16 * 32
EXACT_BYTES = NUM_CLIENTS * 4 * (DENSE_PART + DENSITY * HIDDEN_PART)


@pytest.mark.parametrize("row", OURS)
def test_with_an_exact_draw_bytes_are_the_dense_part_and_density_times_the_hidden_part(
    row: str, tmp_path: Path
) -> None:
    done = run(tree(tmp_path, row, **EXACT))
    copies = 2 if row == "scaffold" else 1
    assert all(line["bytes_up"] == copies * EXACT_BYTES for line in done.rounds)
    assert done.rounds[1]["bytes_down"] == copies * EXACT_BYTES
    dense, there, whole = sizes(done)
    assert (dense, there) == (4 * DENSE_PART, DENSITY * whole)


@pytest.mark.needs("workers")
@pytest.mark.slow
def test_all_ways_of_a_run_draw_the_same_exact_masks(tmp_path: Path) -> None:
    asked = tree(tmp_path, "feddyn", **EXACT)
    reference = run(asked)
    assert lines(reference) != lines(run(tree(tmp_path, "feddyn")))
    folder, half = over_flowers_transport(tmp_path, asked), run({**asked, "rounds": 1})
    assert (folder.path / "rounds.jsonl").read_text() == lines(reference)
    assert lines(run({"rounds": 2}, resume=half.path)) == lines(reference)
    assert lines(run({**asked, "engine": {"workers": 2}})) == lines(reference)


@pytest.mark.parametrize(
    "changes",
    [{"client": {"local_steps": 3, "lr": 0.05, "path": "cohort"}}, {"engine": {"sparse_products": "csr"}}],
    ids=["cohort", "csr"],
)
def test_faster_ways_of_a_run_draw_the_same_exact_masks(changes: Mapping[str, Any], tmp_path: Path) -> None:
    plain = {"client": {"local_steps": 3, "lr": 0.05}}
    one, other = (run(tree(tmp_path, **EXACT, **{**plain, **more})) for more in ({}, changes))
    made = parameterized(Workload(other.config).make_model())
    assert made is not None
    for line, its in zip(one.rounds, other.rounds, strict=True):
        assert line["bytes_up"] == its["bytes_up"] == EXACT_BYTES
        assert line["loss"] == pytest.approx(its["loss"], rel=1e-4)
    weights = other.model()
    assert all(int((weights.get_parameter(name) != 0).sum()) == mask.num for name, mask in made.masks.items())


PRIVATE = {"clip_norm": 0.5, "noise_multiplier": 1.0, "delta": 0.01}


@pytest.mark.parametrize(
    ("row", "privacy"),
    [
        pytest.param("fedavg", {"name": "central", **PRIVATE}, marks=pytest.mark.needs("privacy")),
        pytest.param("feddyn", {"name": "local", **PRIVATE}, marks=pytest.mark.needs("privacy")),
        *((row, {}) for row in sorted(NOISY)),
    ],
)
def test_noise_falls_on_the_weights_that_there_are_alone(row: str, privacy: Mapping[str, Any], tmp_path: Path) -> None:
    done = run(tree(tmp_path, row, **({"privacy": privacy} if privacy else {})))
    model = done.model()
    made = parameterized(Workload(done.config).make_model())
    assert made is not None
    for name, mask in made.masks.items():
        weights = model.get_parameter(name).detach()
        assert not weights[~mask.is_present].any() and weights[mask.is_present].all()


@pytest.mark.parametrize("row", ["feddyn", "scaffold", "moon"])
def test_states_and_checkpoints_hold_values_alone(row: str, tmp_path: Path) -> None:
    done = run(tree(tmp_path, row))
    dense, there, _ = sizes(done)
    database = StateDatabase(done.folder.clients)
    for partition in range(NUM_CLIENTS):
        state = database.read(partition, database.versions(partition)[-1])
        assert state is not None and sum(tensor.nbytes for tensor in state.values()) == dense + there
    database.close()
    checkpoint = load_latest(done.folder.checkpoints)
    assert checkpoint is not None
    for held in (checkpoint.served, checkpoint.evaluated, checkpoint.strategy if row == "feddyn" else None):
        assert held is None or sum(tensor.nbytes for tensor in held.values()) == dense + there


@pytest.mark.parametrize("row", OURS)
def test_a_resumed_run_ends_like_one_that_was_not_stopped(row: str, tmp_path: Path) -> None:
    half = run(tree(tmp_path, row, rounds=1))
    assert lines(run({"rounds": 2}, resume=half.path)) == lines(run(tree(tmp_path, row)))


@pytest.mark.parametrize("row", [*OURS, "flower_fedadam", "flower_krum"])
def test_transported_messages_give_the_bits_of_the_run_in_process(row: str, tmp_path: Path) -> None:
    asked = tree(tmp_path, row)
    folder, reference = over_flowers_transport(tmp_path, asked), run(asked)
    assert (folder.path / "rounds.jsonl").read_text() == lines(reference)
    one, other = load_file(folder.path / "model.safetensors"), load_file(reference.path / "model.safetensors")
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.needs("landscape")
def test_what_is_written_at_the_end_is_a_plain_state_dict(tmp_path: Path) -> None:
    from simulations.landscape.target import target_of

    done = run(tree(tmp_path, "feddyn"))
    written, own = load_file(done.path / "model.safetensors"), done.model().state_dict()
    assert all(torch.equal(written[name], tensor) for name, tensor in own.items())
    (last,) = [path for path in done.folder.checkpoints.iterdir() if path.name == "round-000002"]
    for path in (done.path, last):
        found = target_of(path).model.state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in own.items())


@pytest.mark.needs("signs")
def test_signs_are_counted_of_the_weights_that_there_are(tmp_path: Path) -> None:
    """Absent weights have no sign, so that packed or not the shares are the same."""
    done = run(tree(tmp_path, "fedsign", results={"root": str(tmp_path), "signs": True}))
    made = parameterized(Workload(done.config).make_model())
    assert made is not None
    signs = (done.path / "signs.jsonl").read_text()
    assert all(f'"{name}"' in signs for name in made.masks) and 0.5 <= done.rounds[-1]["signs_models"] <= 1


@pytest.mark.needs("workers")
@pytest.mark.slow
def test_workers_get_rows_too(tmp_path: Path) -> None:
    one = run(tree(tmp_path, "feddyn"))
    two = run(tree(tmp_path, "feddyn", engine={"workers": 2}))
    assert lines(one) == lines(two)


@pytest.mark.parametrize("optimizer", ["sgd", "packed_sgd"])
def test_scaffold_takes_one_rate_for_all_and_says_where_there_are_several(optimizer: str, tmp_path: Path) -> None:
    client = {"local_steps": 3, "optimizer": {"name": optimizer}}
    assert run(tree(tmp_path, "scaffold", client=client)).rounds[-1]["num_replies"] == NUM_CLIENTS
    several = {"name": "smupar", "base_width": 16, "density": DENSITY}
    with pytest.raises(
        ConfigError, match=r"smupar was given, which gives tensors learning rates of their own .*\.name=sp"
    ):
        run(tree(tmp_path, "scaffold", client=client, parameterization=several))


def test_a_tensor_of_the_least_density_keeps_one_weight(tmp_path: Path) -> None:
    rare = {"name": "sp", "densities": {"2.weight": 1e-6}, "init_std": 0.2}
    done = run(tree(tmp_path, parameterization=rare))
    checkpoint = load_latest(done.folder.checkpoints)
    assert checkpoint is not None and checkpoint.served["2.weight"].shape == (1,)
    assert done.model().get_parameter("2.weight").count_nonzero() == 1 and not done.rounds[-1]["failures"]


def test_a_model_without_a_sparse_tensor_is_packed_by_doing_nothing() -> None:
    dense = from_dict({"parameterization": {"name": "smupar", "density": 1.0, "base_width": 16}})
    packing = packing_of(Workload(dense).make_model())
    tensors = {"2.weight": torch.ones(2, 2)}
    assert (
        not packing.masks
        and packing.whole(tensors) is tensors
        and packing.packed(tensors)["2.weight"] is tensors["2.weight"]
    )


# Clients that train a part of the model

LISA = {"name": "lisa", "blocks": "0,2,4", "num_sampled_layers": 1, "period": 3}  # all but the head, "6"


def in_parts(root: Path, row: str = "feddyn", *, rounds: int = 6, **lisa: Any) -> dict[str, Any]:
    """Six rounds of two of the clients, each with one of three layers."""
    client = {"local_steps": 3, "lr": 0.01, "weight_decay": 0.1, "optimizer": {**LISA, **lisa}}
    return tree(root, row, client=client, rounds=rounds, server={"cohort_size": 2})


@pytest.mark.needs("partial")
@pytest.mark.parametrize("row", [row for row in OURS if row != "scaffold"])
def test_parts_of_a_sparse_model_give_the_run_with_whole_tensors(
    row: str, whole_on_the_wire: Callable[[], None], tmp_path: Path
) -> None:
    packed = run(in_parts(tmp_path, row))
    whole_on_the_wire()
    dense = run(in_parts(tmp_path, row))
    same_figures(packed, dense)
    one, other = (load_file(done.path / "model.safetensors") for done in (packed, dense))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    made = parameterized(Workload(packed.config).make_model())
    assert made is not None and not any(one[name][~mask.is_present].any() for name, mask in made.masks.items())


@pytest.mark.needs("partial")
def test_bytes_up_of_a_part_are_those_of_its_rows(tmp_path: Path) -> None:
    """One layer besides the head, or all four where all are drawn."""
    done = run(in_parts(tmp_path, draws="per_round"))
    checkpoint = load_latest(done.folder.checkpoints)
    assert checkpoint is not None
    layers: dict[str, int] = {}
    for name, tensor in checkpoint.served.items():
        layers[name.partition(".")[0]] = layers.get(name.partition(".")[0], 0) + tensor.nbytes
    possible = {2 * (layers["6"] + size) for layer, size in layers.items() if layer != "6"}
    assert len(possible) == 3 and {line["bytes_up"] for line in done.rounds} <= possible
    assert done.rounds[0]["bytes_down"] == 2 * sum(layers.values()) > done.rounds[-1]["bytes_down"]
    everything = run(in_parts(tmp_path, num_sampled_layers=3, rounds=1))
    assert everything.rounds[0]["bytes_up"] == 2 * sum(layers.values())


@pytest.mark.needs("partial")
def test_with_all_layers_drawn_lisa_is_adamw_with_the_rates_of_the_parameterization(tmp_path: Path) -> None:
    asked = in_parts(tmp_path, num_sampled_layers=3)
    with_adamw = {**asked, "client": {**asked["client"], "optimizer": {"name": "adamw"}}}
    one, other = run(asked), run(with_adamw)
    assert all(
        torch.equal(tensor, other.model().state_dict()[name]) for name, tensor in one.model().state_dict().items()
    )
    workload = Workload(one.config)
    optimizer = make_optimizer(workload, workload.make_model(), round=1)
    assert sorted({group["lr"] for group in optimizer.param_groups}) == pytest.approx(
        [0.01, 0.04]
    )  # 1 and 1 / (m_d m_rho)


@pytest.mark.needs("partial")
def test_parts_of_a_sparse_model_over_messages_and_resumed(tmp_path: Path) -> None:
    asked = in_parts(tmp_path)
    reference = run(asked)
    folder, half = over_flowers_transport(tmp_path, asked), run({**asked, "rounds": 3})
    assert (folder.path / "rounds.jsonl").read_text() == lines(reference) == lines(run({"rounds": 6}, resume=half.path))
    received = sum(path.stat().st_size for path in (folder.path / "clients" / "received").glob("*.safetensors"))
    dense, there, whole = sizes(reference)
    assert dense + there < received < dense + there + 8 * 200 < dense + whole + 8 * 80  # a header for each of 8 files


# Clients trained as one stack


@pytest.mark.needs("cohort")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("row", [name for name in OURS if name != "scaffold"])
def test_sparse_clients_in_a_stack_give_the_figures_of_one_after_another(
    row: str, optimizer: str, tmp_path: Path
) -> None:
    """smupar has forward multipliers here and three different rates, so that models are mapped and groups divided."""
    compare_paths(tmp_path, row, {"name": "smupar", "base_width": 8, "density": DENSITY, "init_std": 0.2}, optimizer)


@pytest.mark.needs("cohort")
@pytest.mark.parametrize("row", OURS)
def test_a_chain_with_gradients_by_hand_is_masked_too(row: str, tmp_path: Path) -> None:
    compare_paths(tmp_path, row, {"name": "sp", "density": DENSITY, "init_std": 0.2}, "sgd")


def compare_paths(root: Path, row: str, scheme: Mapping[str, Any], optimizer: str) -> None:
    done = {}
    for path in ("sequential", "cohort"):
        client = {"local_steps": 3, "lr": 0.01, "weight_decay": 0.1, "clip_norm": 1.0, "path": path}
        client["optimizer"] = {"name": optimizer}
        done[path] = run(tree(root, row, parameterization=dict(scheme), client=client))
        assert done[path].config.client.path == path
    one, other = done["sequential"], done["cohort"]
    for line, its in zip(one.rounds, other.rounds, strict=True):
        assert (line["bytes_up"], line["bytes_down"]) == (its["bytes_up"], its["bytes_down"])
        assert not its["failures"] and line["loss"] == pytest.approx(its["loss"], rel=1e-4)
    own, theirs = one.model().state_dict(), other.model().state_dict()
    made = parameterized(Workload(one.config).make_model())
    assert made is not None
    for name, tensor in own.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-3, atol=1e-5)
        assert name not in made.masks or not theirs[name][~made.masks[name].is_present].any()
