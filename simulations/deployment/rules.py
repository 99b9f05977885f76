"""What a federation's sites decide themselves cannot be said for them; asked before a run, since a node says its own root itself."""

from fedsign.compatibility import Experiment
from fedsign.rules import Rule

RULES: tuple[Rule[Experiment], ...] = (
    Rule(
        lambda its: its.config.get("engine.federation", "") and any(its.config.partition.settings.get("roots", ())),
        "partition.roots={config.partition.roots} was given with engine.federation={config.engine.federation}, whose "
        "sites know where their data lie (data_root in site.toml)",
        "leave it out",
    ),
)
