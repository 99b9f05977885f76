"""Rules for settings that sites decide themselves, such as each node's data root. Checked before a run."""

from fedsign.compatibility import Experiment
from fedsign.rules import Rule

RULES: tuple[Rule[Experiment], ...] = (
    Rule(
        lambda experiment: (
            experiment.config.get("engine.federation", "")
            and any(experiment.config.partition.settings.get("roots", ()))
        ),
        "partition.roots={config.partition.roots} was given with engine.federation={config.engine.federation}, whose "
        "sites know where their data lie (data_root in site.toml)",
        "leave it out",
    ),
)
