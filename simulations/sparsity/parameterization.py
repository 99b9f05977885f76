"""`fedsign analyze parameterization`: what each tensor of an experiment's model gets, and why."""

from typing import Any

from fedsign.config import ExperimentConfig
from fedsign.errors import ConfigError
from fedsign.optim.base import optimizer_of
from fedsign.parameterization.apply import parameterized
from fedsign.parameterization.plan import forward_rows
from fedsign.workload import Workload


def describe(config: ExperimentConfig) -> dict[str, Any]:
    """Return plain numbers and texts. Rates and weight decay are the optimizer's, before any schedule.

    Raises:
        ConfigError: the experiment has no parameterization.
    """
    model, client = Workload(config).make_model(), config.client
    transform = parameterized(model)
    if transform is None:
        raise ConfigError(
            "parameterization.name=none was given, under which every tensor keeps the model's own start and "
            "client.lr; name a parameterization, such as --set parameterization.name=smupar."
        )
    plan = transform.plan
    optimizer = optimizer_of(client.optimizer, model, client.lr, client.weight_decay)
    # by identity: comparing parameters with == compares their elements
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    tensors = []
    for name, tensor in plan.tensors.items():
        parameter = model.get_parameter(name)
        group, mask = groups[id(parameter)], transform.masks.get(name)
        tensors.append(
            {
                "name": name,
                "shape": list(parameter.shape),
                "role": str(tensor.role),
                "density": tensor.density,
                "num_weights": parameter.numel() if mask is None else mask.num,
                "init_std": tensor.init_std,
                "rate": group["lr"],
                "weight_decay": group["weight_decay"],
                "why": tensor.why,
            }
        )
    num_weights = sum(each["num_weights"] for each in tensors)
    num_elements = sum(parameter.numel() for parameter in model.parameters())
    return {
        "scheme": plan.scheme.name,
        "sentence": f"{config.model.name} of width {plan.roles.width}, {num_weights:,} of {num_elements:,} weights, "
        f"{client.optimizer.name} with client.lr={client.lr:g}",
        "num_weights": num_weights,
        "num_elements": num_elements,
        "tensors": tensors,
        "passes": [{"module": name, "factor": factor, "why": why} for name, factor, why in forward_rows(plan)],
    }
