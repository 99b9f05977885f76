"""Refuse a run that cannot fit into this machine's memory, before it starts."""

from typing import Any

import torch

from fedsign.config import ExperimentConfig
from fedsign.errors import ConfigError
from fedsign.memory.machine import machine_bytes
from fedsign.report.wording import byte_count
from fedsign.sharding.section import ShardingSection
from fedsign.workload import Workload

# of the model in each process; if they fit more often, the run is not estimated, and its activations are not looked at
_COPIES = 8


def run_check(workload: Workload) -> list[dict[str, Any]]:
    """The extension point `run_check`.

    Raises:
        ConfigError: the run needs more than the machine has.
    """
    if workload.config.engine.name != "in_process":  # not accounted for: no model is built here
        return []
    is_gpu = workload.device.type == "cuda"
    has = torch.cuda.get_device_properties(workload.device).total_memory if is_gpu else machine_bytes()
    # each process may hold as many
    if _COPIES * workload.model_bytes * _num_processes(workload.config) < has:
        return []
    from simulations.memory.account import account  # only now: it imports what the run may not need

    try:
        needs = account(workload).peak_bytes
    except ConfigError:  # it is not accounted for
        return []
    if needs > has:
        raise ConfigError(
            f"this run needs about {byte_count(needs)} of memory, and {'the GPU' if is_gpu else 'this machine'} has "
            f"{byte_count(has)}; train less at a time (client.optimizer.name=lisa or lora), or take a smaller model."
        )
    return []


def _num_processes(config: ExperimentConfig) -> int:
    """This one, and those on this machine that train."""
    sharding, workers = ShardingSection.of(config), config.get("engine.workers", 1)
    others = sharding.ranks // sharding.machines if sharding.ranks > 1 else workers if workers > 1 else 0
    return 1 + int(others)
