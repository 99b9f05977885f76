"""Sparsity: sparse models, dynamic masks, and scaling by width and density: SμPar."""

from fedsign.capability import Capability, Kind

CAPABILITY = Capability(
    purpose="sparse models, masks that change, and scaling by width and density: SμPar",
    modules=(
        "fedsign.parameterisation",  # the former name
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
                "none": ("fedsign.parameterization.schemes:none", "the model's own start, one learning rate for all"),
                "sp": (
                    "fedsign.parameterization.schemes:Scheme",
                    "standard: one start and one rate at every width and density",
                ),
                "mup": ("fedsign.parameterization.schemes:MuP", "maximal update: start and rates follow the width"),
                "smupar": (
                    "fedsign.parameterization.schemes:SmuPar",
                    "sparse maximal update: start and rates follow width and density",
                ),
            },
        ),
        "sparsity": Kind(
            plural="sparsities",
            table={
                "static": ("fedsign.parameterization.sparsity.static:static", "masks stay as they were drawn"),
                "rigl": (
                    "fedsign.parameterization.sparsity.rigl:RigL",
                    "RigL: the smallest weights make way for those with the largest gradients; in one place",
                ),
                "gmp": (
                    "fedsign.parameterization.sparsity.gmp:GMP",
                    "gradual magnitude pruning: from dense to sparse; in one place",
                ),
            },
        ),
    },
    rows={
        "optimizer": {
            "packed_sgd": (
                "fedsign.parameterization.packed:packed_sgd",
                "SGD whose momentum is of the weights that a sparse model has",
            ),
            "packed_adamw": (
                "fedsign.parameterization.packed:packed_adamw",
                "AdamW whose moments are of the weights that a sparse model has",
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
