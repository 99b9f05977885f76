"""Ablation: matched controls that show which part of a regularizer produces its gain."""

from fedsign.capability import Capability

CAPABILITY = Capability(
    purpose="matched controls that show which part of a regularizer produces its gain",
    modules=(
        "fedsign.ablation",
        "simulations.ablation",
        "strategies.control",
    ),
    requires={
        "comparison": "its runs are the cells of a comparison, with the same statistics",
        "signs": "disagreement of signs is one of the curves",
    },
    rows={
        "objective": {
            "sign_push": ("fedsign.ablation.sign_push:SignPush", "FedSign's term with another sign or form"),
            "moon_part": ("fedsign.ablation.moon_part:MoonPart", "one half of MOON's contrast"),
        },
        "strategy": {
            "control": ("strategies.control:Control", "FedAvg with any local objective, optionally at given norms"),
        },
    },
    commands={
        "ablate": "simulations.ablation.command:ablate",
    },
    api={
        "ablate": "simulations.ablation.execution:ablate",
    },
    files=("docs/how-to/ablate.md", "docs/ablations.md", "benchmarks/ablations/*"),
)
