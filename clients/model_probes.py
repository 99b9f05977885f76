"""Probe a model's behavior in a training pass, for trainers that compute parts of a batch separately."""

import copy

import torch
from torch import Tensor, nn

from fedsign.models.batch_norm import BATCH_NORMS
from fedsign.models.outside_state import changed_outside_state
from fedsign.numerics import is_low
from fedsign.seeding import Purpose, global_stream

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def dropouts(model: nn.Module) -> list[nn.Module]:
    """The active dropout layers."""
    return [module for module in model.modules() if isinstance(module, DROPOUTS) and module.p > 0]


def shares_tensors(model: nn.Module) -> bool:
    """Whether layers share a parameter or buffer."""
    # state_dict lists a shared tensor under each name, the others only under the first
    return not set(model.state_dict()) <= {*dict(model.named_parameters()), *dict(model.named_buffers())}


def complex_parameter(model: nn.Module) -> str:
    """The name of the first complex parameter; empty if there is none."""
    return next((name for name, parameter in model.named_parameters() if parameter.is_complex()), "")


def mixes_samples(model: nn.Module, pair: Tensor) -> bool:
    """Whether an output depends on the other sample of two [2, ...], apart from BatchNorm and dropout."""
    still = copy.deepcopy(model)
    for module in still.modules():
        if isinstance(module, BATCH_NORMS + DROPOUTS):
            module.eval()
    full = torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)  # TF32 rounds by batch size
    with torch.no_grad(), full, global_stream(0, Purpose.TRAINING):  # the stream fixes draws of custom layers
        together, alone = still(pair)[:1], still(pair[:1])
    return not is_alike(together, alone)


def is_alike(outputs: Tensor, others: Tensor) -> bool:
    """Whether outputs of other batches are equal but for rounding: kernels round by batch size."""
    if is_low(outputs):
        return bool((outputs - others).float().norm() <= 0.05 * others.float().norm())
    return torch.allclose(outputs, others, rtol=1e-3, atol=1e-5)


def carried_state(model: nn.Module, batch: Tensor) -> str:
    """The name of an attribute or unsaved buffer that every training pass changes; empty if there is none.

    Tables that the first pass makes, such as rotary ones, are not.
    """
    tried = copy.deepcopy(model)
    with torch.no_grad(), global_stream(0, Purpose.TRAINING):
        tried(batch)
        once = copy.deepcopy(tried)
        tried(batch[[0] * len(batch)])  # another batch, and none of one sample, which BatchNorm refuses
    return next(iter(changed_outside_state(tried, once)), "")


def moved_buffer(model: nn.Module, batch: Tensor) -> str:
    """The name of a buffer, apart from BatchNorm's, that a training pass changes; empty if there is none."""
    tried = copy.deepcopy(model)  # the pass must not move the caller's buffers
    norms = [name for name, module in model.named_modules() if isinstance(module, BATCH_NORMS)]
    with torch.no_grad(), global_stream(0, Purpose.TRAINING):
        tried(batch)
    named = ((name, buffer) for name, buffer in model.named_buffers() if name.rpartition(".")[0] not in norms)
    return next((name for name, was in named if not torch.equal(tried.get_buffer(name), was)), "")
