"""Kill -9 at random moments, resume, and compare with an undisturbed run.

Runs are forked from a warm process that has imported everything, including this file (see `serve`), because starting an
interpreter takes longer than a run.  There, every operation that writes to disk or computes is wrapped. It is announced
with the operations that it is part of ("write a checkpoint > rename a folder"), and executed once the test has
acknowledged it.  The test thus knows what the run is about to do, and can kill it right there while it waits, or
a moment later, within the announced operation or in the code after it.

Disturbed and undisturbed runs come from two warm processes with different string hashes, and each run scrambles the
global random generators first: results that depend on these differ between runs, as between interpreters.
"""

import functools
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from clients.state.cache import StateCache
from clients.state.database import StateDatabase
from clients.trainer import SequentialTrainer
from fedsign.capabilities import CAPABILITIES
from fedsign.config import from_dict
from fedsign.records import Tensors
from fedsign.storage import checkpoints, results
from fedsign.storage.finding import find_runs
from fedsign.storage.results import RunFolder
from fedsign.workload import Workload
from simulations import load_run, run
from tests.e2e.checkpoints import files_of

STRATEGIES = ("fedavg", "feddyn", "fedsign")
STACKS = "feddyn in stacks"  # the clients of a round as two stacks of tensors
SPILLING = "feddyn, spilling"  # two clients' states fit in memory
PRIVATE = "fedavg, private"  # its noise comes from a secret that is given
NEEDS = {STACKS: "cohort", PRIVATE: "privacy"}
EXPERIMENTS = [
    name for name in (*STRATEGIES, STACKS, SPILLING, PRIVATE) if name not in NEEDS or NEEDS[name] in CAPABILITIES
]
NUM_KILLS = 20
ROUNDS = 8
LONGEST_DELAY_S = 0.003
GO_ON, RUN_FREE = b" ", b"\t"  # what a run waits for; blanks, so that one it did not live to read does no harm
LIMIT_S = 120  # for one run, which takes one or two

# Kills take turns, each at a random moment of its phase; 7, 3 strategies and 2 ways to strike have no common divisor.
FOLDER, TRAINING, STATE = "make the run's folder", "train a client", "write a client's state"
COMMIT = "keep the clients' states"
CHECKPOINT, RENAME, EARLY, ANY = "write a checkpoint", "rename", "before the first checkpoint", "any moment"
FINISHED = "finished"  # the last announcement
PHASES = (FOLDER, TRAINING, STATE, CHECKPOINT, RENAME, EARLY, ANY)
# What a killed run may leave behind.
NO_RUN, NO_CHECKPOINT, CHECKPOINTS = "no run yet", "a run without a checkpoint", "a run with checkpoints"
PARTIAL = "something half written"


