"""Signs: how far the signs of models and of a round's clients agree."""

from fedsign.capability import Capability

CAPABILITY = Capability(
    purpose="how far the signs of models and of a round's clients agree",
    modules=(
        "fedsign.capabilities.signs",
        "fedsign.analysis.agreement",
        "fedsign.analysis.signs",
        "fedsign.report.sign_plots",
        "simulations.signs",
    ),
    requires={
        "landscape": "models are vectors and groups of parameters there",
    },
    commands={
        "analyse signs": "simulations.signs.command:signs",
    },
)
