"""Import torchvision beside a CPU-only torch.

The default torchvision wheel has operators compiled for CUDA.  Beside a CPU-only torch they do not load, and
`import torchvision` fails: it registers fake implementations of two operators that do not exist.  Declaring their
schemas is enough.  The operators belong to detection models, which FedSign does not use.
"""

import importlib
from types import ModuleType

import torch

_MISSING_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


def torchvision(module: str = "torchvision") -> ModuleType:
    """Import torchvision or one of its modules.

    >>> torchvision("torchvision.datasets").MNIST.__name__
    'MNIST'
    """
    try:
        return importlib.import_module(module)
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
    _declare_missing_schemas()
    return importlib.import_module(module)


def _declare_missing_schemas() -> None:
    # FRAGMENT extends the library that torchvision defines; the schemas are declared only if missing.
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name, schema in _MISSING_SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            library.define(schema)
    _KEEP_ALIVE.append(library)  # schemas vanish with the object that defined them


_KEEP_ALIVE: list[torch.library.Library] = []
