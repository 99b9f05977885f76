"""What sparse models and scaling by width and density do not go with."""

from fedsign.compatibility import Chosen, Experiment
from fedsign.optim.displacement import is_linear, unit_displacement
from fedsign.rules import Choice, Rule

RULES = (
    Choice[Experiment](
        name="sparse",
        example={"model": {"name": "mlp", "hidden": [8, 16]}, "parameterisation": {"name": "sp", "density": 0.25}},
        made=Chosen("parameterisation"),
        given="parameterisation.name={config.parameterisation.name} was given,",
        rules=(
            Rule(
                lambda its: (
                    its.objective.needs_unit_displacement
                    and is_linear(its.optimizer)
                    and unit_displacement(its.optimizer, 1) is None
                ),
                "which gives tensors learning rates of their own at this width and density, but objective '{spec.name}' needs one rate "
                "for all",
                "use parameterisation.name=sp",
            ),
        ),
    ),
    Choice[Experiment](
        name="masks that change",
        example={
            "rounds": 1,
            "partition": {"name": "iid", "num_clients": 1},
            "server": {"cohort_size": 1},
            "client": {"optimizer": {"name": "packed_sgd"}},
            "model": {"name": "mlp", "hidden": [8, 16]},
            "parameterisation": {"name": "sp", "density": 0.25},
            "sparsity": {"name": "rigl", "every": 1, "last_step": 2},
        },
        made=Chosen("sparsity"),
        given="sparsity.name={config.sparsity.name} was given with",
        rules=(
            Rule(
                lambda its: (its.config.rounds, its.config.partition.num_clients) != (1, 1),
                "rounds={config.rounds} and partition.num_clients={config.partition.num_clients}, but server and clients draw the same "
                "masks and send none, so that a client's change would be unknown to all others",
                "use sparsity.name=static, or train in one place with rounds=1 and partition.num_clients=1",
            ),
        ),
    ),
)
