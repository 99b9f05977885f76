"""[attack]: who is malicious, what they send, and that it is the same on every engine."""

from pathlib import Path
from typing import Any

import pytest
import torch

from clients.robustness.attack import Attack, malicious
from clients.robustness.faults import DROPPED
from clients.robustness.section import AttackPart
from fedsign.errors import ConfigError
from fedsign.records import ObjectiveSpec, Role, Tensors, TrainReply, TrainRequest
from fedsign.storage.checkpoints import load_latest
from fedsign.workload import Workload
from simulations import Run, run
from tests.contract.test_exchange import OURS, tree
from tests.contract.test_strategies import lines

SERVED: Tensors = {"w": torch.tensor([1.0, -2.0]), "mean": torch.tensor([0.5])}


def attack(name: str, **settings: Any) -> Attack:
    return Attack(AttackPart(name=name, fraction=0.5, **settings), seed=0, num_clients=10)


def sent(middleware: Attack) -> TrainReply:
    """What becomes of the update (2, 3), with (1, 1) besides."""
    request = TrainRequest(
        round=1,
        partition=0,
        tensors=SERVED,
        objective=ObjectiveSpec(),
        state_version=0,
        needed_versions=frozenset(),
    )
    reply = TrainReply(
        round=1,
        partition=0,
        tensors={"w": SERVED["w"] + torch.tensor([2.0, 3.0]), "mean": torch.tensor([4.0])},
        roles={"w": Role.PARAMETER, "mean": Role.BUFFER},
        num_examples=3,
        metrics={},
        extra={"w": torch.ones(2)},
    )
    found = middleware.after(request, reply)
    assert isinstance(found, TrainReply)
    return found


@pytest.mark.parametrize(("name", "factor"), [("sign_flip", -2.0), ("scale", 2.0)])
def test_a_malicious_client_sends_a_multiple_of_its_update_and_buffers_as_they_are(name: str, factor: float) -> None:
    found = sent(attack(name, strength=2.0))
    assert torch.equal(found.tensors["w"], SERVED["w"] + factor * torch.tensor([2.0, 3.0]))
    assert torch.equal(found.extra["w"], factor * torch.ones(2))
    assert torch.equal(found.tensors["mean"], torch.tensor([4.0]))


def only_zeros(update: Tensors) -> Tensors:
    return {name: torch.zeros_like(tensor) for name, tensor in update.items()}


def lazy() -> Any:
    """An attack of the user's own."""
    return only_zeros


def test_an_attack_of_ones_own_is_a_function_of_the_update() -> None:
    found = sent(attack(f"{__name__}:lazy"))
    assert torch.equal(found.tensors["w"], SERVED["w"]) and torch.equal(found.extra["w"], torch.zeros(2))


def test_who_is_malicious_is_a_share_of_the_population_fixed_by_the_seed() -> None:
    def chosen(fraction: float, *, seed: int = 0) -> frozenset[int]:
        return malicious(AttackPart(name="scale", fraction=fraction), seed=seed, num_clients=50)

    assert [len(chosen(fraction)) for fraction in (0.0, 0.1, 0.5, 1.0)] == [0, 5, 25, 50]
    assert chosen(0.1) < chosen(0.5) < chosen(1.0) == frozenset(range(50))
    assert chosen(0.5) == chosen(0.5) != chosen(0.5, seed=1)
    assert not malicious(AttackPart(fraction=1.0), seed=0, num_clients=50)


def attacked(root: Path, strategy: str, **changes: Any) -> Run:
    return run(tree(root, strategy, **{"attack": {"name": "sign_flip", "fraction": 0.5, "strength": 2.0}, **changes}))


@pytest.mark.parametrize("name", [*OURS, "flower_krum"])
def test_an_attack_is_the_same_over_messages(name: str, tmp_path: Path) -> None:
    done = attacked(tmp_path, name, partition={"num_clients": 9, "alpha": 1.0})
    assert [line["malicious"] for line in done.rounds] == [
        len(malicious(done.config.attack, seed=0, num_clients=9).intersection(line["clients"])) for line in done.rounds
    ]
    if name in OURS:
        spoken = attacked(
            tmp_path, f"tests.contract.test_exchange:{name}_by_messages", partition={"num_clients": 9, "alpha": 1.0}
        )
        assert lines(done) == lines(spoken)
    assert lines(done) != lines(run(tree(tmp_path, name, partition={"num_clients": 9, "alpha": 1.0})))


def test_an_attack_by_everybody_turns_the_first_round_round(tmp_path: Path) -> None:
    """All flip: the mean update is the negative of the one without an attack."""
    everybody = {"name": "sign_flip", "fraction": 1.0}
    plain, flipped = run(tree(tmp_path, "fedavg", rounds=1)), attacked(tmp_path, "fedavg", rounds=1, attack=everybody)
    initial = Workload(plain.config).make_model().state_dict()
    ends = [load_latest(done.folder.checkpoints) for done in (plain, flipped)]
    for name, tensor in initial.items():
        there, back = (end.served[name] - tensor for end in ends if end is not None)
        torch.testing.assert_close(back, -there, rtol=1e-4, atol=1e-6)
    assert flipped.rounds[0]["malicious"] == 3


@pytest.mark.needs("cohort")
def test_stacks_are_attacked_like_single_replies(tmp_path: Path) -> None:
    one, stacked = (
        attacked(tmp_path, "fedavg", client={"local_steps": 3, "path": path}) for path in ("sequential", "cohort")
    )
    for line, other in zip(one.rounds, stacked.rounds, strict=True):
        assert line["malicious"] == other["malicious"]
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-4)


def test_a_malicious_client_fails_like_any_other(tmp_path: Path) -> None:
    done = attacked(tmp_path, "fedavg", faults={"drop_rate": 0.4}, server={"cohort_size": 6})
    plain = run(tree(tmp_path, "fedavg", faults={"drop_rate": 0.4}, server={"cohort_size": 6}))
    failed = [[failure["client"] for failure in line["failures"]] for line in done.rounds]
    assert failed == [[failure["client"] for failure in line["failures"]] for line in plain.rounds]
    assert any(failed)
    assert all(failure["reason"] == DROPPED for line in done.rounds for failure in line["failures"])


@pytest.mark.needs("privacy")
def test_a_malicious_client_holds_to_no_privacy_of_its_own(tmp_path: Path) -> None:
    """With everybody malicious, local privacy changes nothing but what is written of it."""
    everybody = {"name": "scale", "fraction": 1.0, "strength": 1.0}
    local = {"name": "local", "clip_norm": 0.1, "noise_multiplier": 1.0, "delta": 0.01}
    private, plain = (
        attacked(tmp_path, "fedavg", attack=everybody, privacy=local),
        attacked(tmp_path, "fedavg", attack=everybody),
    )
    assert [line["loss"] for line in private.rounds] == [line["loss"] for line in plain.rounds]


def test_a_fraction_is_at_most_one_and_an_attack_is_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"attack\.fraction=1\.5 was given, but expected less than or equal to 1"):
        attacked(tmp_path, "fedavg", attack={"name": "scale", "fraction": 1.5})
    with pytest.raises(ConfigError, match="attack 'sign' is not known"):
        attacked(tmp_path, "fedavg", attack={"name": "sign"})
