"""Which models mix the samples of a batch."""

from torch import nn

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def has_batch_norm(model: nn.Module) -> bool:
    """Whether a model has BatchNorm, which cannot train on a single value per channel: a batch of one may raise."""
    return any(isinstance(module, BATCH_NORMS) for module in model.modules())


def freeze_batch_norm(model: nn.Module) -> None:
    """Put the BatchNorm layers into evaluation mode: they use the running statistics and leave them as they are."""
    for module in model.modules():
        if isinstance(module, BATCH_NORMS):
            module.eval()
