"""`fedsign analyze coordinates`: the size of activations during training, and of their change.

Paper: Dey et al. 2024 (arXiv 2405.15743), Figure 5, the coordinate check of Yang et al. 2022 (arXiv 2203.03466): with
correct rules, the mean |activation| does not depend on width and density, neither at initialization nor after any
number of steps.  Measured are the outputs of the modules that the model's roles mark as watched: attention and
feed-forward of each block, or hidden layers.

All measurements use the first training batch, so that only the model changes.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain, islice, product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsign import plugins
from fedsign.config import ExperimentConfig, from_dict
from fedsign.errors import ConfigError
from fedsign.models.transform import prepare_training
from fedsign.optim.base import optimizer_of
from fedsign.parameterization.roles import roles_of_model
from fedsign.parameterization.section import ParameterizationPart, SparsityPart
from fedsign.registry import one_of
from fedsign.report.analysis import Analysis
from fedsign.report.chart import Axis, Chart, Series
from fedsign.report.figures import Draw, draw
from fedsign.seeding import Purpose, generator
from fedsign.workload import Workload
from simulations.progress import display

VARIANTS = {  # name -> the parameterization, and its differences from the configured one
    "sp": ("sp", {}),
    "mup": ("mup", {}),
    "smupar": ("smupar", {"corrects": "both"}),
    "smupar-init": ("smupar", {"corrects": "init"}),
    "smupar-rate": ("smupar", {"corrects": "rate"}),
}


def check_sweep(schemes: Sequence[str], densities: Sequence[float]) -> None:
    """Raise ConfigError for an unknown scheme or an invalid density."""
    for name in schemes:
        if name not in VARIANTS:
            raise ConfigError(f"scheme '{name}' is not known.{one_of(name, VARIANTS)}.")
    for density in densities:
        if not 0 < density <= 1:
            raise ConfigError(f"--densities has {density:g}, but expected numbers above 0 and at most 1.")


def variant(config: ExperimentConfig, scheme: str, density: float, **changes: Any) -> ExperimentConfig:
    """Return the experiment under another parameterization, with the settings that apply to both.

    Raises:
        ConfigError: the configuration has no parameterization.
    """
    part = ParameterizationPart.of(config)
    if not part.is_chosen:
        raise ConfigError(
            "parameterization.name=none was given, but schemes are compared from one base; name it, such as --set "
            "parameterization.name=smupar --set parameterization.base_width=64."
        )
    name, own = VARIANTS[scheme]
    taken = plugins.names_of("parameterization", name)
    settings = {key: value for key, value in part.settings.items() if key in taken}
    data = config.replace(**changes).model_dump(mode="json")
    return from_dict(data | {"parameterization": settings | own | {"name": name, "density": density}})


def facts_of(config: ExperimentConfig) -> dict[str, Any]:
    """Return the facts that a result records about the experiment."""
    return {
        "model": config.model.name,
        "data": config.data.name,
        "optimizer": config.client.optimizer.name,
        "parameterization": ParameterizationPart.of(config).model_dump(mode="json"),
        "sparsity": SparsityPart.of(config).model_dump(mode="json"),
    }


def measure(
    config: ExperimentConfig, *, schemes: Sequence[str], densities: Sequence[float], seeds: int, steps: int
) -> Analysis:
    """Train each scheme at each density from each seed, and measure its activations.

    Raises:
        FedSignError: the model cannot be measured.
    """
    check_sweep(schemes, densities)
    if not schemes or not densities or min(seeds, steps) < 1:
        raise ConfigError(
            f"{len(schemes)} schemes, {len(densities)} densities, --seeds={seeds} and --steps={steps} were given, "
            "but expected one of each at least."
        )
    sizes, changes = [], []
    with display(seeds * len(schemes) * len(densities), unit="training") as shown:
        for seed in range(config.seed, config.seed + seeds):
            # per seed: data depend on the seed, but not on scheme and density
            first: Workload | None = None
            for scheme, density in product(schemes, densities):
                workload = Workload(variant(config, scheme, density, seed=seed))
                if first is not None:
                    workload.take_data(first)
                first = first or workload
                modules, of_modules, changes_of_modules = _watched(workload, steps)
                sizes.append(of_modules)
                changes.append(changes_of_modules)
                shown.show(len(sizes))
    # size, change: [schemes, densities, seeds, steps + 1, modules]
    shape = (seeds, len(schemes), len(densities), steps + 1, len(modules))
    size, change = (np.moveaxis(np.reshape(each, shape), 0, 2) for each in (sizes, changes))
    rows = [
        {"scheme": scheme, "density": density, "step": step, "size": float(size[i, j, :, step].mean())}
        for (i, scheme), (j, density) in product(enumerate(schemes), enumerate(densities))
        for step in range(steps + 1)
    ]
    options = {"schemes": schemes, "densities": densities, "seeds": seeds, "steps": steps}
    return Analysis(
        kind="coordinates",
        name=config.run_name,
        facts=options | facts_of(config) | {"lr": config.client.lr, "modules": modules},
        rows=rows,
        summary=_summary(schemes, densities, size, change),
        arrays={"size": size, "change": change},
        drawn_by=coordinate_figures,
    )


def _summary(
    schemes: Sequence[str], densities: Sequence[float], size: NDArray[Any], change: NDArray[Any]
) -> list[dict[str, Any]]:
    """Summarize ratios to the first density, paired by seed and module, as ranges; also of the first step's change."""
    rows = []
    for (i, scheme), (j, density) in product(enumerate(schemes), enumerate(densities)):
        row: dict[str, Any] = {"scheme": scheme, "density": density}
        for name, values, step in (("start", size, 0), ("end", size, -1), ("change", change, 1)):
            own, first = values[i, j, :, step], values[i, 0, :, step]
            # NaN where the first density's activation is 0, which has no ratio
            ratios = np.divide(own, first, out=np.full_like(own, np.nan), where=first != 0)
            row |= {f"{name}_low": float(ratios.min()), f"{name}_high": float(ratios.max())}
        rows.append(row | {"size_at_end": float(size[i, j, :, -1].mean())})
    return rows


