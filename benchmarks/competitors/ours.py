"""FedSign as in `fedsign run`: record and evaluation in every round, default checkpoints and callbacks.

A callback times each round from the end of the previous one to its own end.
"""

import json
import tempfile
from pathlib import Path

from benchmarks import phases
from benchmarks.competitors.stopwatch import Stopwatch, arguments
from fedsign.config import ExperimentConfig, merged
from fedsign.storage.results import Record, RunFolder
from simulations import run
from simulations.callbacks.base import Callback


class Clock(Callback):
    """Records when rounds end."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch

    def on_start(self, folder: RunFolder, config: ExperimentConfig, records: list[Record]) -> None:
        """The first round begins."""
        self._watch.mark()

    def on_round(self, record: Record) -> None:
        """A round has ended."""
        self._watch.mark()


def main() -> None:
    """Run the workload."""
    given = arguments()
    watch = Stopwatch()
    settings = dict(given.settings)
    profiled = settings.pop("profile", False)
    task = json.loads((given.workload / "task.json").read_text(encoding="utf-8"))
    experiment = merged(task["experiment"], settings)
    with tempfile.TemporaryDirectory() as root:
        experiment = merged(experiment, {"engine": {"device": given.device}, "results": {"root": str(Path(root))}})
        if profiled:
            experiment = merged(experiment, {"rounds": profiled})
        with phases.Sampler(active=bool(profiled)) as sampler:
            done = run(experiment, callbacks=[sampler.callback, Clock(watch)])
        last = done.rounds[-1]
        config = done.config
    watch.write(
        given.out,
        loss=last["loss"],
        accuracy=last["accuracy"],
        packages=("flwr",),
        decided={"path": config.client.path, "chunk": config.get("client.chunk", 0)},
        **({"profile": sampler.seconds_per_round()} if profiled else {}),
    )


if __name__ == "__main__":
    main()
