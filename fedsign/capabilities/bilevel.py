"""Bilevel: gradients through training: (FG)²U, data condensation, gradient-based hyperparameter tuning."""

from fedsign.capability import Capability, Kind

CAPABILITY = Capability(
    purpose="gradients through training: (FG)²U, data condensation, gradient-based hyperparameter tuning",
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
                    "(FG)^2U: forward gradients along random directions, unbiased, memory independent of depth",
                ),
                "fg2u_zo": (
                    "fedsign.bilevel.forward_gradient:fg2u_zo",
                    "zeroth-order (FG)^2U: finite differences of whole trainings, for black boxes",
                ),
                "forward_exact": (
                    "fedsign.bilevel.forward_gradient:forward_exact",
                    "forward mode with one tangent per meta-parameter, exact, for few of them",
                ),
                "rgu": (
                    "fedsign.bilevel.hypergradients:rgu",
                    "reverse mode through the training, exact, memory grows with depth",
                ),
                "trgu": ("fedsign.bilevel.hypergradients:trgu", "reverse mode through the last steps only, biased"),
                "hessian_free": (
                    "fedsign.bilevel.hypergradients:hessian_free",
                    "implicit differentiation with the identity as inverse Hessian, biased",
                ),
                "neumann": (
                    "fedsign.bilevel.hypergradients:neumann",
                    "implicit differentiation with a truncated Neumann series for the inverse Hessian, biased",
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
