"""Weights & Biases: one W&B run per run, online or offline as the environment says.

The library's environment variables apply, such as WANDB_MODE and WANDB_ENTITY. By default the project is the
configuration's `name` or the data's, the run is named after its folder, and files go to <run>/wandb/.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from fedsign.storage.results import Record
from simulations.callbacks.tracking import Earlier, Tracker, settings_of


class WandB(Tracker):
    """Keeps one W&B run per run, however often that is resumed."""

    name = library = "wandb"
    label = "Weights & Biases"

    def begin(self, earlier: Earlier | None, *, last_recorded: int) -> tuple[str, int]:
        """Open or resume the run. Online, the server says which step comes next."""
        environment = os.environ
        folder = Path(environment.get("WANDB_DIR") or self.folder.path)
        # before `init`, which adds a session
        sessions = sorted(folder.glob(f"wandb/offline-run-*-{earlier.id}")) if earlier else []
        self._run = self._library.init(
            project=environment.get("WANDB_PROJECT") or self.config.project_name,
            name=environment.get("WANDB_NAME") or self.folder.path.name,
            dir=str(folder),
            id=earlier.id if earlier else None,
            resume="allow" if earlier and environment.get("WANDB_MODE") != "offline" else None,
            config={**settings_of(self.config), "environment": self.folder.environment},
            reinit="create_new",  # leaves a run that the user has open alone
        )
        self._run.config.update(settings_of(self.config), allow_val_change=True)
        if earlier is None:
            return str(self._run.id), 0
        if not self._run.offline:
            return earlier.id, max(0, self._run.starting_step - 1)
        if earlier.last_sent > earlier.last_ended and sessions:
            # The process was killed. W&B writes every 15 seconds, so the offline file may be cut off anywhere: send all
            # of it again.
            shutil.rmtree(sessions[-1])
        return earlier.id, earlier.last_ended

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        """Log a round as a step."""
        self._run.log(dict(numbers), step=round)

    def end(self, outcome: Record, final: Mapping[str, float]) -> None:
        """Write the outcome to the run's summary, and finish."""
        self._run.summary.update({**final, **outcome})
        self._run.finish(exit_code=0 if outcome["status"] == "finished" else 1)
