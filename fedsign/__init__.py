"""FedSign: mechanisms and contracts of a federated-learning laboratory.

This package is plain PyTorch; only the room `fedsign.flower` imports Flower.  Importing `fedsign`
itself imports nothing heavy, so that the command line answers at once.
"""

__version__ = "0.1.0"
