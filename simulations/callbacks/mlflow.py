"""MLflow: log to the user's tracking server, or to the library's default location.

The library's environment variables apply: MLFLOW_TRACKING_URI (by default mlflow.db in the current folder) and
MLFLOW_EXPERIMENT_NAME (by default the configuration's `name`, or the data's). Logged are parameters, metrics per
round, tags (environment, outcome), and the artifacts config.toml and report.html.
"""

import math
import os
import time
from collections.abc import Mapping
from typing import Any

from fedsign.report.page import write_report
from fedsign.storage.results import Record
from simulations.callbacks.tracking import Earlier, Tracker, settings_of

_STATES = {"finished": "FINISHED", "failed": "FAILED", "unfinished": "KILLED"}
_IN_EVERY_ROUND = "bytes_down"  # a metric that every round has and no user metric can shadow
_LONGEST_TAG = 5000
_PARAMS_A_REQUEST = 100


class MLflow(Tracker):
    """Uses its own client, so that the user's active run is left alone."""

    name = library = "mlflow"
    label = "MLflow"

    def begin(self, earlier: Earlier | None, *, last_recorded: int) -> tuple[str, int]:
        """Open or resume the run. The server knows which rounds it has; logging one again would add a second value."""
        # a client, not the module's functions, which write to the active run
        self._client = self._library.MlflowClient()
        run = self._find(earlier.id) if earlier else None
        if run is None:
            run = self._client.create_run(
                self._experiment(), run_name=self.folder.path.name, tags={"fedsign.path": str(self.folder.path)}
            )
        self._run = run.info.run_id
        self._client.update_run(self._run, status="RUNNING")
        self._describe(run.data.params)
        history = self._client.get_metric_history(self._run, _IN_EVERY_ROUND)
        return self._run, max((metric.step for metric in history), default=0)

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        """Log a round in one request."""
        now_ms = time.time_ns() // 1_000_000
        metric = self._library.entities.Metric
        batch = [metric(name, float(number), now_ms, round) for name, number in numbers.items()]
        self._client.log_batch(self._run, metrics=batch)

    def end(self, outcome: Record, final: Mapping[str, float]) -> None:
        """Log the outcome and the artifacts, and close."""
        self.log(self.last_sent, {name: number for name, number in final.items() if math.isfinite(number)})
        for key in ("status", "error"):
            self._client.set_tag(self._run, f"fedsign.{key}", str(outcome.get(key, ""))[:_LONGEST_TAG])
        self._client.log_artifact(self._run, str(self.folder.path / "config.toml"))
        if "report" in self.config.callbacks:  # that callback may run after this one
            self._client.log_artifact(self._run, str(write_report(self.folder)))
        self._client.set_terminated(self._run, _STATES[outcome["status"]])

    def _find(self, run_id: str) -> Any:
        """Return the run with this id; None if it was deleted or belongs to another store."""
        try:
            run = self._client.get_run(run_id)
        except self._library.exceptions.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return run if run.info.lifecycle_stage == "active" else None

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or self.config.project_name
        experiment = self._client.get_experiment_by_name(name)
        return str(experiment.experiment_id if experiment else self._client.create_experiment(name))

    def _describe(self, params: Mapping[str, str]) -> None:
        """Log parameters. MLflow parameters are immutable, so a change on resume becomes a tag."""
        entities = self._library.entities
        settings = {key: str(value) for key, value in settings_of(self.config).items()}
        new = [entities.Param(key, value) for key, value in settings.items() if key not in params]
        for start in range(0, len(new), _PARAMS_A_REQUEST):
            self._client.log_batch(self._run, params=new[start : start + _PARAMS_A_REQUEST])
        facts = {f"fedsign.{key}": str(value) for key, value in self.folder.environment.items()}
        facts |= {f"resumed.{key}": value for key, value in settings.items() if params.get(key, value) != value}
        self._client.log_batch(self._run, tags=[entities.RunTag(key, value) for key, value in facts.items()])
