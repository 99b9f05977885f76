"""`fedsign analyse coordinates`: do activations keep their size when a model gets sparser?"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsign import plugins
from fedsign.config import ExperimentConfig, from_dict
from fedsign.errors import ConfigError
from fedsign.parameterisation.coordinates import Coordinates, coordinates
from fedsign.parameterisation.section import ParameterisationPart, SparsityPart
from fedsign.registry import one_of
from fedsign.report.analysis import Found
from fedsign.workload import Workload

VARIANTS = {  # what may be looked at -> the parameterisation, and what it differs in from the configuration's
    "sp": ("sp", {}),
    "mup": ("mup", {}),
    "smupar": ("smupar", {"corrects": "both"}),
    "smupar-init": ("smupar", {"corrects": "init"}),
    "smupar-rate": ("smupar", {"corrects": "rate"}),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What to look at; see the command's options."""

    schemes: Sequence[str] = ("sp", "mup", "smupar")
    densities: Sequence[float] = (1.0, 0.25, 0.0625)
    seeds: int = 3
    steps: int = 10


def check_sweep(schemes: Sequence[str], densities: Sequence[float]) -> None:
    """Raise ConfigError for a scheme that is not known, or a density that is none."""
    for name in schemes:
        if name not in VARIANTS:
            raise ConfigError(f"scheme '{name}' is not known.{one_of(name, VARIANTS)}.")
    for density in densities:
        if not 0 < density <= 1:
            raise ConfigError(f"--densities has {density:g}, but expected are numbers above 0 and at most 1.")


def variant(config: ExperimentConfig, scheme: str, density: float, **changes: Any) -> ExperimentConfig:
    """The same experiment under another parameterisation, with those of its settings that the other one takes.

    Raises:
        ConfigError: the configuration names no parameterisation.
    """
    part = ParameterisationPart.of(config)
    if not part.is_chosen:
        raise ConfigError(
            "parameterisation.name=none was given, but schemes are compared from one base; name it, such as --set "
            "parameterisation.name=smupar --set parameterisation.base_width=64."
        )
    name, own = VARIANTS[scheme]
    taken = plugins.names_of("parameterisation", name)
    settings = {key: value for key, value in part.settings.items() if key in taken}
    data = config.replace(**changes).model_dump(mode="json")
    return from_dict(data | {"parameterisation": settings | own | {"name": name, "density": density}})


def facts_of(config: ExperimentConfig) -> dict[str, Any]:
    """What a finding says of the experiment."""
    return {
        "model": config.model.name,
        "data": config.data.name,
        "optimizer": config.client.optimizer.name,
        "parameterisation": ParameterisationPart.of(config).model_dump(mode="json"),
        "sparsity": SparsityPart.of(config).model_dump(mode="json"),
    }


def look(config: ExperimentConfig, asked: Asked) -> Found:
    """Train each scheme at each density from each seed, and look at its activations.

    Raises:
        FedSignError: the model cannot be looked at.
    """
    check_sweep(asked.schemes, asked.densities)
    if not asked.schemes or not asked.densities or min(asked.seeds, asked.steps) < 1:
        raise ConfigError(
            f"{len(asked.schemes)} schemes, {len(asked.densities)} densities, --seeds={asked.seeds} and --steps={asked.steps} were "
            "given, but expected is one of each at least."
        )
    seen: list[Coordinates] = []
    for seed in range(config.seed, config.seed + asked.seeds):
        first: Workload | None = None
        for scheme, density in product(asked.schemes, asked.densities):
            workload = Workload(variant(config, scheme, density, seed=seed))
            if first is not None:
                workload.take_data(first)
            first = first or workload
            seen.append(coordinates(workload, steps=asked.steps))
    modules = seen[0].modules
    shape = (asked.seeds, len(asked.schemes), len(asked.densities), asked.steps + 1, len(modules))
    size, change = (
        np.moveaxis(np.reshape([getattr(each, what) for each in seen], shape), 0, 2) for what in ("size", "change")
    )
    rows = [
        {"scheme": scheme, "density": density, "step": step, "size": float(size[i, j, :, step].mean())}
        for (i, scheme), (j, density) in product(enumerate(asked.schemes), enumerate(asked.densities))
        for step in range(asked.steps + 1)
    ]
    return Found(
        kind="coordinates",
        name=config.name,
        facts={**asdict(asked), **facts_of(config), "lr": config.client.lr, "modules": modules},
        rows=rows,
        summary=_summary(asked, size, change),
        arrays={"size": size, "change": change},
    )


def _summary(asked: Asked, size: NDArray[Any], change: NDArray[Any]) -> list[dict[str, Any]]:
    """Ratios to the first density, paired by seed and module: their range at both ends, and of the first step's change."""
    rows = []
    for (i, scheme), (j, density) in product(enumerate(asked.schemes), enumerate(asked.densities)):
        row: dict[str, Any] = {"scheme": scheme, "density": density}
        for what, values, step in (("start", size, 0), ("end", size, -1), ("change", change, 1)):
            own, first = values[i, j, :, step], values[i, 0, :, step]
            ratios = np.divide(own, first, out=np.full_like(own, np.nan), where=first != 0)
            row |= {f"{what}_low": float(ratios.min()), f"{what}_high": float(ratios.max())}
        rows.append(row | {"size_at_end": float(size[i, j, :, -1].mean())})
    return rows
