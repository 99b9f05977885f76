"""Attacks go with everything; here for the tables of docs/capabilities.md."""

from clients.robustness.section import AttackPart
from fedsign.compatibility import Experiment
from fedsign.rules import Choice

RULES = (
    Choice[Experiment](
        name="attacked",
        example={"attack": {"name": "sign_flip", "fraction": 0.4}},
        made=lambda its: AttackPart.of(its.config).is_chosen,
        given="",
        rules=(),
    ),
)
