"""TensorBoard: event files in the run's own folder, <run>/tensorboard/.

`tensorboard --logdir runs` shows all runs side by side: curves under Scalars, settings under HParams,
configuration, environment and outcome under Text.
"""

import importlib
from collections.abc import Mapping

from fedsign.storage.results import Record
from simulations.callbacks.tracking import Earlier, Tracker, settings_of


class TensorBoard(Tracker):
    """Flushes every round, so that TensorBoard shows a live run up to date."""

    name = library = "tensorboard"
    label = "TensorBoard"

    def __init__(self) -> None:
        super().__init__()
        self._library = importlib.import_module("torch.utils.tensorboard")  # needs the tensorboard package

    def begin(self, earlier: Earlier | None, *, last_recorded: int) -> tuple[str, int]:
        """Open a writer. TensorBoard purges the rounds that will be run again."""
        path = self.folder.path / self.name
        goes_on = earlier is not None and path.is_dir()
        kept = min(earlier.last_sent, last_recorded) if earlier and goes_on else 0
        self._writer = self._library.SummaryWriter(path, purge_step=kept + 1 if goes_on else None)
        # metric columns of the HParams table: torch requires values, but uses the names only
        columns = {f"final_{name.rpartition(':')[2]}": 0.0 for name in (*self.config.metrics, "loss")}
        *start, self._end = self._library.summary.hparams(settings_of(self.config), columns)
        # once: a resumed run writes to the same folder, which has the session's start
        for summary in start if not goes_on else ():
            self._writer.file_writer.add_summary(summary)
        code = "".join(f"    {line}\n" for line in self.folder.config_toml.splitlines())
        self._writer.add_text("configuration", code, kept)
        self._writer.add_text("environment", _table(self.folder.environment), kept)
        self._writer.flush()
        return self.name, kept

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        """Write the scalars of a round."""
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, round)
        self._writer.flush()

    def end(self, outcome: Record, final: Mapping[str, float]) -> None:
        """Write the run's status for the HParams page. torch's own function can only report success."""
        from tensorboard.plugins.hparams.api_pb2 import Status
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

        for name, number in final.items():
            self._writer.add_scalar(name, number, self.last_sent)
        self._writer.add_text("outcome", _table(outcome), self.last_sent)
        plugin = self._end.value[0].metadata.plugin_data
        data = HParamsPluginData.FromString(plugin.content)
        states = {"finished": Status.STATUS_SUCCESS, "failed": Status.STATUS_FAILURE}
        data.session_end_info.status = states.get(outcome["status"], Status.STATUS_UNKNOWN)
        plugin.content = data.SerializeToString()
        self._writer.file_writer.add_summary(self._end)
        self._writer.close()


def _table(facts: Record) -> str:
    """Format facts as a Markdown table."""
    cells = {key: str(value).replace("|", "\\|").replace("\n", " ") for key, value in facts.items()}
    return "| | |\n|-|-|\n" + "".join(f"| {key} | {value} |\n" for key, value in cells.items())
