"""Robustness: simulated attackers and faults, and strategies that withstand them."""

from fedsign.capability import Capability, Kind

CAPABILITY = Capability(
    purpose="simulated attackers and faults, and strategies that withstand them",
    modules=(
        "clients.robustness",
        "strategies.flower.robust",
    ),
    sections={
        "attack": "clients.robustness.section:AttackPart",
        "faults": "clients.robustness.section:FaultsSection",
    },
    columns=("malicious",),
    kinds={
        "attack": Kind(
            plural="attacks",
            table={
                "none": ("clients.robustness.attack:none", "nobody attacks"),
                "sign_flip": (
                    "clients.robustness.attack:sign_flip",
                    "malicious clients send the opposite of their update",
                ),
                "scale": ("clients.robustness.attack:scale", "malicious clients send a multiple of their update"),
            },
        ),
    },
    rows={
        "strategy": {
            "flower_fedmedian": ("strategies.flower.robust:fedmedian", "Flower's own: median of every coordinate"),
            "flower_fedtrimmedavg": (
                "strategies.flower.robust:fedtrimmedavg",
                "Flower's own: mean of every coordinate without its tails",
            ),
            "flower_krum": ("strategies.flower.robust:krum", "Flower's own: the reply with the nearest neighbors"),
            "flower_multikrum": ("strategies.flower.robust:multikrum", "Flower's own: mean of Krum's best replies"),
            "flower_bulyan": (
                "strategies.flower.robust:bulyan",
                "Flower's own: Krum's choice, trimmed around the median",
            ),
        },
    },
    moved={"clients.attack": "clients.robustness.attack"},
    examples={"attacked": {"attack": {"name": "sign_flip", "fraction": 0.4}}},
    extends={
        "report_section": "clients.robustness.report:section",
        "client_middleware": "clients.robustness.experiment:middleware_of",
        "round_hook": "clients.robustness.experiment:round_hook",
    },
    files=("docs/how-to/faults.md",),
)
