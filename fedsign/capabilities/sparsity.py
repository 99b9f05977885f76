"""Sparsity: sparse models, dynamic masks, and scaling by width and density: SμPar."""

from fedsign.capability import Capability, Kind

CAPABILITY = Capability(
    purpose="sparse models, changing masks, and scaling with width and density (SμPar)",
    modules=(
        "fedsign.parameterization",
        "simulations.sparsity",
    ),
    sections={
        "parameterization": "fedsign.parameterization.section:ParameterizationPart",
        "sparsity": "fedsign.parameterization.section:SparsityPart",
        "engine": "fedsign.parameterization.section:SparseKeys",
    },
    kinds={
        "parameterization": Kind(
            plural="parameterizations",
            table={
                "none": (
                    "fedsign.parameterization.schemes:none",
                    "the model's own initialization, one learning rate for all tensors",
                ),
                "sp": (
                    "fedsign.parameterization.schemes:Scheme",
                    "standard: initialization and learning rate independent of width and density",
                ),
                "mup": (
                    "fedsign.parameterization.schemes:MuP",
                    "maximal update: initialization and learning rates scale with width",
                ),
                "smupar": (
                    "fedsign.parameterization.schemes:SmuPar",
                    "sparse maximal update: initialization and learning rates scale with width and density",
                ),
            },
        ),
        "sparsity": Kind(
            plural="sparsities",
            table={
                "static": ("fedsign.parameterization.sparsity.static:static", "masks stay as they were drawn"),
                "rigl": (
                    "fedsign.parameterization.sparsity.rigl:RigL",
                    "RigL: drops the smallest weights, grows those with the largest gradients; one client, one round",
                ),
                "gmp": (
                    "fedsign.parameterization.sparsity.gmp:GMP",
                    "gradual magnitude pruning from dense to sparse; one client, one round",
                ),
            },
        ),
    },
    rows={
        "optimizer": {
            "packed_sgd": (
                "fedsign.parameterization.packed:packed_sgd",
                "SGD with momentum for the nonzero weights only",
            ),
            "packed_adamw": (
                "fedsign.parameterization.packed:packed_adamw",
                "AdamW with moments for the nonzero weights only",
            ),
        },
    },
    examples={
        "sparse": {"model": {"name": "mlp", "hidden": [8, 16]}, "parameterization": {"name": "sp", "density": 0.25}}
    },
    extends={
        "rules": "fedsign.parameterization.rules:RULES",
        "model_transform": "fedsign.parameterization.apply:parameterize_as",
    },
    moved={"fedsign.optim.packed": "fedsign.parameterization.packed"},
    commands={
        "analyze coordinates": "simulations.sparsity.command:coordinates",
        "analyze parameterization": "simulations.sparsity.command:parameterization",
        "tune transfer": "simulations.sparsity.command:transfer",
    },
    files=("docs/how-to/sparse-clients.md",),
)
