"""A check that was stopped does not repeat its finished trainings."""

import os
import time
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import psutil
import pytest

from simulations.deployment.running import is_alive
from simulations.recipes.cells import on_all_cores
from simulations.recipes.kept import keeping, path_of, workspace
from tests.e2e.test_engines import wait_until


def training(name: str, folder: Path) -> dict[str, float]:
    """Notes that it ran; `second` fails until there is a file `go`."""
    with (folder / name).open("a") as file:
        file.write("x")
    if name == "second" and not (folder / "go").exists():
        raise ArithmeticError(name)
    return {"loss": 0.1 + 0.2, "rounds": 3}


def test_finished_trainings_are_kept_until_the_check_ends(tmp_path: Path) -> None:
    keep = tmp_path / "kept"
    jobs = {name: partial(training, name, tmp_path) for name in ("first", "second")}
    with pytest.raises(ArithmeticError), keeping(keep):
        on_all_cores({"first": jobs["first"]})
        on_all_cores(jobs)
    assert len([*keep.iterdir()]) == 1
    (tmp_path / "go").touch()
    with keeping(keep):
        found = on_all_cores(jobs)
    assert found == {name: {"loss": 0.1 + 0.2, "rounds": 3} for name in jobs}
    assert [*found] == ["first", "second"]
    assert [(tmp_path / name).read_text() for name in jobs] == ["x", "xx"]
    assert not keep.exists()


def test_trainings_on_data_that_the_check_writes_are_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A temporary folder's name would differ each time, and the digest with it."""
    monkeypatch.chdir(tmp_path)
    paths = []
    for _ in range(2):
        with pytest.raises(InterruptedError), keeping(Path("kept")), workspace() as folder:
            assert not [*folder.iterdir()]
            (folder / "train.jsonl").touch()
            paths.append(path_of(partial(training, "first", folder)))
            raise InterruptedError
    assert paths[0] is not None and paths[0] == paths[1]
    with keeping(Path("kept")):
        pass
    assert not Path("kept").exists()
    with workspace() as folder:
        assert folder.is_dir()
    assert not folder.exists()


def lasting(file: Path) -> None:
    """Writes its process id, and goes on."""
    file.write_text(str(os.getpid()))
    time.sleep(300)


@pytest.mark.slow
def test_trainings_end_with_a_command_that_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    command = get_context("spawn").Process(target=on_all_cores, args=({"lasting": partial(lasting, file)},))
    command.start()
    wait_until(lambda: file.exists() and file.read_text() != "", timeout_s=120)
    training = psutil.Process(int(file.read_text()))
    command.kill()
    command.join()
    wait_until(lambda: not is_alive(training), timeout_s=60)
