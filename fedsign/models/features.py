"""The representation of a batch: the input of a model's classifier.

MOON (Li et al. 2021, arXiv 2103.16257) contrasts representations between models.  With a projection head
(`fedsign.models.head`) the representation is the projection.  Everything here works on plain PyTorch models, also
inside `torch.func.grad` and `torch.func.vmap`.

BatchNorm: a pass that only computes a representation must not update the running statistics, or a client would change
its model by evaluating another one.  In training mode it normalizes by the batch, like any training pass.  The authors'
code runs the received and the previous model in eval mode, with running statistics.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

from torch import Tensor, nn
from torch.func import functional_call

from fedsign.errors import ConfigError
from fedsign.models.batch_norm import BATCH_NORMS


def classifier_of(model: nn.Module) -> nn.Linear:
    """The attribute `classifier` if it is an nn.Linear, else the last registered nn.Linear.

    >>> classifier_of(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    Linear(in_features=3, out_features=2, bias=True)

    Raises:
        ConfigError: the model has no nn.Linear.
    """
    ends = getattr(model, "ends", None)  # language models declare their embedding and head
    if ends is not None and not isinstance(ends[-1], nn.Linear):
        raise ConfigError(
            f"the model ({type(model).__name__}) has no head of its own, whose input is the representation, "
            "since it is tied to the embedding; untie it, or use a strategy that needs none."
        )
    named = getattr(model, "classifier", None) if ends is None else ends[-1]
    if isinstance(named, nn.Linear):
        return named
    # order of registration, which need not be that of the forward pass; latest() detects an unused one
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not layers:
        raise ConfigError(
            f"the model ({type(model).__name__}) has no nn.Linear, but expected a linear classifier whose input is "
            "the "
            "representation; end the model with an nn.Linear, or use a strategy that needs none."
        )
    return layers[-1]


@contextmanager
def recorded_features(model: nn.Module) -> Iterator[Callable[[], Tensor]]:
    """Yield a function that returns the representation [n, d] of the model's latest forward pass.

    Raises:
        ConfigError: the model has no nn.Linear, or the forward pass did not use it.
    """
    captured: list[Tensor] = []
    classifier = classifier_of(model)

    def latest() -> Tensor:
        if not captured:
            raise ConfigError(
                f"the model ({type(model).__name__}) made no use of its last nn.Linear, whose input is the "
                "representation; name the classifier as the attribute `classifier`."
            )
        return captured[-1].flatten(1)

    def record(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        # the latest only: an older one would keep its graph alive
        captured[:] = inputs[:1]

    with classifier.register_forward_pre_hook(record):
        yield latest


def forward_with_features(
    model: nn.Module, tensors: Mapping[str, Tensor], inputs: Tensor, *, moves_buffers: bool = False
) -> tuple[Tensor, Tensor]:
    """Outputs [n, outputs] and representation [n, d] of a model with other tensors, for one pass.

    Neither the model nor `tensors` changes, unless `moves_buffers`: then BatchNorm updates the running statistics in
    `tensors`, as a training pass would (inside `vmap` they must be mapped, too).

    Args:
        tensors: Parameters and buffers by name; missing ones are taken from the model.

    Raises:
        ConfigError: the model has no nn.Linear.
    """
    if not moves_buffers:
        # copies, since custom layers may write buffers even with BatchNorm's update disabled
        buffers = {name: tensors.get(name, buffer).clone() for name, buffer in model.named_buffers()}
        tensors = {**tensors, **buffers}
    statistics = nullcontext() if moves_buffers else _statistics_left_alone(model)
    with statistics, recorded_features(model) as features:
        outputs: Tensor = functional_call(model, dict(tensors), (inputs,))
        return outputs, features()


@contextmanager
def _statistics_left_alone(model: nn.Module) -> Iterator[None]:
    """Disable BatchNorm's update in training mode; inside `vmap` it would write mapped into plain tensors."""
    tracking = [
        module
        for module in model.modules()
        if isinstance(module, BATCH_NORMS) and module.training and module.track_running_stats
    ]
    for module in tracking:
        # unlike eval(), this still normalizes by the batch
        module.track_running_stats = False
    try:
        yield
    finally:
        for module in tracking:
            module.track_running_stats = True
