"""User mistakes: one clear sentence with a remedy, exit code 2, never a traceback."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.e2e.command import fedsign, settings

SMALL = settings(
    rounds=6,
    partition__num_clients=4,
    partition__alpha=1.0,
    server__cohort_size=2,
    client__local_epochs=1,
    callbacks=[],
)

FAILING_CLIENT = '''
from fedsign.objectives.base import Objective
from fedsign.records import ObjectiveSpec
from strategies.base import Strategy


class Raises(Objective):
    """Fails in the first batch of every client."""

    def penalty(self, parameters, context):
        raise ZeroDivisionError("the loss of client data went wrong")


class Failing(Strategy):
    def __init__(self, *, from_round: int = 1) -> None:
        super().__init__()
        self.from_round = from_round

    def objective(self, round):
        return ObjectiveSpec(name="failing:Raises") if round >= self.from_round else ObjectiveSpec()


class Nan(Objective):
    """Client models become NaN, silently."""

    def penalty(self, parameters, context):
        return sum(theta.sum() for theta in parameters.values()) * float("nan")


class Diverging(Strategy):
    def objective(self, round):
        return ObjectiveSpec(name="failing:Nan")
'''


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (settings(client__learning_rte=0.1), ["unknown key 'client.learning_rte'", "Did you mean 'lr'?"]),
        (settings(strategy__weigting=1), ["unknown key 'strategy.weigting'", "Did you mean 'weighting'?"]),
        (
            settings(rouns=2, client__optimizer__momentm=0.1, strategy__weigting=1),
            [
                "unknown keys 'rouns' (Did you mean 'rounds'?), 'client.optimizer.momentm' (Did you mean 'momentum'?), "
                "'strategy.weigting' (Did you mean 'weighting'?)"
            ],
        ),
        (settings(strategy__name="fedsing"), ["strategy 'fedsing' is not known. Did you mean 'fedsign'?"]),
        (settings(strategy="fedavg"), ["strategy='fedavg'", "--set strategy.name=fedavg"]),
        (settings(lr=0.1), ["unknown key 'lr'", "Did you mean 'client.lr'?"]),
        (
            settings(partition__alpha=0),
            ["partition.alpha=0 was given", "greater than 0", "--set partition.alpha=VALUE"],
        ),
        (
            settings(partition__num_clients=2000),
            ["partition.num_clients=2000", "1437", "lower the one or the other"],
        ),
        (
            settings(data__name="mnist", data__root="/no/such/folder"),
            ["MNIST was not found", "/no/such/folder/MNIST/raw", "--set data.root=PATH"],
        ),
        (settings(server__cohort_size=51), ["server.cohort_size=51", "50 clients"]),
        (settings(engine__device="cuda:99x"), ["engine.device='cuda:99x'", "auto, cpu, cuda"]),
        (settings(results__root="/proc/nowhere"), ["results.root=/proc/nowhere cannot hold runs"]),
        (["--resume", "nowhere"], ["there is no run nowhere", "fedsign runs"]),
        (["no-such-file.toml"], ["no-such-file.toml cannot be read"]),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_a_mistake_is_one_sentence_and_exit_code_2(tmp_path: Path, given: list[str], said: list[str]) -> None:
    done = fedsign("run", *given, folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stdout + done.stderr
    for words in said:
        assert words in done.stderr
    assert not list(tmp_path.glob("runs/*/*")), "a mistake leaves no empty run behind"


def test_clients_that_raise_are_named_with_their_error(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING_CLIENT, encoding="utf-8")
    done = fedsign("run", *SMALL, *settings(strategy__name="failing:Failing", strategy__from_round=3), folder=tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    error = done.stderr.splitlines()[-1]
    assert "round 3 ended with 0 usable replies of 2" in error
    assert "ZeroDivisionError: the loss of client data went wrong" in error
    (failures,) = tmp_path.glob("runs/*/*/failures.jsonl")
    assert "Traceback" in failures.read_text()  # in full, for whoever has to find it
    assert len((failures.parent / "rounds.jsonl").read_text().splitlines()) == 2


def test_nan_replies_are_refused_with_a_warning_that_names_the_client(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING_CLIENT, encoding="utf-8")
    done = fedsign("run", *SMALL, *settings(strategy__name="failing:Diverging"), folder=tmp_path)
    assert done.returncode == 1
    warnings = [line for line in done.stderr.splitlines() if line.startswith("warning: round 1: client ")]
    assert len(warnings) == 2
    assert all("NaN or infinite" in line for line in warnings)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
@pytest.mark.parametrize("strategy", ["fedsign", "feddyn"])
def test_a_full_disk_stops_the_run_with_a_sentence_and_it_can_be_resumed(tmp_path: Path, strategy: str) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    changes = [*SMALL, *settings(strategy__name=strategy, results__checkpoint_every=1, results__keep_checkpoints=3)]
    try:
        full = fedsign("run", *changes, *settings(results__root=disk), folder=tmp_path)
        assert full.returncode == 1
        assert "the disk is full" in full.stderr
        assert "Traceback" not in full.stderr
        (config,) = disk.glob("*/*/config.toml")
        subprocess.run(["mount", "-o", "remount,size=50m", str(disk)], check=True)
        resumed = fedsign("run", "--resume", str(config.parent), folder=tmp_path)
        assert resumed.returncode == 0, resumed.stderr
        whole = fedsign("run", *changes, *settings(results__root=tmp_path / "whole"), folder=tmp_path)
        assert whole.returncode == 0, whole.stderr
        (expected,) = (tmp_path / "whole").glob("*/*")
        for name in ("rounds.jsonl", "model.safetensors"):
            assert (config.parent / name).read_bytes() == (expected / name).read_bytes()
    finally:
        subprocess.run(["umount", str(disk)], check=False)


BROKEN = {
    "imports": ("import no_such_library\n", ["ModuleNotFoundError", "no_such_library", "mine.py:1)"]),
    "syntax": ("class Mine(:\n", ["SyntaxError", "mine.py:1)"]),
    "constructor": (
        "from strategies.base import Strategy\nclass Mine(Strategy):\n    def __init__(self):\n        1 / 0\n",
        ["ZeroDivisionError: division by zero", "mine.py:4)"],
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_an_exception_in_the_users_own_part_is_one_sentence_with_its_place(tmp_path: Path, case: str) -> None:
    source, said = BROKEN[case]
    (tmp_path / "mine.py").write_text(source, encoding="utf-8")
    done = fedsign("run", *settings(strategy__name="mine:Mine"), folder=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("Error: strategy 'mine:Mine': ")
    assert done.stderr.count("\n") == 1
    assert all(words in done.stderr for words in said), done.stderr
    assert not list(tmp_path.glob("runs/*/*"))