class Runs:
    """Runs forked from one warm process, one at a time."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdin is not None and process.stdout is not None
        self._requests: IO[bytes] = process.stdin
        self._announcements: IO[bytes] = process.stdout
        assert self._read() == "ready"

    def run_to_end(self, root: Path, strategy: str, resume: Path | None = None) -> list[str]:
        """Let a run go to its end; returns what it announced."""
        self._start(root, strategy, resume)
        announced = []
        for line in self._to_end():
            announced.append(line)
            self._go_on()
        assert announced[-2:] == [FINISHED, "ended 0"], "\n".join(map(_readable, announced[-3:]))
        return announced[:-1]

    def kill(
        self, root: Path, strategy: str, resume: Path | None = None, *, moment: int, delay_s: float | None = None
    ) -> tuple[str, str]:
        """Let `moment` announcements go by and kill at the next one.

        Returns:
            What that was, and where it struck: "before" it, or, if it was to run freely for `delay_s`, "in" what
            it had announced last by then.
        """
        pid = self._start(root, strategy, resume)
        what = self._next()
        for _ in range(moment):
            self._go_on()
            what = self._next()
        if delay_s is not None:
            self._requests.write(RUN_FREE)
            time.sleep(delay_s)
        os.kill(pid, signal.SIGKILL)
        *later, ended = self._to_end()
        assert ended == f"ended {-signal.SIGKILL}"
        return what, f"before {what}" if delay_s is None else f"in     {[what, *later][-1]}"

    def _start(self, root: Path, strategy: str, resume: Path | None) -> int:
        job = {"root": str(root), "strategy": strategy, "resume": resume and str(resume)}
        self._requests.write(json.dumps(job).encode() + b"\n")
        return int(self._read().removeprefix("pid "))

    def _next(self) -> str:
        line = self._read()
        assert not line.startswith("ended"), f"the run {line} before it was to be killed"
        return line

    def _to_end(self) -> Iterator[str]:
        line = ""
        while not line.startswith("ended"):
            line = self._read()
            yield line

    def _go_on(self) -> None:
        self._requests.write(GO_ON)

    def _read(self) -> str:
        line = self._announcements.readline().decode()
        assert line, "the warm process is gone"
        return line.rstrip("\n")


@contextmanager
def warm(hash_seed: int) -> Iterator[Runs]:
    # -P: the folder of this file holds no modules for the program to import.
    environment = {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONHASHSEED": str(hash_seed),
        "OMP_NUM_THREADS": "1",  # a process with threads cannot be forked safely
        "OPENBLAS_NUM_THREADS": "1",
        "JE_ARROW_MALLOC_CONF": "background_thread:false",  # scikit-learn imports pyarrow through pandas
    }
    with subprocess.Popen(
        [sys.executable, "-P", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        env=os.environ | environment,
    ) as process:
        yield Runs(process)


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    with warm(hash_seed=1) as process:
        yield process


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, str], list[str]]]:
    """Traces and announcements of a run that nobody kills, for each strategy."""
    found = {}
    with warm(hash_seed=2) as process:
        for strategy in EXPERIMENTS:
            root = tmp_path_factory.mktemp(strategy)
            announced = process.run_to_end(root, strategy)
            found[strategy] = traces(only_run(root)), announced
    return found


def only_run(root: Path) -> Path:
    (folder,) = find_runs(root)
    return folder.path


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _digest_of_state(state: Tensors | None) -> str:
    assert state, "a state that the server counts on is not on disk"
    return hashlib.sha256(save(state)).hexdigest()


def traces(run: Path) -> dict[str, str]:
    """What must not depend on being killed: the final model, the lines, the committed client states."""
    checkpoint = checkpoints.load_latest(run / "checkpoints")
    assert checkpoint is not None and checkpoint.round == ROUNDS
    assert load_run(run).outcome == {"status": "finished"} and load_run(run).folder.environment
    assert not [*run.glob("*.partial"), *run.glob("checkpoints/*.partial")]
    database = StateDatabase(run / "clients")
    states = {
        f"client {partition}": _digest_of_state(database.read(partition, version))
        for partition, version in checkpoint.client_versions.items()
    }
    database.close()
    return {
        "partition": digest(run / "partition.json"),
        "lines": digest(run / "rounds.jsonl"),
        "model": digest(run / "model.safetensors"),
        **files_of(run / "checkpoints" / f"round-{ROUNDS:06d}"),
        **states,
    }


def moments_of(phase: str, announced: list[str]) -> list[int]:
    """The moments that belong to a phase; when it has finished there is nothing left to kill."""
    if phase == ANY:
        return list(range(announced.index(FINISHED)))
    if phase == EARLY:
        return list(range(announced.index(TRAINING), announced.index(CHECKPOINT)))
    return [index for index, what in enumerate(announced) if _belongs(what, phase)]


def _belongs(what: str, phase: str) -> bool:
    return any(part.startswith(phase) for part in what.split(" > "))


def finish(runs: Runs, root: Path, strategy: str) -> dict[str, str]:
    """Resume what was killed, or start afresh beside what is no run yet; returns the traces."""
    runs.run_to_end(root, strategy, resume=only_run(root) if find_runs(root) else None)
    return traces(only_run(root))


@pytest.mark.slow
def test_a_run_killed_at_random_moments_resumes_to_the_same_bits(
    runs: Runs,
    undisturbed: dict[str, tuple[dict[str, str], list[str]]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rng = np.random.default_rng(20261121)
    struck: list[tuple[str, str]] = []  # strategy, where
    seen: Counter[str] = Counter()  # what it left behind
    for kill in range(NUM_KILLS):
        phase = PHASES[kill % len(PHASES)]
        strategy = "feddyn" if phase == STATE else STRATEGIES[kill % len(STRATEGIES)]  # the others keep none
        expected, announced = undisturbed[strategy]
        moment = int(rng.choice(moments_of(phase, announced)))
        delay_s = LONGEST_DELAY_S * rng.random() ** 2 if kill % 2 else None
        root = tmp_path / str(kill)
        root.mkdir()
        what, where = runs.kill(root, strategy, moment=moment, delay_s=delay_s)
        assert what == announced[moment]  # runs take the same steps, so `where` is exact
        struck.append((strategy, where))
        seen.update(_left_behind(root, where))
        assert finish(runs, root, strategy) == expected, f"kill {kill}: {strategy} {where} (moment {moment})"
        shutil.rmtree(root)
    with capsys.disabled():
        print("\n  killed:", *(f"{strategy:8}{where}" for strategy, where in struck), sep="\n    ")
        print("  left behind:", ", ".join(f"{what} x{count}" for what, count in sorted(seen.items())))
    places = [where.split(maxsplit=1)[1] for _, where in struck]
    for phase in (FOLDER, TRAINING, STATE, CHECKPOINT, RENAME):  # not vacuous
        assert any(_belongs(place, phase) for place in places), f"never struck: {phase}"
    assert any(where.startswith("in ") for _, where in struck)
    assert len(set(places)) > NUM_KILLS // 2
    assert seen.keys() == {NO_RUN, NO_CHECKPOINT, CHECKPOINTS, PARTIAL}


def _left_behind(root: Path, where: str) -> Iterator[str]:
    """What a killed run looks like from the outside: unfinished, unless it was just writing that it has finished."""
    for left in find_runs(root):
        assert left.outcome["status"] == "unfinished" or "outcome.json" in where or FINISHED in where
    if list(root.rglob("*.partial")):
        yield PARTIAL
    if not find_runs(root):
        yield NO_RUN
    elif checkpoints.rounds_on_disk(only_run(root) / "checkpoints"):
        yield CHECKPOINTS
    else:
        yield NO_CHECKPOINT


@pytest.mark.slow
def test_a_run_killed_between_the_files_of_its_folder_is_no_run_yet_or_resumes_to_the_same_bits(
    runs: Runs, undisturbed: dict[str, tuple[dict[str, str], list[str]]], tmp_path: Path
) -> None:
    expected, announced = undisturbed["fedavg"]
    renames = [moment for moment in moments_of(FOLDER, announced) if announced[moment].endswith("rename a file")]
    assert len(renames) >= 3  # environment, partition, configuration
    found = []
    for moment in renames:
        root = tmp_path / str(moment)
        root.mkdir()
        runs.kill(root, "fedavg", moment=moment + 1)
        found.append(bool(find_runs(root)))
        assert finish(runs, root, "fedavg") == expected
    assert found == [False] * (len(renames) - 1) + [True]


@pytest.mark.slow
@pytest.mark.parametrize(
    "step",
    ["rename a folder", "remove an old checkpoint", "remove an old checkpoint > remove a file", "rename a file"],
)
def test_a_run_killed_at_the_second_last_rename_or_removal_resumes_to_the_same_bits(
    runs: Runs, undisturbed: dict[str, tuple[dict[str, str], list[str]]], tmp_path: Path, step: str
) -> None:
    expected, announced = undisturbed["feddyn"]
    moments = [index for index, what in enumerate(announced) if what.endswith(step)]
    runs.kill(tmp_path, "feddyn", moment=moments[-2])
    assert load_run(only_run(tmp_path)).outcome == {"status": "unfinished"}
    assert finish(runs, tmp_path, "feddyn") == expected


@pytest.mark.needs("cohort")
@pytest.mark.slow
@pytest.mark.parametrize("phase", [TRAINING, STATE, CHECKPOINT])
def test_a_run_of_stacks_that_is_killed_resumes_to_the_same_bits(
    runs: Runs, undisturbed: dict[str, tuple[dict[str, str], list[str]]], tmp_path: Path, phase: str
) -> None:
    expected, announced = undisturbed[STACKS]
    started = announced.index(FOLDER)  # after the rehearsal, which trains one by one
    assert announced[started:].count(TRAINING) == 2 * ROUNDS  # three clients, two a stack
    moments = moments_of(phase, announced)
    runs.kill(tmp_path, STACKS, moment=moments[2 * len(moments) // 3])
    assert load_run(only_run(tmp_path)).outcome == {"status": "unfinished"}
    assert finish(runs, tmp_path, STACKS) == expected


@pytest.mark.needs("privacy")
@pytest.mark.slow
@pytest.mark.parametrize("step", [TRAINING, "force to disk", "evaluate", "append to rounds.jsonl", CHECKPOINT])
def test_a_private_run_that_is_killed_resumes_to_the_same_bits_and_the_same_budget(
    runs: Runs, undisturbed: dict[str, tuple[dict[str, str], list[str]]], tmp_path: Path, step: str
) -> None:
    """The clipping norm and epsilon stand in the lines; rounds that were run before are the same releases."""
    expected, announced = undisturbed[PRIVATE]
    moments = [index for index, what in enumerate(announced) if what == step]
    for place, moment in (("early", moments[1]), ("late", moments[2 * len(moments) // 3])):
        root = tmp_path / place
        root.mkdir()
        runs.kill(root, PRIVATE, moment=moment)
        assert finish(runs, root, PRIVATE) == expected
        releases = [json.loads(line) for line in (only_run(root) / "privacy.jsonl").read_text().splitlines()]
        assert len({(line["round"], line["released"]["model"]) for line in releases}) == ROUNDS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "step"),
    [
        ("feddyn", STATE),
        ("feddyn", "end the transaction"),
        (SPILLING, STATE),
        (SPILLING, "end the transaction"),
        (SPILLING, f"{CHECKPOINT} > rename"),
        (SPILLING, "remove old states"),
    ],
)
def test_a_run_killed_around_the_moment_that_its_clients_states_reach_the_disk_resumes_to_the_same_bits(
    runs: Runs, undisturbed: dict[str, tuple[dict[str, str], list[str]]], tmp_path: Path, strategy: str, step: str
) -> None:
    expected, announced = undisturbed[strategy]
    spilled = [what for what in announced if _belongs(what, STATE) and not _belongs(what, COMMIT)]
    assert bool(spilled) == (strategy == SPILLING)
    moments = [moment for moment, what in enumerate(announced) if f" > {step}" in f" > {what}"]
    struck, _ = runs.kill(tmp_path, strategy, moment=moments[len(moments) // 2])
    assert struck == announced[moments[len(moments) // 2]]
    assert finish(runs, tmp_path, strategy) == expected


@pytest.mark.slow
def test_a_run_killed_again_and_again_resumes_to_the_same_bits(
    runs: Runs, undisturbed: dict[str, tuple[dict[str, str], list[str]]], tmp_path: Path
) -> None:
    expected, announced = undisturbed["feddyn"]
    resume = None
    for moment in (len(announced) // 2, 25, len(announced) // 4, 5):
        runs.kill(tmp_path, "feddyn", resume, moment=moment)
        resume = only_run(tmp_path)
    assert finish(runs, tmp_path, "feddyn") == expected


# ---- The warm process.


def serve() -> None:
    """Fork a run for each line on stdin; one at a time, so that it can have stdin and stdout for itself."""
    torch.set_num_threads(1)
    _warm_up()
    requests = os.fdopen(0, "rb", buffering=0, closefd=False)
    os.write(1, b"ready\n")
    while (job := requests.readline()).strip():
        assert len(list(Path("/proc/self/task").glob("*"))) <= 1, "a process with threads cannot be forked safely"
        pid = os.fork()
        if pid == 0:
            os._exit(_run(**json.loads(job)))
        _, status = os.waitpid(pid, 0)
        os.write(1, f"ended {os.waitstatus_to_exitcode(status)}\n".encode())


def _warm_up() -> None:
    """Import what a run would import on its way; no training, since autograd may start threads."""
    for strategy in EXPERIMENTS:
        config = from_dict(_experiment(Path(), strategy))
        workload = Workload(config)
        config.engine.build(), config.strategy.build(), workload.label_counts()
    model = workload.make_model()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    config.client.optimizer.build(model.parameters(), 0.1, 0.0).step()  # the first step imports torch's compiler


def _run(root: str, strategy: str, resume: str | None) -> int:
    """The forked run.  Its stdin and stdout are moved, so that the program's own output does no harm."""
    signal.alarm(LIMIT_S)
    answers, announcements = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    random.seed()
    np.random.seed()  # noqa: NPY002 - the global one, on purpose
    torch.seed()
    os.write(announcements, f"pid {os.getpid()}\n".encode())

    answer = GO_ON

    def announce(what: str, *, last: bool = False) -> None:
        nonlocal answer
        os.write(announcements, what.encode() + b"\n")
        if answer == GO_ON or last:  # it never ends by itself, so that the test always finds it alive
            answer = os.read(answers, 1)
        if not answer:
            os._exit(1)  # the test is gone

    _wrap(announce)
    try:
        if resume:
            run(resume=resume)
        else:
            run(_experiment(Path(root), strategy))
    except Exception:  # noqa: BLE001 - told to the test, whatever it is
        announce(json.dumps(traceback.format_exc()), last=True)
        return 1
    announce(FINISHED, last=True)
    return 0


