"""Reproduction: recipes that reproduce the claims, figures, and tables of papers, with a verdict."""

from fedsign.capability import Capability

CAPABILITY = Capability(
    purpose="recipes that reproduce the claims, figures, and tables of papers, with a verdict",
    modules=("simulations.recipes",),
    requires={
        "images": "the recipes that train on CIFAR-10, and on VGG and ResNet",
        "sparsity": "the recipes of SμPar",
        "language": "the recipes that fine-tune and export a decoder",
        "partial": "the recipe of weights, moments, and a base in few bits",
        "memory": "the recipes of LISA's and (FG)²U's memory",
        "bilevel": "the recipes of (FG)²U and condensation",
        "landscape": "the recipes of loss valleys",
        "signs": "the recipes that count equal signs",
        "sharding": "the recipe of PaRO's guideline",
        "comparison": "a recipe runs a comparison, with its tests over seeds",
    },
    moved={
        "simulations.recipes.feddyn_faster_digits": "simulations.recipes.algorithms.digits",
        "simulations.recipes.feddyn_fixed_point": "simulations.recipes.algorithms.feddyn_fixed_point",
        "simulations.recipes.valley_bn_init": "simulations.recipes.valleys.noises",
    },
    commands={
        "reproduce": "simulations.recipes.command:reproduce",
    },
    files=("docs/recipes.md", "docs/claims.md", "benchmarks/findings/*"),
)
