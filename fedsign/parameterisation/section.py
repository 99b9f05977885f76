"""The configuration's tables [parameterisation] and [sparsity], and how sparse layers are multiplied."""

from typing import Literal

from fedsign.sections import Part, Table

MaskDraw = Literal["bernoulli", "exact"]


class ParameterisationPart(Part):
    """How the model's start and its learning rates depend on width and density (`fedsign.parameterisation`)."""

    kind = "parameterisation"
    name: str = "none"


class SparsityPart(Part):
    """How the masks of a sparse model are drawn, and how they change while one client trains it in one round, unless they are `static`."""

    kind = "sparsity"
    name: str = "static"
    draw: MaskDraw = "bernoulli"  # see `fedsign.parameterisation.masks`


class SparseKeys(Table):
    """In [engine]."""

    sparse_products: Literal["auto", "dense", "csr"] = "auto"  # of sparse layers, in training; auto: csr where it pays
