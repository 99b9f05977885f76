"""report.html at the end of a run."""

from fedsign.config import ExperimentConfig
from fedsign.results import Line, RunFolder
from simulations.callbacks.base import Callback


class Report(Callback):
    """Writes the page from what is on disk."""

    def __init__(self) -> None:
        self._folder: RunFolder | None = None

    def on_start(self, folder: RunFolder, config: ExperimentConfig, lines: list[Line]) -> None:
        """Remember the folder."""
        self._folder = folder

    def on_end(self, outcome: Line) -> None:
        """Write the page, also of a run that failed: what is there is worth seeing."""
        from fedsign.report.page import write_report  # now, so that the first round does not wait for it

        if self._folder is not None:
            write_report(self._folder)
