"""MLflow: a run of an experiment on the user's tracking server, or in the library's default place.

The library's environment variables decide: MLFLOW_TRACKING_URI, by default mlflow.db in the current folder, and
MLFLOW_EXPERIMENT_NAME, by default the configuration's `name`.  Written are parameters, metrics by round, tags
(environment, outcome), and config.toml and report.html as artifacts.
"""

import math
import os
import time
from collections.abc import Mapping
from typing import Any

from fedsign.report.page import write_report
from fedsign.storage.results import Line
from simulations.callbacks.tracking import Earlier, Tracker, settings_of

_STATES = {"finished": "FINISHED", "failed": "FAILED", "unfinished": "KILLED"}
_ALWAYS_THERE = "bytes_down"  # a metric that every round has, and no user's metric can be called
_LONGEST_TAG = 5000
_PARAMS_A_REQUEST = 100


class MLflow(Tracker):
    """Talks through a client of its own: the user's active run, if there is one, is not touched."""

    name = library = "mlflow"
    label = "MLflow"

    def begin(self, earlier: Earlier | None, *, last_played: int) -> tuple[str, int]:
        """See Tracker.  The server is asked for the rounds it has: it keeps a second value beside the first."""
        self._client = self._library.MlflowClient()
        run = self._find(earlier.id) if earlier else None
        if run is None:
            run = self._client.create_run(
                self._experiment(), run_name=self.folder.path.name, tags={"fedsign.path": str(self.folder.path)}
            )
        self._run = run.info.run_id
        self._client.update_run(self._run, status="RUNNING")
        self._describe(run.data.params)
        history = self._client.get_metric_history(self._run, _ALWAYS_THERE)
        return self._run, max((metric.step for metric in history), default=0)

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        """See Tracker.  One request."""
        now_ms = time.time_ns() // 1_000_000
        metric = self._library.entities.Metric
        batch = [metric(name, float(number), now_ms, round) for name, number in numbers.items()]
        self._client.log_batch(self._run, metrics=batch)

    def end(self, outcome: Line, final: Mapping[str, float]) -> None:
        """See Tracker."""
        self.log(self.last_sent, {name: number for name, number in final.items() if math.isfinite(number)})
        for key in ("status", "error"):
            self._client.set_tag(self._run, f"fedsign.{key}", str(outcome.get(key, ""))[:_LONGEST_TAG])
        self._client.log_artifact(self._run, str(self.folder.path / "config.toml"))
        if "report" in self.config.callbacks:  # which may come after this callback
            self._client.log_artifact(self._run, str(write_report(self.folder)))
        self._client.set_terminated(self._run, _STATES[outcome["status"]])

    def _find(self, run_id: str) -> Any:
        """The run of an id; None where it was deleted, or the store is another one now."""
        try:
            run = self._client.get_run(run_id)
        except self._library.exceptions.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return run if run.info.lifecycle_stage == "active" else None

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or self.config.name
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))

    def _describe(self, params: Mapping[str, str]) -> None:
        """Parameters, which MLflow never changes: what another start of the run changed becomes a tag."""
        entities = self._library.entities
        settings = {key: str(value) for key, value in settings_of(self.config).items()}
        new = [entities.Param(key, value) for key, value in settings.items() if key not in params]
        for start in range(0, len(new), _PARAMS_A_REQUEST):
            self._client.log_batch(self._run, params=new[start : start + _PARAMS_A_REQUEST])
        facts = {f"fedsign.{key}": str(value) for key, value in self.folder.environment.items()}
        facts |= {f"resumed.{key}": value for key, value in settings.items() if params.get(key, value) != value}
        self._client.log_batch(self._run, tags=[entities.RunTag(key, value) for key, value in facts.items()])
