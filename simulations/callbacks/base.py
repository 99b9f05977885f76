"""The interface of a callback.

Callbacks get a run's folder and its records, with every engine. They get no live objects, because with a SuperLink the
rounds run in another process; load models from the checkpoints on disk.
"""

from fedsign.config import ExperimentConfig
from fedsign.storage.results import Record, RunFolder


class Callback:
    """Base class of callbacks. All methods do nothing; override the ones you need."""

    def on_start(self, folder: RunFolder, config: ExperimentConfig, records: list[Record]) -> None:
        """Called before the first round; `records` holds the earlier records of a resumed run."""

    def on_round(self, record: Record) -> None:
        """Called after each round with its record."""

    def on_end(self, outcome: Record) -> None:
        """Called at the end, also if the run failed."""
