"""report.html, kept up to date during a run and written at its end."""

import time

from fedsign.config import ExperimentConfig
from fedsign.storage.results import Record, RunFolder
from simulations.callbacks.base import Callback

_INTERVAL_S = 10.0
_SHARE = 0.02  # of a run's time that writing its page may take


class Report(Callback):
    """Writes the page from the files on disk. During the run, the page tells the browser to reload it."""

    def on_start(self, folder: RunFolder, config: ExperimentConfig, records: list[Record]) -> None:
        """Remember the folder."""
        self._folder = folder
        self._next_at = time.monotonic() + _INTERVAL_S

    def on_round(self, record: Record) -> None:
        """Write the page if the last one is old enough."""
        began = time.monotonic()
        if began >= self._next_at:
            self._write(live=True)
            ended = time.monotonic()
            # a page grows with its run: the longer it takes, the less often it is written
            self._next_at = ended + max(_INTERVAL_S, (ended - began) / _SHARE)

    def on_end(self, outcome: Record) -> None:
        """Write the final page, also for a failed run."""
        self._write(live=False)

    def _write(self, *, live: bool) -> None:
        from fedsign.report.page import write_report  # imported late, so that the first round does not wait for it

        write_report(self._folder, live=live)
