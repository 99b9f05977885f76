"""Landscape: loss valleys, interpolation and curvature around what was learned."""

from fedsign.capability import Capability

CAPABILITY = Capability(
    purpose="loss valleys, interpolation and curvature around what was learned",
    modules=(
        "fedsign.capabilities.landscape",
        "fedsign.analysis.activations",
        "fedsign.analysis.curvature",
        "fedsign.analysis.directions",
        "fedsign.analysis.groups",
        "fedsign.analysis.interpolation",
        "fedsign.analysis.landscape",
        "fedsign.analysis.noise",
        "fedsign.analysis.scaling",
        "fedsign.analysis.softmax_demo",
        "fedsign.analysis.valley",
        "fedsign.analysis.vector",
        "fedsign.report.valley_*",
        "simulations.landscape",
    ),
    commands={
        "analyse valley": "simulations.landscape.command:valley",
        "analyse interpolate": "simulations.landscape.command:interpolate",
        "analyse curvature": "simulations.landscape.command:curvature",
    },
    files=("docs/how-to/look-at-the-valley.md",),
    extends={
        "report_section": "fedsign.report.valley_section:section",
    },
)
