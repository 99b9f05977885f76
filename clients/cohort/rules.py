"""Settings to refuse on the cohort path; the rules are imported only if it is chosen."""

from clients.cohort.section import CohortKeys
from fedsign.compatibility import Experiment
from fedsign.rules import Choice

COHORT = Choice[Experiment](
    made=lambda experiment: CohortKeys.of(experiment.config).path == "cohort",
    given="client.path=cohort was given, but",
    rules="clients.cohort.trial:RULES",
    remedy="use client.path=sequential or auto",
)
RULES = (COHORT,)
