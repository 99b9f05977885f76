"""Notebooks: the tutorial runs from start to end in an empty folder, and a cell can be interrupted."""

import asyncio
import math
import shutil
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedsign.companions import NAMES
from fedsign.storage.results import Record
from simulations import Run, load_run, run
from simulations.frames import to_frame

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs" / "tutorial.ipynb"


@pytest.fixture(autouse=True)
def _a_kernel_uses_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def read(path: Path) -> Any:
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    return nbformat.read(path, as_version=4)


def outputs_of(notebook: Any, start: str) -> list[Any]:
    """What the cell that begins so has left."""
    (cell,) = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.startswith(start)]
    return list(cell.outputs)


def test_the_tutorial_stands_in_the_repository_without_outputs() -> None:
    for cell in read(TUTORIAL).cells:
        assert cell.cell_type == "markdown" or (cell.outputs == [] and cell.execution_count is None)


@pytest.mark.needs("landscape")
@pytest.mark.slow
def test_the_tutorial_runs_in_an_empty_folder_and_shows_what_it_says(tmp_path: Path) -> None:
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    notebook = read(TUTORIAL)
    resources = {"metadata": {"path": str(tmp_path)}}
    asyncio.run(nbclient.NotebookClient(notebook, timeout=300, resources=resources).async_execute())

    progress, card = outputs_of(notebook, "import fedsign\n")
    assert "round 10/10" in progress.data["text/html"] and "left" not in progress.data["text/html"]
    assert "fedsign-card" in card.data["text/html"] and "<svg" in card.data["text/html"]
    (resumed,) = runs_of("fedavg", tmp_path / "runs" / "notebook")
    assert len(resumed.rounds) == 15
    (table,) = outputs_of(notebook, "frame = fedavg.frame")
    assert f"{resumed.rounds[-1]['accuracy']:.6f}" in table.data["text/plain"]
    (picture,) = outputs_of(notebook, "import matplotlib")
    assert "image/png" in picture.data
    progress, valley = outputs_of(notebook, "valley = ")
    assert "point " in progress.data["text/html"]
    assert valley.data["text/html"].startswith("<svg")
    (paired,) = outputs_of(notebook, "import pandas as pd")
    assert "FedSign" in paired.data["text/plain"]
    (own,) = runs_of("cautious:Cautious", tmp_path / "runs" / "notebook")
    assert len(own.rounds) == 15
    errors = [output for cell in notebook.cells for output in cell.get("outputs", ()) if output.get("name") == "stderr"]
    assert not errors


def runs_of(strategy: str, folder: Path) -> list[Run]:
    found = [load_run(path) for path in folder.iterdir()]
    return [each for each in found if tomllib.loads(each.folder.config_toml)["strategy"]["name"] == strategy]


@pytest.mark.slow
def test_an_interrupted_cell_leaves_a_run_that_the_next_cell_goes_on_with(tmp_path: Path, tiny: dict[str, Any]) -> None:
    """In a folder that has modules of the names of FedSign's packages."""
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    pytest.importorskip("jupyter_client", reason="jupyter_client is not installed")
    changes = {**tiny, "callbacks": ["progress", "report"], "rounds": 100_000}
    for name in NAMES:
        (tmp_path / f"{name}.py").touch()
    with kernel(tmp_path) as (manager, client):
        cell = client.execute(f"import fedsign\nfedsign.run({changes!r})", stop_on_error=False)
        assert wait_for(lambda: list(tmp_path.glob("runs/*/*/checkpoints/round-*")))
        manager.interrupt_kernel()
        assert answer(client, cell)["ename"] == "KeyboardInterrupt"
        (path,) = tmp_path.glob("runs/*/*")
        stopped = load_run(path)
        assert stopped.outcome["status"] == "unfinished" and (path / "report.html").exists()
        rounds = len(stopped.rounds) + 2
        cell = client.execute(f"fedsign.run({{'rounds': {rounds}}}, resume={str(path)!r})")
        assert answer(client, cell)["status"] == "ok"
    resumed = load_run(path)
    undisturbed = run({**tiny, "rounds": rounds, "results": {"root": str(tmp_path / "again")}})
    assert resumed.rounds == undisturbed.rounds and len(resumed.rounds) == rounds


class kernel:
    """A Jupyter kernel that works in a folder."""

    def __init__(self, folder: Path) -> None:
        from jupyter_client.manager import KernelManager

        self._manager, self._folder = KernelManager(kernel_name="python3"), folder

    def __enter__(self) -> tuple[Any, Any]:
        self._manager.start_kernel(cwd=str(self._folder))
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=60)
        return self._manager, self._client

    def __exit__(self, *exception: object) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        self._manager.cleanup_resources()
        self._manager.context.destroy()


def answer(client: Any, cell: str) -> Any:
    """How a cell ended."""
    while True:
        message = client.get_shell_msg(timeout=120)
        if message["parent_header"].get("msg_id") == cell:
            return message["content"]


def wait_for(look: Any, *, timeout_s: float = 120.0) -> Any:
    """What `look` finds, as soon as it finds something."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.05)
    return None


# --- rounds as a DataFrame


@pytest.fixture
def lines() -> list[Record]:
    return [
        {"round": 1, "loss": 2.0, "clients": [3, 5], "failures": [{"client": 3, "reason": "x"}], "bytes_up": 10},
        {"round": 2, "loss": None, "clients": [1, 2], "failures": [], "bytes_up": 20},
    ]


def test_a_frame_has_a_row_a_round_counts_for_lists_and_nan_for_what_diverged(lines: list[Record]) -> None:
    pytest.importorskip("pandas", reason="pandas is not installed")
    frame = to_frame(lines)
    assert frame.index.name == "round" and list(frame.index) == [1, 2]
    assert list(frame.columns) == ["loss", "clients", "failures", "bytes_up"]
    assert list(frame["clients"]) == [2, 2] and list(frame["failures"]) == [1, 0]
    assert frame["loss"][1] == 2.0 and math.isnan(frame["loss"][2])
    assert all(kind.kind in "if" for kind in frame.dtypes) and frame["bytes_up"].dtype.kind == "i"


def test_a_frames_timings_stand_beside_the_round_that_they_belong_to(lines: list[Record]) -> None:
    pytest.importorskip("pandas", reason="pandas is not installed")
    timings = [{"round": 2, "train_s": 0.5}, {"round": 1, "train_s": 0.25}]
    assert list(to_frame(lines, timings)["train_s"]) == [0.25, 0.5]


def test_a_runs_frame_is_its_lines_and_empty_before_the_first_round(tiny: dict[str, Any]) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    done = run(tiny)
    frame = done.frame(timings=True)
    assert list(frame["accuracy"]) == [line["accuracy"] for line in done.rounds]
    assert list(frame["train_s"]) == [line["train_s"] for line in done.folder.timings()]
    assert isinstance(to_frame([]), pandas.DataFrame) and to_frame([]).index.name == "round"


def test_a_run_shows_itself_with_its_figures_and_one_curve_also_when_it_has_no_rounds(tiny: dict[str, Any]) -> None:
    done = run({**tiny, "name": "a-name"})
    card = done._repr_html_()
    assert card.count('class="static"') == 1 and "<script" not in card and "a-name" in card and str(done.path) in card
    assert f"{100 * (done.final('accuracy') or 0):.1f}" in card
    shutil.rmtree(done.folder.checkpoints)
    done.folder.rewind(0)
    assert "no round was run" in done._repr_html_()
