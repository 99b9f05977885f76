"""A client's round with an optimiser that trains a part of the model at a time: see `clients.partial.model`.

What the objective reads lies where it came, on the host, and so does what it keeps or sends after the round; while it trains, it
sees the same by way of the device.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from clients.partial.model import PartModel
from clients.working_model import WorkingModel
from fedsign.objectives.base import LocalContext
from fedsign.optim.base import PartTrainer
from fedsign.records import Tensors, TrainRequest


@contextmanager
def drawing(
    part: PartTrainer, model: WorkingModel, request: TrainRequest, *, seed: int, num_steps: int
) -> Iterator[None]:
    """Inside the block the optimiser draws what a client trains in this round.

    Steps are counted as if the client took part in every round, so that its draws need no memory: the first one of round t
    is number (t - 1) num_steps.
    """
    part.before_training = model.take if isinstance(model, PartModel) else None
    part.begin(seed=seed, client=request.partition, round=request.round, first_step=(request.round - 1) * num_steps)
    try:
        yield
    finally:
        part.end()
        part.before_training = None


def on_device(context: LocalContext, model: PartModel) -> LocalContext:
    """The same context while the model trains."""
    return replace(
        context,
        received=model.on_device(context.received),
        state=model.on_device(context.state),
        shared=model.on_device(context.shared),
    )


def all_parameters(model: WorkingModel, context: LocalContext, trained: Mapping[str, Tensor]) -> Tensors:
    """A model's parameters after the round, where the context's tensors lie; those that were not trained are as they came."""
    if not isinstance(model, PartModel):
        return model.detached()
    trained = model.whole(trained)
    return {name: trained.get(name, tensor).to(tensor.device) for name, tensor in context.received.items()}
