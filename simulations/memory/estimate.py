"""`fedsign estimate memory`: from command options to a workload, and from estimates to a figure."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fedsign.config import ExperimentConfig
from fedsign.errors import ConfigError
from fedsign.memory.estimate import CATEGORIES, Estimate, Work
from fedsign.memory.methods import DEFAULT, blocks_of
from fedsign.memory.named import named_model
from fedsign.memory.step import EIGHT_BITS, Batch, next_tokens
from fedsign.optim.adamw_8bit import adamw_8bit
from fedsign.registry import one_of, resolve
from fedsign.report.chart import Axis, Chart, Series
from fedsign.report.wording import BYTE_UNITS, NARROW_SPACE, byte_count
from fedsign.workload import Workload

DEFAULT_TOKENS = 1024

_DTYPES = {"bf16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_MOMENTS = _DTYPES | {"8bit": EIGHT_BITS}
_NAMES = {"optimizer": "optimizer"}


def chart_of(rows: Sequence[Estimate], title: str, card_bytes: int | None) -> Chart:
    """Plot stacked bars of the memory at each method's peak; with several devices, on the fullest one."""
    peaks = [row.largest for row in rows]
    largest = max([peak.total_bytes for peak in peaks] + [card_bytes or 0])
    # one unit for all bars, the one that suits the largest
    unit = byte_count(largest).split(NARROW_SPACE)[1]
    size, positions, starts = 1000.0 ** BYTE_UNITS.index(unit), range(len(peaks)), [0.0] * len(peaks)
    series = []
    for color, category in enumerate(CATEGORIES):
        ends = [start + peak.by_category[category] / size for start, peak in zip(starts, peaks, strict=True)]
        name = _NAMES.get(category, category)
        series.append(Series(name=name, x=ends, y=positions, low=starts, mark="bar", color=color))
        starts = ends
    totals = [byte_count(row.largest.total_bytes) + (", too large" if row.fits is False else "") for row in rows]
    # on the last category, whose end is the end of the bar
    series[-1] = replace(series[-1], labels=totals)
    measured = [None if row.measured is None or row.measured.refused else row.measured.peak / size for row in rows]
    if any(measured):
        series.append(Series(name="measured", x=measured, y=positions, mark="point", color=7, is_open=True))
    names = [row.method for row in rows]
    return Chart(
        title=title + (", the fullest device" if rows[0].of_devices else ""),
        series=series,
        # a fifth to the right of the longest bar, for its label
        x=Axis(label=unit, limits=(0.0, 1.2 * largest / size)),
        y=Axis(categories=names),
        rules=[] if card_bytes is None else [(card_bytes / size, f"card of {byte_count(card_bytes)}")],
        description="; ".join(f"{name}: {total}" for name, total in zip(names, totals, strict=True)),
    )


def possible_methods(work: Work) -> list[str]:
    """Return the usual methods, without those that need blocks, or matrices in blocks, that the model lacks."""
    # shapes only: the weights of a 70B model would not fit here
    with torch.device("meta"):
        model = work.make()
    blocks = blocks_of(model)
    if not blocks:
        return ["full", "lora"]
    # GaLore projects gradients of matrices only
    has_matrices = any(parameter.dim() == 2 for block in blocks for parameter in block.parameters())
    impossible = ({"E+H+4L"} if len(blocks) < 4 else set()) | (set() if has_matrices else {"galore"})
    return [name for name in DEFAULT if name not in impossible]


def of_named(model: str, *, batch: int | None, tokens: int | None, checkpoint: bool) -> Work:
    """Return the workload of a model by name.

    Raises:
        ConfigError: there is no such model, or its maximum length is shorter.
    """
    named, tokens, batch = named_model(model), tokens or DEFAULT_TOKENS, batch or 1
    if named.longest is not None and tokens > named.longest:
        raise ConfigError(
            f"--tokens {tokens} was given, but {named.title} has {named.longest} positions; expected at most that."
        )
    return Work(
        title=f"{named.title}, {batch} x {tokens:,} tokens",
        make=partial(named.make, tokens, checkpoint),
        batch=lambda dtype: next_tokens(batch, tokens, named.vocabulary),
    )


def of_experiment(config: ExperimentConfig, *, batch: int | None, tokens: int | None, checkpoint: bool) -> Work:
    """Return the workload of a configured model, on a batch with the shape and type of its data.

    Raises:
        ConfigError: its memory is not that of a plain model, or an option applies only to named models.
    """
    if config.get("parameterization.density", 1.0) != 1 or config.get("parameterization.densities", None):
        raise ConfigError(
            "parameterization.density below 1 was given, but memory is estimated of models with all their weights; set "
            "parameterization.density=1 here."
        )
    if config.engine.precision != "float32":
        raise ConfigError(
            f"engine.precision={config.engine.precision} is estimated with all weights in it by --dtype "
            f"{config.engine.precision}; autocast, which keeps float32 weights beside it, is not: set "
            "engine.precision=float32 here."
        )
    if checkpoint:
        raise ConfigError(
            "--checkpoint is for a model by name; an experiment says it itself: --set "
            "model.checkpoint_activations=true."
        )
    if tokens is not None:
        raise ConfigError(
            f"--tokens {tokens} was given beside --config or --set; an experiment's rows are as long as its data says: "
            f"--set data.block_length={tokens}."
        )
    workload, client = Workload(config), config.client
    dataset, task = workload.dataset, workload.task
    # gradients accumulate over micro-batches, so that activations are of one micro-batch
    num = batch or min(client.batch_size, client.micro_batch or client.batch_size)
    # for shapes and types only, of which a small data set has too few rows
    features, targets = dataset.train.batch(torch.arange(min(num, len(dataset.train))))

    def make() -> nn.Module:
        # the bare factory: `Workload.make_model` would draw weights and move them to the device
        model: nn.Module = config.model.build(dataset.input_shape, dataset.num_outputs)
        return model

    def batch_of(dtype: torch.dtype) -> Batch:
        # token ids stay integers
        kind = dtype if features.is_floating_point() else features.dtype
        return Batch(
            features=torch.zeros((num, *features.shape[1:]), dtype=kind),
            targets=torch.zeros((num, *targets.shape[1:]), dtype=targets.dtype),
            # in float32, as in training
            loss=lambda outputs, wanted: task.loss(outputs.float(), wanted),
        )

    return Work(title=f"{config.model.name} on {config.data.name}, batches of {num}", make=make, batch=batch_of)


def chosen(option: str, name: str, expected: Any) -> Any:
    """Return the entry that an option names.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in expected:
        raise ConfigError(f"{option} {name} was given.{one_of(name, expected)}.")
    return name


def optimizer_types(config: ExperimentConfig, dtype: str) -> tuple[bool, str]:
    """Return whether an experiment's clients keep float32 masters of what trains, and the type of the moments.

    `dtype` is that of the weights.
    """
    low_precision = config.client.low_precision if dtype_of("--dtype", dtype).itemsize < 4 else "plain"
    if resolve("optimizer", config.client.optimizer.name) is adamw_8bit:
        return low_precision == "master", "8bit"
    return low_precision == "master", dtype if low_precision == "plain" else "float32"


def moments_of(option: str, name: str) -> torch.dtype:
    """Return the type of moments that an option names.

    Raises:
        ConfigError: there is none of that name.
    """
    return _MOMENTS[chosen(option, name, _MOMENTS)]


def dtype_of(option: str, name: str) -> torch.dtype:
    """Return the dtype that an option names.

    Raises:
        ConfigError: there is none of that name.
    """
    return _DTYPES[chosen(option, name, _DTYPES)]
