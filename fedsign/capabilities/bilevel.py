"""Bilevel: gradients through training: (FG)²U, data condensation, gradient-based hyperparameter tuning."""

from fedsign.capability import Capability, Kind

CAPABILITY = Capability(
    purpose="gradients through a whole training: (FG)²U, condensation, learned settings",
    modules=(
        "fedsign.bilevel",
        "simulations.bilevel",
    ),
    kinds={
        "hypergradient": Kind(
            plural="hypergradients",
            table={
                "fg2u": (
                    "fedsign.bilevel.forward_gradient:fg2u",
                    "(FG)^2U: tangents of the training along random directions, unbiased, memory without depth",
                ),
                "fg2u_zo": (
                    "fedsign.bilevel.forward_gradient:fg2u_zo",
                    "the same by differences of whole trainings, for a black box",
                ),
                "forward_exact": (
                    "fedsign.bilevel.forward_gradient:forward_exact",
                    "a tangent for each meta-parameter, exact, for a few of them",
                ),
                "rgu": (
                    "fedsign.bilevel.hypergradients:rgu",
                    "reverse mode through the training, exact, memory with depth",
                ),
                "trgu": ("fedsign.bilevel.hypergradients:trgu", "reverse mode through its last steps alone, biased"),
                "hessian_free": (
                    "fedsign.bilevel.hypergradients:hessian_free",
                    "implicit differentiation, the identity for the inverse Hessian, biased",
                ),
                "neumann": (
                    "fedsign.bilevel.hypergradients:neumann",
                    "implicit differentiation, a few terms of a series for the inverse Hessian, biased",
                ),
            },
        ),
    },
    commands={
        "condense": "simulations.bilevel.command:condense",
        "tune learn": "simulations.bilevel.command:learn",
    },
    files=(
        "docs/how-to/learn-settings.md",
        "docs/how-to/condense.md",
    ),
)
