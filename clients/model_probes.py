"""What a model does in a training pass, by its layers or by making one: for trainers that compute parts of a batch apart."""

import copy

import torch
from torch import Tensor, nn

from fedsign.models.batch_norm import BATCH_NORMS
from fedsign.seeding import Purpose, torch_stream

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def dropouts(model: nn.Module) -> list[nn.Module]:
    """The layers that drop something."""
    return [module for module in model.modules() if isinstance(module, DROPOUTS) and module.p > 0]


def shares_tensors(model: nn.Module) -> bool:
    """Whether two layers have a parameter or buffer in common."""
    return not set(model.state_dict()) <= {*dict(model.named_parameters()), *dict(model.named_buffers())}


def mixes_samples(model: nn.Module, pair: Tensor) -> bool:
    """Whether the output for the first of two inputs [2, ...] depends on the second, BatchNorm and dropout aside."""
    still = copy.deepcopy(model)
    for module in still.modules():
        if isinstance(module, BATCH_NORMS + DROPOUTS):
            module.eval()
    with torch.no_grad(), torch_stream(0, Purpose.TRAINING):  # for draws that no layer of ours makes
        together, alone = still(pair)[:1], still(pair[:1])
    return not torch.allclose(together, alone, rtol=1e-3, atol=1e-5)


def moved_buffer(model: nn.Module, batch: Tensor) -> str:
    """The name of a buffer that a training pass changes, those of BatchNorm aside; empty if there is none."""
    model = copy.deepcopy(model)
    norms = [name for name, module in model.named_modules() if isinstance(module, BATCH_NORMS)]
    before = {name: buffer.clone() for name, buffer in model.named_buffers() if name.rpartition(".")[0] not in norms}
    with torch.no_grad(), torch_stream(0, Purpose.TRAINING):
        model(batch)
    return next((name for name, was in before.items() if not torch.equal(model.get_buffer(name), was)), "")
