"""Landscape: loss valleys, interpolation and curvature around trained models."""

from fedsign.capability import Capability

CAPABILITY = Capability(
    purpose="loss valleys, linear interpolation, and curvature of trained models",
    modules=(
        "fedsign.landscape",
        "simulations.landscape",
    ),
    commands={
        "analyze valley": "simulations.landscape.command:valley",
        "analyze trajectory": "simulations.landscape.command:trajectory",
        "analyze interpolate": "simulations.landscape.command:interpolate",
        "analyze curvature": "simulations.landscape.command:curvature",
    },
    api={
        "analyze.valley": "simulations.landscape.valley:valley",
        "analyze.trajectory": "simulations.landscape.trajectory:trajectory",
        "analyze.interpolate": "simulations.landscape.interpolate:interpolate",
        "analyze.curvature": "simulations.landscape.curvature:curvature",
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
