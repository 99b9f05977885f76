"""Privacy: central and local differential privacy, with accounting."""

from fedsign.capability import Capability, Kind

CAPABILITY = Capability(
    purpose="differential privacy, central and local, and its account",
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
                "none": ("fedsign.privacy.none:none", "what clients send is used as it is"),
                "central": (
                    "fedsign.privacy.central:Central",
                    "updates clipped by a fixed norm, noise from a trusted server",
                ),
                "central_adaptive": (
                    "fedsign.privacy.central_adaptive:CentralAdaptive",
                    "the same, clipped by a norm that follows a quantile of the updates' norms",
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
                "Flower's own: differential privacy, clipped at the server by an adaptive norm",
            ),
            "flower_dp_client_fixed": (
                "strategies.flower.private:client_fixed",
                "Flower's own: differential privacy, clipped by the clients",
            ),
            "flower_dp_client_adaptive": (
                "strategies.flower.private:client_adaptive",
                "Flower's own: differential privacy, clipped by the clients by an adaptive norm",
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
    },
)
