"""Signs: agreement of signs between models, and between the clients of a round."""

from fedsign.capability import Capability

CAPABILITY = Capability(
    purpose="sign agreement between models, and between the clients of a round",
    modules=(
        "fedsign.signs",
        "simulations.signs",
    ),
    sections={"results": "fedsign.signs.section:SignsKeys"},
    columns=("signs_models", "signs_models_global", "signs_updates", "signs_updates_global"),
    requires={
        "landscape": "models are vectors and groups of parameters there",
    },
    commands={
        "analyze signs": "simulations.signs.command:signs",
    },
    api={
        "analyze.signs": "simulations.signs.pairs:signs",
    },
    extends={
        "report_section": "fedsign.signs.report:section",
        "round_hook": "fedsign.signs.agreement:round_hook",
    },
)
