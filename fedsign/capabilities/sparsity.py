"""Sparsity: sparse models, dynamic masks, and scaling by width and density: SμPar."""

from fedsign.capability import Capability, Kind

CAPABILITY = Capability(
    purpose="sparse models, masks that change, and scaling by width and density: SμPar",
    modules=(
        "fedsign.parameterisation",
        "simulations.sparsity",
    ),
    sections={
        "parameterisation": "fedsign.parameterisation.section:ParameterisationPart",
        "sparsity": "fedsign.parameterisation.section:SparsityPart",
        "engine": "fedsign.parameterisation.section:SparseKeys",
    },
    kinds={
        "parameterisation": Kind(
            plural="parameterisations",
            table={
                "none": ("fedsign.parameterisation.schemes:none", "the model's own start, one learning rate for all"),
                "sp": (
                    "fedsign.parameterisation.schemes:Scheme",
                    "standard: one start and one rate at every width and density",
                ),
                "mup": ("fedsign.parameterisation.schemes:MuP", "maximal update: start and rates follow the width"),
                "smupar": (
                    "fedsign.parameterisation.schemes:SmuPar",
                    "sparse maximal update: start and rates follow width and density",
                ),
            },
        ),
        "sparsity": Kind(
            plural="sparsities",
            table={
                "static": ("fedsign.parameterisation.sparsity.static:static", "masks stay as they were drawn"),
                "rigl": (
                    "fedsign.parameterisation.sparsity.rigl:RigL",
                    "RigL: the smallest weights make way for those with the largest gradients; in one place",
                ),
                "gmp": (
                    "fedsign.parameterisation.sparsity.gmp:GMP",
                    "gradual magnitude pruning: from dense to sparse; in one place",
                ),
            },
        ),
    },
    rows={
        "optimizer": {
            "packed_sgd": (
                "fedsign.parameterisation.packed:packed_sgd",
                "SGD whose momentum is of the weights that a sparse model has",
            ),
            "packed_adamw": (
                "fedsign.parameterisation.packed:packed_adamw",
                "AdamW whose moments are of the weights that a sparse model has",
            ),
        },
    },
    examples={
        "sparse": {"model": {"name": "mlp", "hidden": [8, 16]}, "parameterisation": {"name": "sp", "density": 0.25}}
    },
    extends={
        "rules": "fedsign.parameterisation.rules:RULES",
        "model_transform": "fedsign.parameterisation.apply:parameterise_as",
    },
    moved={"fedsign.optim.packed": "fedsign.parameterisation.packed"},
    commands={
        "analyse coordinates": "simulations.sparsity.command:coordinates",
        "analyse parameterisation": "simulations.sparsity.command:parameterisation",
        "tune transfer": "simulations.sparsity.command:transfer",
    },
    files=("docs/how-to/sparse-clients.md",),
)
