"""Privacy: central and local differential privacy, with accounting."""

from fedsign.capability import Capability, Kind

CAPABILITY = Capability(
    purpose="central and local differential privacy, and its accounting",
    modules=(
        "fedsign.privacy",
        "clients.privacy",
        "strategies.flower.private",
        "simulations.privacy",
    ),
    sections={"privacy": "fedsign.privacy.section:PrivacyPart"},
    columns=("epsilon", "epsilon_round", "clip_norm"),
    kinds={
        "privacy": Kind(
            plural="privacies",
            table={
                "none": ("fedsign.privacy.none:none", "no clipping, no noise"),
                "central": (
                    "fedsign.privacy.central:Central",
                    "updates clipped to a fixed norm, noise added by a trusted server",
                ),
                "central_adaptive": (
                    "fedsign.privacy.central_adaptive:CentralAdaptive",
                    "the same, with a clipping norm that tracks a quantile of the updates' norms",
                ),
                "local": (
                    "fedsign.privacy.local:Local",
                    "every client clips its update and adds noise before it replies",
                ),
            },
        ),
    },
    rows={
        "strategy": {
            "flower_dp_server_fixed": (
                "strategies.flower.private:server_fixed",
                "Flower's own: differential privacy, clipped at the server",
            ),
            "flower_dp_server_adaptive": (
                "strategies.flower.private:server_adaptive",
                "Flower's own: differential privacy, adaptive clipping at the server",
            ),
            "flower_dp_client_fixed": (
                "strategies.flower.private:client_fixed",
                "Flower's own: differential privacy, clipped by the clients",
            ),
            "flower_dp_client_adaptive": (
                "strategies.flower.private:client_adaptive",
                "Flower's own: differential privacy, adaptive clipping by the clients",
            ),
        },
    },
    extras=("privacy",),
    examples={"privacy": {"privacy": {"name": "central", "clip_norm": 0.5, "noise_multiplier": 1.0, "delta": 0.01}}},
    extends={
        "report_section": "fedsign.privacy.report:section",
        "client_middleware": "clients.privacy:middleware_of",
        "round_hook": "simulations.privacy:round_hook",
        "rules": "fedsign.privacy.rules:RULES",
        "strategy_transform": "simulations.privacy:prepare",
        "verify": "simulations.privacy:verify",
    },
)