def _experiment(root: Path, strategy: str) -> dict[str, Any]:
    if strategy == STACKS:
        in_stacks = {
            "client": {"local_epochs": 1, "path": "cohort", "chunk": 2},
            "model": {"name": "mlp", "hidden": [8]},
        }
        return _experiment(root, "feddyn") | in_stacks
    if strategy == PRIVATE:
        secret = root / "secret"
        if root.is_absolute():
            secret.write_bytes(bytes(range(32)))
        privacy = {"name": "central_adaptive", "noise_multiplier": 1.0, "delta": 0.01, "secret_file": str(secret)}
        return _experiment(root, "fedavg") | {"privacy": privacy, "model": {"name": "mlp", "hidden": [8]}}
    if strategy == SPILLING:
        return _experiment(root, "feddyn") | {"client": {"local_epochs": 1, "state_cache_mib": 0.03}}
    return {
        "rounds": ROUNDS,
        "callbacks": [],
        "strategy": {"name": strategy},
        "partition": {"num_clients": 8, "alpha": 1.0},
        "server": {"cohort_size": 3},
        "client": {"local_epochs": 1},
        "model": {"name": "cnn", "channels": [4, 4]},
        "results": {"root": str(root), "checkpoint_every": 2, "keep_checkpoints": 2},
    }


