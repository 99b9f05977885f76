"""Cohort: all clients of a round trained at once, as one batch of models."""

from fedsign.capability import Capability

CAPABILITY = Capability(
    purpose="all clients of a round trained as one stack of tensors",
    modules=("clients.cohort",),
    sections={"client": "clients.cohort.section:CohortKeys"},
    examples={"cohort path": {"client": {"path": "cohort"}}},
    extends={"local_trainer": "clients.cohort.provider:CohortProvider", "rules": "clients.cohort.rules:RULES"},
)
