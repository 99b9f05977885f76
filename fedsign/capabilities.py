"""The table of capabilities: what FedSign can do beyond a plain run, and which modules do it.

A module that no row claims belongs to the core, which every run needs.  The core imports no capability; a capability imports
the core and the capabilities that its row requires, which form no cycle.  `python -m benchmarks.size --edges` lists the
imports that do not follow this yet.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase


@dataclass(frozen=True, kw_only=True, slots=True)
class Capability:
    """One row: `modules` are patterns of module names; one that fits a package takes in all below it."""

    purpose: str
    modules: tuple[str, ...]
    requires: Mapping[str, str] = field(default_factory=dict)  # capability -> why


CAPABILITIES: Mapping[str, Capability] = {
    "cohort": Capability(
        purpose="the clients of a round trained as one stack of tensors",
        modules=("clients.cohort",),
    ),
    "workers": Capability(
        purpose="the clients of a round trained by several processes",
        modules=("clients.workers",),
    ),
    "sharding": Capability(
        purpose="one client's model and batch over several processes: PaRO",
        modules=(
            "fedsign.report.sharding_chart",
            "fedsign.sharding",
            "clients.sharding",
            "simulations.estimates.probing",
            "simulations.estimates.quantities",
            "simulations.estimates.sharding*",
        ),
        requires={"workers": "ranks share tensors and data through the same memory"},
    ),
    "sparsity": Capability(
        purpose="sparse models, masks that change, and scaling by width and density: SμPar",
        modules=(
            "fedsign.analysis.coordinates",
            "fedsign.parameterisation",
            "fedsign.report.coordinate_plots",
            "fedsign.report.transfer_plots",
            "simulations.analyses.coordinates",
            "simulations.analyses.parameterisation*",
            "simulations.tuning.cells",
            "simulations.tuning.training",
            "simulations.tuning.transfer",
            "simulations.tuning.worker",
        ),
    ),
    "partial": Capability(
        purpose="clients that train and send a part of the model: LISA, LoRA, GaLore",
        modules=(
            "fedsign.flower.changes",
            "fedsign.optim.blocks",
            "fedsign.optim.galore",
            "fedsign.optim.layer_draws",
            "fedsign.optim.lisa",
            "fedsign.optim.lora",
            "fedsign.parts",
            "clients.partial",
            "simulations.parts",
        ),
    ),
    "language": Capability(
        purpose="text data, tokenizers, decoders, models of `transformers`",
        modules=(
            "fedsign.data.text",
            "fedsign.llm",
            "fedsign.metrics.perplexity",
            "fedsign.metrics.token_accuracy",
            "fedsign.models.causal_lm",
            "fedsign.models.gpt",
            "fedsign.models.hugging_face",
            "fedsign.tasks.language",
            "simulations.export",
        ),
    ),
    "memory": Capability(
        purpose="the memory that a training step takes, estimated and measured",
        modules=(
            "fedsign.memory",
            "fedsign.report.stacks",
            "simulations.estimates.command",
            "simulations.estimates.memory*",
        ),
        requires={
            "sharding": "a step is estimated for one rank of a sharded client",
            "partial": "LISA, LoRA and GaLore are methods that are estimated",
            "language": "the models that are known by name are decoders",
        },
    ),
    "bilevel": Capability(
        purpose="gradients through a whole training: (FG)²U, condensation, learned settings",
        modules=(
            "fedsign.bilevel",
            "fedsign.report.condensation",
            "fedsign.report.learning_plots",
            "simulations.condensing",
            "simulations.tuning.learning",
        ),
    ),
    "landscape": Capability(
        purpose="loss valleys, interpolation and curvature around what was learned",
        modules=(
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
            "simulations.analyses.command",
            "simulations.analyses.curvature",
            "simulations.analyses.interpolate",
            "simulations.analyses.subject",
            "simulations.analyses.valley",
        ),
    ),
    "signs": Capability(
        purpose="how far the signs of models and of a round's clients agree",
        modules=(
            "fedsign.analysis.agreement",
            "fedsign.analysis.signs",
            "fedsign.report.sign_plots",
            "simulations.analyses.signs",
        ),
        requires={"landscape": "models are vectors and groups of parameters there"},
    ),
    "privacy": Capability(
        purpose="differential privacy, central and local, and its account",
        modules=(
            "fedsign.flower.clipping",
            "fedsign.privacy",
            "fedsign.report.privacy",
            "clients.privacy",
            "strategies.flower.private",
            "simulations.privacy",
        ),
    ),
    "robustness": Capability(
        purpose="simulated attackers and faults, and strategies that withstand them",
        modules=("clients.robustness", "strategies.flower.robust"),
    ),
    "comparison": Capability(
        purpose="strategies compared over seeds and conditions, with statistics and pages",
        modules=(
            "fedsign.comparison*",
            "fedsign.over_seeds",
            "fedsign.report.bars",
            "fedsign.report.comparison*",
            "fedsign.report.export",
            "fedsign.report.forest",
            "fedsign.report.labels",
            "fedsign.report.latex",
            "fedsign.report.lines",
            "fedsign.report.rows",
            "fedsign.report.tables",
            "fedsign.report.verdict",
            "simulations.comparisons",
        ),
    ),
    "deployment": Capability(
        purpose="federations over machines, and sites with data of their own",
        modules=(
            "fedsign.data.partition.sites",
            "fedsign.data.site_reader",
            "fedsign.data.sites",
            "fedsign.flower.evaluation",
            "fedsign.report.sites",
            "clients.evaluator",
            "simulations.backends.federation",
            "simulations.deployment",
        ),
    ),
    "reproduction": Capability(
        purpose="claims, figures and tables of papers as recipes with a verdict",
        modules=("fedsign.report.depth_plots", "fedsign.report.discovery_plots", "simulations.recipes"),
        requires={
            "sparsity": "the recipes of SμPar",
            "language": "the recipes that fine-tune and export a decoder",
            "memory": "the recipes of LISA's and (FG)²U's memory",
            "bilevel": "the recipes of (FG)²U and condensation",
            "landscape": "the recipes of loss valleys",
            "signs": "the recipes that count equal signs",
            "comparison": "a recipe plays its runs as a comparison and tests over seeds",
        },
    ),
}


def owners(module: str) -> tuple[str, ...]:
    """The capabilities that claim a module: none for the core, and never more than one.

    >>> owners("fedsign.sharding.paro")
    ('sharding',)
    """
    parts = module.split(".")
    names = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return tuple(
        name
        for name, capability in CAPABILITIES.items()
        if any(fnmatchcase(each, pattern) for each in names for pattern in capability.modules)
    )