def _watched(workload: Workload, steps: int) -> tuple[Sequence[str], NDArray[np.float64], NDArray[np.float64]]:
    """Train centrally with the clients' optimizer, measuring activations before every step.

    Returns:
        The watched modules, the mean |activation| of each [steps + 1, modules], and of its change since initialization.

    Raises:
        ConfigError: the model has no watched modules.
    """
    model, client = workload.make_model().train(), workload.config.client
    prepare_training(model)
    modules = roles_of_model(model).watched
    if not modules:
        raise ConfigError(
            f"model.name={workload.config.model.name} has no hidden layer to watch; give it two or more layers, or "
            "name modules in model_roles.watched."
        )
    optimizer = optimizer_of(client.optimizer, model, client.lr, client.weight_decay)
    batches = drawn_batches(workload)
    probe = next(batches)
    first = _activations(model, modules, probe[0])
    sizes, changes = [_means(first)], [np.zeros(len(modules))]
    # the first step is on the probe itself, which `next` has taken from the stream
    for features, targets in chain([probe], islice(batches, steps - 1)):
        optimizer.zero_grad()
        workload.training_task.loss(model(features, **workload.labels(targets)), targets).backward()
        if client.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), client.clip_norm)
        optimizer.step()
        now = _activations(model, modules, probe[0])
        sizes.append(_means(now))
        changes.append(_means([new - old for new, old in zip(now, first, strict=True)]))
    return modules, np.stack(sizes), np.stack(changes)


def drawn_batches(workload: Workload) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random batches of all samples without end."""
    samples, size = workload.training_samples, workload.config.client.batch_size
    rng = generator(workload.config.seed, Purpose.BATCHES)
    while True:
        yield samples.batch(torch.from_numpy(rng.choice(len(samples), size=min(size, len(samples)), replace=False)))


def _means(activations: Sequence[Tensor]) -> NDArray[np.float64]:
    # float64: ratios between densities are compared to a few digits
    return np.array([activation.abs().mean(dtype=torch.float64).item() for activation in activations])


def _activations(model: nn.Module, modules: Sequence[str], features: Tensor) -> list[Tensor]:
    outputs: dict[str, Tensor] = {}

    def record(name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        outputs[name] = output

    with torch.no_grad(), ExitStack() as hooks:
        for name in modules:
            hooks.enter_context(model.get_submodule(name).register_forward_hook(partial(record, name)))
        model(features)
    return [outputs[name] for name in modules]


def coordinate_figures(analysis: Analysis) -> dict[str, Draw]:
    """Return the plots by name; with correct rules their lines coincide."""
    sizes = analysis.arrays["size"].mean((2, 4))  # [schemes, densities, steps + 1]
    charts = []
    for scheme, of_scheme in zip(analysis.facts["schemes"], sizes.tolist(), strict=True):
        series = [
            Series(name=f"{density:g}", x=range(len(values)), y=values, color=color)
            for color, (density, values) in enumerate(zip(analysis.facts["densities"], of_scheme, strict=True))
        ]
        limits = (float(sizes.min()) / 1.2, float(sizes.max()) * 1.2)
        y = Axis(label="mean |activation|", scale="log", limits=limits)
        charts.append(Chart(title=scheme, series=series, x=Axis(label="step"), y=y))
    return {"size": partial(draw, *charts, height=2.3, legend="density")}
