"""Reproduction: claims, figures and tables of papers as recipes with a verdict."""

from fedsign.capability import Capability

CAPABILITY = Capability(
    purpose="claims, figures and tables of papers as recipes with a verdict",
    modules=(
        "fedsign.capabilities.reproduction",
        "simulations.recipes",
    ),
    requires={
        "images": "the recipes that train on CIFAR-10, and on VGG and ResNet",
        "sparsity": "the recipes of SμPar",
        "language": "the recipes that fine-tune and export a decoder",
        "memory": "the recipes of LISA's and (FG)²U's memory",
        "bilevel": "the recipes of (FG)²U and condensation",
        "landscape": "the recipes of loss valleys",
        "signs": "the recipes that count equal signs",
        "comparison": "a recipe plays its runs as a comparison and tests over seeds",
    },
    moved={
        f"simulations.recipes.{name}": f"simulations.recipes.{folder}.{name}"
        for folder, names in {
            "algorithms": ("feddyn_faster_digits", "feddyn_fixed_point"),
            "language": ("docstrings", "small_llama"),
            "valleys": ("networks", "valley_bn_init"),
        }.items()
        for name in names
    },
    commands={
        "reproduce": "simulations.recipes.command:reproduce",
    },
    files=("docs/recipes.md",),
)
