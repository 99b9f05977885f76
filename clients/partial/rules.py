"""Settings to refuse when training a part of the model at a time.

These are strategies that need the same tensors from every client, and differential privacy: its noise is calibrated for
a mean over the whole cohort in every coordinate, and would be too small for a mean over few clients.
"""

from fedsign.compatibility import Chosen, Experiment, Unless
from fedsign.rules import Choice, Rule

PARTS = Choice[Experiment](
    made=lambda experiment: experiment.trains.trains_part,
    given="client.optimizer.name={config.client.optimizer.name} trains a part of the model at a time, but",
    rules=(
        Rule(
            lambda experiment: not experiment.serves.proposes_update,
            "strategy {config.strategy.name} is Flower's and needs the same tensors from every client",
            "take one of FedSign's, such as strategy.name=fedavg, or an optimizer that trains all, such as adamw",
        ),
        Rule(
            lambda experiment: not experiment.serves.takes_parts,
            "strategy {config.strategy.name} needs to know how far every parameter went",
            "take another strategy, or an optimizer that trains all, such as client.optimizer.name=sgd",
        ),
        Rule(
            Chosen("privacy"),
            "{found} covers all of it with noise",
            "use privacy.name=none, or an optimizer that trains all, such as adamw",
        ),
        Rule(
            Unless("engine.compile", (False,)),
            "{found} would compile the model anew each time that other layers are frozen",
            "use engine.compile=false",
        ),
    ),
)
RULES = (PARTS,)
