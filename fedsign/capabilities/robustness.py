"""Robustness: simulated attackers and faults, and robust aggregation."""

from fedsign.capability import Capability, Kind

CAPABILITY = Capability(
    purpose="simulated attackers and faults, and robust aggregation",
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
                "none": ("clients.robustness.attack:none", "no attack"),
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
            "flower_fedmedian": ("strategies.flower.robust:fedmedian", "Flower's own: coordinate-wise median"),
            "flower_fedtrimmedavg": (
                "strategies.flower.robust:fedtrimmedavg",
                "Flower's own: coordinate-wise trimmed mean",
            ),
            "flower_krum": ("strategies.flower.robust:krum", "Flower's own: Krum, the reply closest to its neighbors"),
            "flower_multikrum": (
                "strategies.flower.robust:multikrum",
                "Flower's own: mean of the replies that Krum selects",
            ),
            "flower_bulyan": (
                "strategies.flower.robust:bulyan",
                "Flower's own: Bulyan, Krum's selection trimmed around the median",
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
