"""Settings to refuse with sparse models and parameterizations."""

from fedsign.compatibility import Chosen, Experiment
from fedsign.optim.displacement import is_linear, unit_displacement
from fedsign.rules import Rule

RULES: tuple[Rule[Experiment], ...] = (
    Rule(
        lambda experiment: (
            (experiment.config.rounds, experiment.config.partition.num_clients) != (1, 1)
            and Chosen("sparsity")(experiment)
        ),
        "{found} was given with rounds={config.rounds} and partition.num_clients={config.partition.num_clients}, "
        "but server and clients "
        "draw the same masks and send none, so that a client's change would be unknown to all others",
        "use sparsity.name=static, or train in one place with rounds=1 and partition.num_clients=1",
    ),
    Rule(
        lambda experiment: (
            experiment.objective.needs_unit_displacement
            and is_linear(experiment.optimizer)
            and unit_displacement(experiment.optimizer, 1) is None
            and Chosen("parameterization")(experiment)
        ),
        "{found} was given, which gives tensors learning rates of their own at this width and density, "
        "but objective '{spec.name}' needs one rate for all",
        "use parameterization.name=sp",
    ),
)
