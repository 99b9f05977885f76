"""`fedsign estimate memory`: from the command's options to a work and a setting, and from estimates to a picture."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from fedsign.config import ExperimentConfig
from fedsign.errors import ConfigError
from fedsign.memory.estimate import CATEGORIES, Estimate, Setting, Work, estimate
from fedsign.memory.measure import Measured, measure
from fedsign.memory.methods import DEFAULT, blocks_of, methods_of
from fedsign.memory.named import subject_of
from fedsign.memory.step import AdamKind, AttentionKind, Batch, Device, Precision, next_tokens
from fedsign.registry import one_of
from fedsign.report import figures
from fedsign.report.chart import Axis, Chart, Series
from fedsign.report.wording import BYTE_UNITS, NARROW_SPACE, byte_count
from fedsign.workload import Workload

DEFAULT_TOKENS = 1024

_DTYPES = {"bf16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_NAMES = {"optimizer": "optimiser"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One method; without a card nothing fits or does not, and a real step is taken if that was asked for."""

    estimate: Estimate
    fits: bool | None
    measured: Measured | None

    def as_json(self) -> dict[str, Any]:
        """All of it, for programs."""
        found = self.estimate.as_json()
        if self.fits is not None:
            found["fits"] = self.fits
        if self.measured is not None:
            found["measured"] = self.measured.as_json()
        return found


def rows_of(
    work: Work,
    setting: Setting,
    methods: Sequence[str] | None,
    *,
    rank: int,
    dropout: float,
    card_bytes: int | None,
    measure_on: torch.device | None,
) -> list[Row]:
    """Estimate all methods, and measure them if there is a device for it; without names, those that the model can take.

    Raises:
        ConfigError: a method is unknown, or does not fit the model.
    """
    rows = []
    for method in methods_of(possible_methods(work) if methods is None else methods, rank=rank, dropout=dropout):
        found = estimate(work, method, setting)
        measured = None if measure_on is None else measure(work, method, setting, found, measure_on)
        fits = None if card_bytes is None else found.largest.total_bytes <= card_bytes
        rows.append(Row(estimate=found, fits=fits, measured=measured))
    if not rows:
        raise ConfigError("--methods names none; expected are names such as full,lora,E+H+2L.")
    return rows


def draw(rows: Sequence[Row], title: str, card_bytes: int | None, path: Path) -> None:
    """Write the picture of all methods."""
    chart = chart_of(rows, title, card_bytes)
    figures.write(partial(figures.draw, chart, width=figures.PAGE, titled=True), path)


def chart_of(rows: Sequence[Row], title: str, card_bytes: int | None) -> Chart:
    """Stacked bars of what is there at each method's peak; of several devices, on the fullest one."""
    peaks = [row.estimate.largest for row in rows]
    largest = max([peak.total_bytes for peak in peaks] + [card_bytes or 0])
    unit = byte_count(largest).split(NARROW_SPACE)[1]
    size, positions, starts = 1000.0 ** BYTE_UNITS.index(unit), range(len(peaks)), [0.0] * len(peaks)
    series = []
    for color, category in enumerate(CATEGORIES):
        ends = [start + peak.by_category[category] / size for start, peak in zip(starts, peaks, strict=True)]
        name = _NAMES.get(category, category)
        series.append(Series(name=name, x=ends, y=positions, low=starts, mark="bar", color=color))
        starts = ends
    totals = [
        byte_count(row.estimate.largest.total_bytes) + (", too large" if row.fits is False else "") for row in rows
    ]
    series[-1] = replace(series[-1], labels=totals)
    measured = [None if row.measured is None or row.measured.refused else row.measured.peak / size for row in rows]
    if any(measured):
        series.append(Series(name="measured", x=measured, y=positions, mark="point", color=7, is_open=True))
    names = [row.estimate.method for row in rows]
    return Chart(
        title=title + (", the fullest device" if rows[0].estimate.of_devices else ""),
        series=series,
        x=Axis(label=unit, limits=(0.0, 1.2 * largest / size)),
        y=Axis(categories=names),
        rules=[] if card_bytes is None else [(card_bytes / size, f"card of {byte_count(card_bytes)}")],
        description="; ".join(f"{name}: {total}" for name, total in zip(names, totals, strict=True)),
    )


