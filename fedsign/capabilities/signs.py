"""Signs: how far the signs of models and of a round's clients agree."""

from fedsign.capability import Capability

CAPABILITY = Capability(
    purpose="how far the signs of models and of a round's clients agree",
    modules=(
        "fedsign.capabilities.signs",
        "fedsign.analysis.agreement",
        "fedsign.analysis.signs",
        "fedsign.analysis.signs_section",
        "fedsign.report.sign_*",
        "simulations.signs",
    ),
    sections={"results": "fedsign.analysis.signs_section:SignsKeys"},
    columns=("signs_models", "signs_models_global", "signs_updates", "signs_updates_global"),
    requires={
        "landscape": "models are vectors and groups of parameters there",
    },
    commands={
        "analyse signs": "simulations.signs.command:signs",
    },
    extends={
        "report_section": "fedsign.report.sign_section:section",
        "round_hook": "fedsign.analysis.agreement:round_hook",
    },
)
