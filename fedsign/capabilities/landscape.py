"""Landscape: loss valleys, interpolation and curvature around trained models."""

from fedsign.capability import Capability

CAPABILITY = Capability(
    purpose="loss valleys, interpolation and curvature around what was learned",
    modules=(
        "fedsign.landscape",
        "simulations.landscape",
    ),
    commands={
        "analyse valley": "simulations.landscape.command:valley",
        "analyse trajectory": "simulations.landscape.command:trajectory",
        "analyse interpolate": "simulations.landscape.command:interpolate",
        "analyse curvature": "simulations.landscape.command:curvature",
    },
    api={
        "analyse.valley": "simulations.landscape.valley:valley",
        "analyse.trajectory": "simulations.landscape.trajectory:trajectory",
        "analyse.interpolate": "simulations.landscape.interpolate:interpolate",
        "analyse.curvature": "simulations.landscape.curvature:curvature",
    },
    files=(
        "docs/how-to/look-at-the-valley.md",
        "docs/valleys.md",
        "docs/images/valley-resnet20-*",
        "docs/images/valley-vgg8-*",
        "benchmarks/valleys/*",
    ),
    extends={
        "report_section": "fedsign.landscape.report:section",
    },
)
