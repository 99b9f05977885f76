"""Deployment: federations over machines, and sites with data of their own."""

from fedsign.capability import Capability

CAPABILITY = Capability(
    purpose="federations over machines, and sites with data of their own",
    modules=(
        "fedsign.capabilities.deployment",
        "fedsign.data.partition.sites",
        "fedsign.data.site_reader",
        "fedsign.data.sites",
        "fedsign.flower.evaluation",
        "fedsign.report.sites",
        "clients.evaluator",
        "simulations.backends.federation",
        "simulations.deployment",
    ),
    requires={"tables": "sites agree on the columns of their tables"},
    extends={"evaluation": "simulations.deployment.evaluation:at_sites"},
    rows={
        "partition": {
            "sites": (
                "fedsign.data.partition.sites:sites",
                "each client has data of its own, which lie with it: hospitals",
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
