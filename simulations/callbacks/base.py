"""The contract of a callback.

Callbacks see a run's folder and its lines, on every engine: with a SuperLink the rounds are played in
another process, so there is nothing else to see.  The model of a checkpoint is on disk.
"""

from fedsign.config import ExperimentConfig
from fedsign.storage.results import Line, RunFolder


class Callback:
    """Does nothing; override what you need."""

    def on_start(self, folder: RunFolder, config: ExperimentConfig, lines: list[Line]) -> None:
        """Before the first round; `lines` are those of a run that is resumed."""

    def on_round(self, line: Line) -> None:
        """After each round."""

    def on_end(self, outcome: Line) -> None:
        """At the end, also of a run that failed."""