def _wrap(announce: Callable[[str], None]) -> None:
    """Announce whatever touches the disk or computes; apart from that the program is the one users run."""
    going_on: list[str] = []  # what was announced and is not done, outermost first

    def wrap(owner: Any, name: str, label: str | Callable[..., str]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            going_on.append(label if isinstance(label, str) else label(*args))
            try:
                announce(" > ".join(going_on))
                return original(*args, **kwargs)
            finally:
                going_on.pop()

        setattr(owner, name, wrapped)

    wrap(results, "create", FOLDER)
    wrap(SequentialTrainer, "train", TRAINING)
    if "cohort" in CAPABILITIES:
        from clients.cohort.trainer import CohortTrainer

        wrap(CohortTrainer, "_train_stack", TRAINING)
    wrap(StateCache, "load", "load a client's state")
    wrap(StateCache, "save", "save a client's state")
    wrap(StateCache, "commit", COMMIT)
    wrap(StateDatabase, "_open", "open the states' file")
    wrap(StateDatabase, "write", STATE)
    wrap(StateDatabase, "remove", "remove old states")
    wrap(StateDatabase, "commit", "end the transaction")
    wrap(StateDatabase, "close", "close the states' file")
    wrap(Workload, "evaluate", "evaluate")
    wrap(RunFolder, "append", lambda folder, name, *_: f"append to {name}")
    wrap(RunFolder, "write_json", lambda folder, name, *_: f"write {name}")
    wrap(RunFolder, "rewind", "rewind")
    wrap(checkpoints, "save", CHECKPOINT)
    wrap(checkpoints, "save_model", "write the model")
    wrap(checkpoints, "save_tensors", "write tensors")
    wrap(checkpoints, "_remove", "remove an old checkpoint")
    wrap(Path, "write_text", "write text")
    # pathlib and shutil look these up here each time, so that this covers Path.mkdir, Path.unlink ... too.
    wrap(os, "mkdir", "make a folder")
    wrap(os, "fsync", "force to disk")
    wrap(os, "replace", "rename a file")
    wrap(os, "rename", lambda old, *_: "rename a folder" if Path(old).is_dir() else "rename a file")
    wrap(os, "unlink", "remove a file")
    wrap(os, "rmdir", "remove a folder")
    wrap(shutil, "rmtree", "remove a tree")


def _readable(line: str) -> str:
    """A traceback came as one line."""
    return str(json.loads(line)) if line.startswith('"') else line


if __name__ == "__main__":
    serve()
