"""Deployment: SuperLink and SuperNodes, federations across machines, sites with local data."""

from fedsign.capability import Capability

CAPABILITY = Capability(
    purpose="SuperLink and SuperNodes, federations over several machines, sites with their own data",
    modules=(
        "fedsign.data.partition.sites",
        "fedsign.data.site_reader",
        "fedsign.data.sites",
        "fedsign.flower.door",
        "fedsign.flower.evaluation",
        "fedsign.flower.programs",
        "fedsign.flower.signatures",
        "fedsign.flower.tasks",
        "clients.deployment",
        "clients.site",
        "simulations.deployment",
    ),
    extends={
        "client_app": "clients.deployment.node:HANDLERS",
        "report_section": "clients.deployment.report:section",
        "evaluation": "simulations.deployment.evaluation:at_sites",
        "rules": "simulations.deployment.rules:RULES",
    },
    moved={"simulations.backends.superlink": "simulations.deployment.engine.superlink"},
    rows={
        "engine": {
            "superlink": ("simulations.deployment.engine.superlink:SuperLink", "a local SuperLink with SuperNodes")
        },
        "partition": {
            "sites": (
                "fedsign.data.partition.sites:sites",
                "each client's data are stored at its own site",
            ),
        },
    },
    commands={
        "deploy": "simulations.deployment.command:app",
    },
    files=(
        "docs/how-to/sites.md",
        "docs/how-to/deploy.md",
    ),
)
