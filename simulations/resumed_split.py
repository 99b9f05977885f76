"""A resumed run goes on with the split that it was started with.

The record of a split, `partition.json`, holds a digest of the clients' indices; runs of FedSign 0.2 and before hold
counts only.  These runs were cut as `dirichlet_prefix` cuts, under the name `dirichlet`, so naming this cut is the one
change that a resumed run accepts in its partition.
"""

from fedsign.config import ExperimentConfig
from fedsign.errors import ConfigError
from fedsign.registry import KINDS
from fedsign.storage.results import Record, RunFolder


def with_named_cut(before: ExperimentConfig, after: ExperimentConfig) -> tuple[ExperimentConfig, ExperimentConfig]:
    """Both configurations with `partition.name=dirichlet_prefix` where only `after` names the cut of `dirichlet`.

    Naming a partition drops the settings of another one (`fedsign.config`), so the run's own ones are put back.
    """
    old, name = before.partition, _former_cut(before)
    alone = type(old)(name=name or old.name, num_clients=old.num_clients).completed("partition", elsewhere=tuple)
    kept = old.model_copy(update={"name": name})
    if not name or after.partition not in (kept, alone):
        return before, after
    return before.model_copy(update={"partition": kept}), after.model_copy(update={"partition": kept})


def check_same_split(folder: RunFolder, config: ExperimentConfig, facts: Record) -> None:
    """Raise ConfigError if the split, of which `facts` are the record, is not the one that a run recorded."""
    recorded, former = folder.partition, _former_cut(config)
    key = "split" if "split" in recorded else "counts"
    if recorded.get(key) == facts.get(key):
        return
    remedy = (
        f"for runs of FedSign 0.2 and before, add --set partition.name={former}"
        if former and key == "counts"
        else "its settings, its code, the data, or NumPy have changed: put them back, or start a new run"
    )
    raise ConfigError(
        f"partition.name={config.partition.name} draws another split than the run in {folder.path} recorded; {remedy}."
    )


def _former_cut(config: ExperimentConfig) -> str:
    name = f"{config.partition.name}_prefix"
    return name if name in KINDS["partition"].table else ""
