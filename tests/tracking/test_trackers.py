"""Records sent to TensorBoard, MLflow and Weights & Biases, read back from their files."""

import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from fedsign.errors import ConfigError, RoundError
from fedsign.storage.results import Record, read_json
from simulations import Run, run
from simulations.callbacks.base import Callback
from simulations.callbacks.tracking import STATE_FILE, Earlier, Tracker, settings_of
from simulations.frames import numbers_of

ALL = ["tensorboard", "mlflow", "wandb"]
METRICS = {"accuracy", "loss", "train_loss", "clients", "num_replies", "failures", "bytes_down", "bytes_up"}
BLOCK = 32768


@pytest.fixture(autouse=True)
def _everything_stays_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith(("MLFLOW_", "WANDB_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store(tmp_path))
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_SERVICE", "")  # named here so that it is taken back: W&B leaves it behind
    monkeypatch.delenv("WANDB_SERVICE")
    yield
    library: Any = sys.modules.get("wandb")
    if library is not None:
        library.teardown()


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow store without runs, made once: its tables take seconds."""
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    folder = tmp_path_factory.mktemp("mlflow")
    mlflow.MlflowClient(store(folder)).search_experiments()
    return folder / "mlflow.db"


@pytest.fixture
def mlflow_here(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store of the test's own; its artifacts stand in the current folder."""
    shutil.copy(empty_store, tmp_path)
    monkeypatch.chdir(tmp_path)


def store(folder: Path) -> str:
    return f"sqlite:///{folder / 'mlflow.db'}"


class Raises(Callback):
    """Raises after a round."""

    def __init__(self, error: BaseException, *, after: int) -> None:
        self.error, self.after = error, after

    def on_round(self, record: Record) -> None:
        if record["round"] == self.after:
            raise self.error


# --- reading back


def scalars(done: Run) -> dict[str, list[tuple[int, float]]]:
    """TensorBoard's curves, as its own pages read them."""
    events = accumulator(done)
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def accumulator(done: Run) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(done.path / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    return events.Reload()


def session(done: Run) -> tuple[dict[str, Any], int]:
    """TensorBoard's hyper-parameters and status."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    data = {
        tag: HParamsPluginData.FromString(metadata.plugin_data.content)
        for tag, metadata in accumulator(done).summary_metadata.items()
        if metadata.plugin_data.plugin_name == "hparams"
    }
    values = data["_hparams_/session_start_info"].session_start_info.hparams
    settings = {key: getattr(value, value.WhichOneof("kind")) for key, value in values.items()}
    return settings, data["_hparams_/session_end_info"].session_end_info.status


def mlflow_run(done: Run, tmp_path: Path) -> tuple[Any, Any]:
    """MLflow's client and run."""
    from mlflow import MlflowClient

    client = MlflowClient(store(tmp_path))
    return client, client.get_run(json.loads((done.path / STATE_FILE).read_text())["mlflow"]["id"])


def wandb_records(done: Run) -> list[Any]:
    """What the offline files of Weights & Biases hold, in order of time."""
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted((done.path / "wandb").glob("offline-run-*/*.wandb"))
    return [Record.FromString(entry) for file in files for entry in log_entries(file.read_bytes())]


def log_entries(content: bytes) -> Iterator[bytes]:
    """LevelDB's log format: blocks of 32 KiB; chunks with checksum, length and kind (1: whole, 4: last of several)."""
    position, entry = 7, b""  # a header of their own
    while position + 7 <= len(content):
        if BLOCK - position % BLOCK < 7:
            position += BLOCK - position % BLOCK
            continue
        length, kind = int.from_bytes(content[position + 4 : position + 6], "little"), content[position + 6]
        if kind == 0:
            break
        entry += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield entry
            entry = b""


def wandb_history(done: Run) -> list[tuple[int, dict[str, float]]]:
    """(step, numbers) of each logged round."""
    found = []
    for record in wandb_records(done):
        if record.WhichOneof("record_type") == "history":
            items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            found.append((record.history.step.num, {key: items[key] for key in items if not key.startswith("_")}))
    return found


# --- properties of each tracker


def test_tensorboard_has_every_number_of_every_round_the_settings_and_the_end(tiny: dict[str, Any]) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    done = run({**tiny, "rounds": 3, "callbacks": ["tensorboard"]})
    curves = scalars(done)
    assert curves.keys() >= METRICS | {"final_accuracy", "final_loss"}
    for line in done.rounds:
        for name, value in numbers_of(line).items():
            assert dict(curves[name])[line["round"]] == pytest.approx(value, rel=1e-6), name
    assert curves["final_accuracy"] == [(3, pytest.approx(done.final("accuracy"), rel=1e-6))]
    settings, status = session(done)
    assert settings == settings_of(done.config)
    assert status == 1  # STATUS_SUCCESS
    texts = {
        tag: accumulator(done).Tensors(f"{tag}/text_summary")[-1].tensor_proto.string_val[0].decode()
        for tag in ("configuration", "environment", "outcome")
    }
    assert 'name = "fedavg"' in texts["configuration"]
    assert f"| git | {done.folder.environment['git']} |" in texts["environment"]
    assert "| status | finished |" in texts["outcome"]


def test_mlflow_has_every_number_of_every_round_the_settings_and_the_artifacts(
    tiny: dict[str, Any], tmp_path: Path, mlflow_here: None
) -> None:
    done = run({**tiny, "rounds": 3, "callbacks": ["mlflow", "report"]})
    client, there = mlflow_run(done, tmp_path)
    assert there.data.params == {key: str(value) for key, value in settings_of(done.config).items()}
    assert there.data.metrics.keys() >= METRICS
    for name in numbers_of(done.rounds[0]):
        history = {metric.step: metric.value for metric in client.get_metric_history(there.info.run_id, name)}
        assert history == {line["round"]: numbers_of(line)[name] for line in done.rounds}
    assert there.data.metrics["final_accuracy"] == done.final("accuracy")
    assert there.info.status == "FINISHED" and there.info.run_name == done.path.name
    assert client.get_experiment(there.info.experiment_id).name == "digits"
    assert there.data.tags["fedsign.git"] == done.folder.environment["git"]
    assert there.data.tags["fedsign.status"] == "finished"
    kept = {path.name: path for path in Path(there.info.artifact_uri.removeprefix("file://")).iterdir()}
    assert {name: path.read_bytes() for name, path in kept.items()} == {
        name: (done.path / name).read_bytes() for name in ("config.toml", "report.html")
    }


@pytest.mark.slow
def test_wandb_offline_has_every_number_of_every_round_the_settings_and_the_end(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_PROJECT", "thesis")
    done = run({**tiny, "rounds": 3, "callbacks": ["wandb"]})
    assert wandb_history(done) == [(line["round"], numbers_of(line)) for line in done.rounds]
    records = {record.WhichOneof("record_type"): record for record in wandb_records(done)}
    assert (records["run"].run.project, records["run"].run.display_name) == ("thesis", done.path.name)
    config = {item.key: json.loads(item.value_json) for item in records["run"].run.config.update}
    assert config.items() >= {**settings_of(done.config), "environment": done.folder.environment}.items()
    assert records["exit"].exit.exit_code == 0
    summary = {
        item.key or ".".join(item.nested_key): json.loads(item.value_json)
        for record in wandb_records(done)
        if record.WhichOneof("record_type") == "summary"
        for item in record.summary.update
    }
    assert summary["final_accuracy"] == done.final("accuracy") and summary["status"] == "finished"


def test_a_failed_run_is_marked_as_failed_and_its_rounds_are_there(
    tiny: dict[str, Any], tmp_path: Path, mlflow_here: None
) -> None:
    for name in ALL:
        pytest.importorskip(name, reason=f"{name} is not installed")
    with pytest.raises(RoundError):
        run({**tiny, "rounds": 5, "callbacks": ALL}, callbacks=[Raises(RoundError("no replies"), after=2)])
    (path,) = (tmp_path / "runs" / "digits-fedavg").iterdir()
    done = open_run(path)
    assert session(done)[1] == 2  # STATUS_FAILURE
    client, there = mlflow_run(done, tmp_path)
    assert (there.info.status, there.data.tags["fedsign.error"]) == ("FAILED", "no replies")
    assert len(client.get_metric_history(there.info.run_id, "loss")) == 2
    assert [record.exit.exit_code for record in wandb_records(done) if record.HasField("exit")] == [1]
    assert [step for step, _ in scalars(done)["loss"]] == [step for step, _ in wandb_history(done)] == [1, 2]


def open_run(path: Path) -> Run:
    from simulations import load_run

    return load_run(path)


# --- resuming


@pytest.mark.slow
def test_a_run_killed_behind_its_checkpoint_goes_on_in_the_same_tracker_runs_with_each_round_once(
    tiny: dict[str, Any], tmp_path: Path, mlflow_here: None
) -> None:
    for name in ALL:
        pytest.importorskip(name, reason=f"{name} is not installed")
    changes = {**tiny, "rounds": 9, "callbacks": ALL, "results": {**tiny["results"], "checkpoint_every": 5}}
    program = (
        "import json, os, signal, sys\n"
        "from simulations import run\n"
        "from simulations.callbacks.base import Callback\n"
        "class Kill(Callback):\n"
        "    def on_round(self, record):\n"
        "        if record['round'] == 7: os.kill(os.getpid(), signal.SIGKILL)\n"
        "run(json.loads(sys.argv[1]), callbacks=[Kill()])\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, json.dumps(changes)], check=False, timeout=300)
    assert killed.returncode == -signal.SIGKILL
    (path,) = (tmp_path / "runs" / "digits-fedavg").iterdir()
    before = read_json(path / STATE_FILE)
    assert {name: state["last_sent"] for name, state in before.items()} == dict.fromkeys(ALL, 7)

    done = run({"rounds": 12}, resume=path)
    after = read_json(path / STATE_FILE)
    assert {name: state["id"] for name, state in after.items()} == {n: state["id"] for n, state in before.items()}
    expected = [(line["round"], pytest.approx(line["loss"], rel=1e-6)) for line in done.rounds]
    assert len(expected) == 12
    client, there = mlflow_run(done, tmp_path)
    assert [(m.step, m.value) for m in client.get_metric_history(there.info.run_id, "loss")] == expected
    assert (there.data.params["rounds"], there.data.tags["resumed.rounds"]) == ("9", "12")
    assert scalars(done)["loss"] == expected
    assert [(step, numbers["loss"]) for step, numbers in wandb_history(done)] == expected
    assert {record.run.run_id for record in wandb_records(done) if record.HasField("run")} == {after["wandb"]["id"]}


def test_a_tracker_switched_on_when_a_finished_run_is_resumed_gets_all_rounds(tiny: dict[str, Any]) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    done = run({**tiny, "rounds": 3})
    assert not (done.path / STATE_FILE).exists()
    done = run({"callbacks": ["tensorboard"]}, resume=done.path)
    assert [step for step, _ in scalars(done)["loss"]] == [1, 2, 3]


# --- trackers that cannot be reached


def test_a_server_that_does_not_answer_costs_one_warning_and_resuming_sends_everything(
    tiny: dict[str, Any],
    tmp_path: Path,
    mlflow_here: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # the discard port: nobody listens
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with caplog.at_level(logging.WARNING, logger="fedsign"):
        done = run({**tiny, "rounds": 3, "callbacks": ["mlflow"]})
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "fedsign"]
    assert done.outcome["status"] == "finished" and len(done.rounds) == 3
    assert "MLflow failed" in warning and f"fedsign run --resume {done.path}" in warning and "\n" not in warning
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store(tmp_path))
    done = run(resume=done.path)
    client, there = mlflow_run(done, tmp_path)
    assert [metric.step for metric in client.get_metric_history(there.info.run_id, "loss")] == [1, 2, 3]


class Ledger(Tracker):
    """A tracker in memory that fails on a round as often as it is told; `rounds` are what it has."""

    name, label = "ledger", "The ledger"

    def __init__(self, *, fails_on: int = 0, times: int = 0) -> None:
        super().__init__()
        self.rounds: list[int] = []
        self.attempts: list[int] = []
        self.outcome: Record = {}
        self.fails_on, self.times = fails_on, times

    def begin(self, earlier: Earlier | None, *, last_recorded: int) -> tuple[str, int]:
        return "page 1", earlier.last_sent if earlier else 0

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        self.attempts.append(round)
        if round == self.fails_on and self.times > 0:
            self.times -= 1
            raise ConnectionError("out of ink\nand of paper")
        self.rounds.append(round)

    def end(self, outcome: Record, final: Mapping[str, float]) -> None:
        self.outcome = outcome


def test_a_tracker_that_fails_is_left_alone_until_the_end_and_then_gets_what_it_missed(
    tiny: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(fails_on=2, times=1)
    with caplog.at_level(logging.WARNING, logger="fedsign"):
        run({**tiny, "rounds": 5}, callbacks=[ledger])
    assert ledger.attempts == [1, 2, 2, 3, 4, 5]
    assert ledger.rounds == [1, 2, 3, 4, 5] and ledger.outcome == {"status": "finished"}
    failed, caught_up = [record.getMessage() for record in caplog.records]
    assert "The ledger failed (ConnectionError: out of ink)" in failed
    assert caught_up == "The ledger answers again and has all rounds now."


def test_a_tracker_that_fails_to_the_end_is_told_once_and_gets_what_it_missed_on_resume(
    tiny: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="fedsign"):
        done = run({**tiny, "rounds": 5}, callbacks=[Ledger(fails_on=3, times=9)])
    assert done.outcome["status"] == "finished" and len(caplog.records) == 1
    again = Ledger()
    run(resume=done.path, callbacks=[again])
    assert again.rounds == [3, 4, 5] and again.outcome == {"status": "finished"}


@pytest.mark.parametrize("name", ALL)
def test_a_missing_library_is_one_sentence_before_anything_is_written(
    name: str, tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # what Python itself takes for "cannot be imported"
    with pytest.raises(ConfigError, match=rf"callback '{name}' needs the package '{name}'.*'fedsign\[{name}\]'"):
        run({**tiny, "callbacks": [name]})
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_bears_a_librarys_name_is_not_taken_for_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedsign.extras import require

    (tmp_path / "not_a_library").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"not installed here: pip install 'fedsign\[some\]'"):
        require("not_a_library", extra="some", feature="this")


# --- the numbers of a line, and the settings


def test_a_value_that_was_not_finite_is_sent_as_nan_and_not_left_out() -> None:
    assert math.isnan(numbers_of({"round": 1, "loss": None})["loss"])


def test_the_flat_settings_name_every_leaf_as_set_does(tiny: dict[str, Any]) -> None:
    from fedsign.config import from_dict

    config = from_dict(tiny)
    flat = settings_of(config)
    assert (flat["partition.alpha"], flat["client.optimizer.momentum"], flat["callbacks"]) == (1.0, 0.9, "[]")
    leaves = {
        key: json.loads(value)
        if key in ("callbacks", "metrics", "model.hidden", "data.mean", "data.std", "strategy.weights")
        else value
        for key, value in flat.items()
    }
    assert config.replace(**leaves) == config
