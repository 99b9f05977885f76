"""Diagnosis: likely mistakes in the data and in the course of a run."""

from fedsign.capability import Capability

CAPABILITY = Capability(
    purpose="likely mistakes in the data and in the course of a run, each with the setting that helps",
    modules=("fedsign.diagnosis", "simulations.data_check"),
    files=(
        "benchmarks/results/diagnosis.json",
        "tests/fixtures/decay.json",
    ),
    commands={"data check": "simulations.data_check:check"},
    extends={
        "round_hook": "fedsign.diagnosis.judge:round_hook",
        "run_check": "fedsign.diagnosis.data:run_check",
    },
)
