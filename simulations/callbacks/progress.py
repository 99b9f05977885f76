"""The progress of a run: round, metric, loss, remaining time."""

from fedsign.config import ExperimentConfig
from fedsign.storage.results import Record, RunFolder
from simulations.callbacks.base import Callback
from simulations.progress import display


class Progress(Callback):
    """Shows the rounds as `simulations.progress` does."""

    def on_start(self, folder: RunFolder, config: ExperimentConfig, records: list[Record]) -> None:
        """Show the run, starting at its first new round."""
        metrics = [config.metrics[0].rpartition(":")[2]] if config.metrics else []
        self._shown = [*metrics, "loss"]
        self._values: Record = {}
        self._display = display(config.rounds, start=len(records), unit="round", first=f"run {folder.path}")

    def on_round(self, record: Record) -> None:
        """Advance by one round."""
        # a metric that is not measured in every round keeps its last value
        self._values |= {name: record[name] for name in self._shown if name in record}
        self._display.show(record["round"], {name: self._values[name] for name in self._shown if name in self._values})

    def on_end(self, outcome: Record) -> None:
        """Stop updating."""
        self._display.stop()
