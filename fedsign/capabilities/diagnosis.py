"""Diagnosis: likely mistakes in the data and in the course of a run."""

from fedsign.capability import Capability

CAPABILITY = Capability(
    purpose="likely mistakes in the data and in the course of a run, each with the setting that helps",
    modules=("fedsign.diagnosis",),
    files=(
        "benchmarks/results/diagnosis.json",
        "tests/fixtures/decay.json",
    ),
    extends={
        "report_section": "fedsign.diagnosis.report:section",
        "round_hook": "fedsign.diagnosis.judge:round_hook",
    },
)
