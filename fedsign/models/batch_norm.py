"""Detect and freeze BatchNorm, the layers that mix the samples of a batch."""

from torch import nn

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def has_batch_norm(model: nn.Module) -> bool:
    """Whether a model has BatchNorm.  It cannot train on one value per channel, so a batch of one may raise."""
    return any(isinstance(module, BATCH_NORMS) for module in model.modules())


def freeze_batch_norm(model: nn.Module) -> None:
    """Put BatchNorm layers in eval mode, so that they use the running statistics without updating them."""
    for module in model.modules():
        if isinstance(module, BATCH_NORMS):
            module.eval()