def possible_methods(work: Work) -> list[str]:
    """The usual ones, without those that need blocks where the model has none, or matrices in them where these have none."""
    with torch.device("meta"):
        model = work.make()
    blocks = blocks_of(model)
    if not blocks:
        return ["full", "lora"]
    has_matrices = any(parameter.dim() == 2 for block in blocks for parameter in block.parameters())
    impossible = ({"E+H+4L"} if len(blocks) < 4 else set()) | (set() if has_matrices else {"galore"})
    return [name for name in DEFAULT if name not in impossible]


def setting_of(
    *,
    dtype: str,
    gradient_dtype: str | None,
    state_dtype: str | None,
    masters: bool,
    attention: str,
    adamw: str,
    kernels: str,
    devices: int,
) -> Setting:
    """Types and kernels.

    Raises:
        ConfigError: there is none of that name.
    """
    if masters and state_dtype not in (None, "float32"):
        raise ConfigError(
            f"--masters was given with --state-dtype {state_dtype}; copies for the optimiser are float32, and so are their "
            "moments: leave one of the two out."
        )
    return Setting(
        precision=Precision(
            weights=_dtype("--dtype", dtype),
            gradients=_dtype("--gradient-dtype", gradient_dtype or dtype),
            states=_dtype("--state-dtype", "float32" if masters else state_dtype or dtype),
            masters=masters,
        ),
        device=_one_of("--kernels", kernels, get_args(Device)),
        attention=_one_of("--attention", attention, get_args(AttentionKind)),
        adam=_one_of("--adamw", adamw, get_args(AdamKind)),
        devices=devices,
    )


def of_named(model: str, *, batch: int | None, tokens: int | None, checkpoint: bool) -> Work:
    """A model by name.

    Raises:
        ConfigError: there is no such model, or its rows are shorter.
    """
    subject, tokens, batch = subject_of(model), tokens or DEFAULT_TOKENS, batch or 1
    if subject.longest is not None and tokens > subject.longest:
        raise ConfigError(
            f"--tokens {tokens} was given, but {subject.title} has {subject.longest} positions; expected is at most that."
        )
    return Work(
        title=f"{subject.title}, {batch} x {tokens:,} tokens",
        make=partial(subject.make, tokens, checkpoint),
        batch=lambda dtype: next_tokens(batch, tokens, subject.vocabulary),
    )


def of_experiment(config: ExperimentConfig, *, batch: int | None, tokens: int | None, checkpoint: bool) -> Work:
    """The model of a configuration, on a batch of its own data's shape and type.

    Raises:
        ConfigError: its memory is not that of a plain model, or an option is for a model by name.
    """
    if config.get("parameterisation.density", 1.0) != 1 or config.get("parameterisation.densities", None):
        raise ConfigError(
            "parameterisation.density below 1 was given, but memory is estimated of models with all their weights; set "
            "parameterisation.density=1 here."
        )
    if config.engine.precision != "float32":
        raise ConfigError(
            f"engine.precision={config.engine.precision} is estimated with all weights in it by --dtype {config.engine.precision}; "
            "autocast, which keeps float32 weights beside it, is not: set engine.precision=float32 here."
        )
    if checkpoint:
        raise ConfigError(
            "--checkpoint is for a model by name; an experiment says it itself: --set model.checkpoint_activations=true."
        )
    if tokens is not None:
        raise ConfigError(
            f"--tokens {tokens} was given beside --config or --set; an experiment's rows are as long as its data says: "
            f"--set data.block_length={tokens}."
        )
    workload, client = Workload(config), config.client
    dataset, task = workload.dataset, workload.task
    num = batch or min(client.batch_size, client.micro_batch or client.batch_size)
    features, targets = dataset.train.batch(torch.arange(min(num, len(dataset.train))))

    def make() -> nn.Module:
        model: nn.Module = config.model.build(dataset.input_shape, dataset.num_outputs)
        return model

    def batch_of(dtype: torch.dtype) -> Batch:
        kind = dtype if features.is_floating_point() else features.dtype
        return Batch(
            features=torch.zeros((num, *features.shape[1:]), dtype=kind),
            targets=torch.zeros((num, *targets.shape[1:]), dtype=targets.dtype),
            loss=lambda outputs, wanted: task.loss(outputs.float(), wanted),
        )

    return Work(title=f"{config.model.name} on {config.data.name}, batches of {num}", make=make, batch=batch_of)


def _dtype(option: str, name: str) -> torch.dtype:
    return _DTYPES[_one_of(option, name, _DTYPES)]


def _one_of(option: str, name: str, expected: Any) -> Any:
    if name not in expected:
        raise ConfigError(f"{option} {name} was given.{one_of(name, expected)}.")
    return name
