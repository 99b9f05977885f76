"""`fedsign estimate memory`: from what was asked to a work and a setting, and from estimates to a table and a picture."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import nn

from fedsign.errors import ConfigError
from fedsign.memory.chart import Stack, draw_stacks
from fedsign.memory.estimate import CATEGORIES, Estimate, Setting, Work, estimate
from fedsign.memory.measure import Measured, measure
from fedsign.memory.methods import DEFAULT, blocks_of, methods_of
from fedsign.memory.named import subject_of
from fedsign.memory.step import AdamKind, AttentionKind, Batch, Device, Precision, next_tokens
from fedsign.registry import nearest
from fedsign.report.template import standalone
from fedsign.report.wording import byte_count
from fedsign.storage.disk import write_text
from simulations.sharding.quantities import bytes_of

if TYPE_CHECKING:
    from fedsign.config import ExperimentConfig

DEFAULT_MODEL = "llama-2-7b"
DEFAULT_TOKENS = 1024

_DTYPES = {"bf16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_NAMES = {"optimizer": "optimiser"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """The command's options, as they were given."""

    methods: list[str] | None = None
    model: str | None = None
    config: Path | None = None
    overrides: list[str] = field(default_factory=list)
    batch: int | None = None
    tokens: int | None = None
    dtype: str | None = None
    gradient_dtype: str | None = None
    state_dtype: str | None = None
    masters: bool = False
    rank: int = 128
    lora_dropout: float = 0.0
    attention: str = "fused"
    adamw: str = "fused"
    checkpoint: bool = False
    card: str | None = None
    devices: int = 1
    kernels: str | None = None
    measure: bool = False
    out: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One method."""

    estimate: Estimate
    fits: bool | None
    measured: Measured | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """All methods of one model."""

    title: str
    note: str
    card_name: str
    card_bytes: int | None
    rows: tuple[Row, ...]

    @property
    def num_parameters(self) -> int:
        """Of the model, without adapters."""
        return self.rows[0].estimate.num_parameters

    @property
    def has_devices(self) -> bool:
        """Whether the model lies on several."""
        return bool(self.rows[0].estimate.of_devices)

    @property
    def is_measured(self) -> bool:
        """Whether real steps were asked for."""
        return self.rows[0].measured is not None

    def as_json(self) -> dict[str, Any]:
        """All of it, for programs."""
        return {
            "title": self.title,
            "num_parameters": self.num_parameters,
            "card_bytes": self.card_bytes,
            "methods": [
                row.estimate.as_json()
                | ({} if row.fits is None else {"fits": row.fits})
                | ({} if row.measured is None else {"measured": row.measured.as_json()})
                for row in self.rows
            ],
        }


def look(asked: Asked) -> Found:
    """Estimate all methods, and measure them if that was asked for.

    Raises:
        ConfigError: an option cannot be used.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    card = None if asked.card is None else bytes_of(asked.card, option="--card")
    _check_picture(asked.out)
    setting = setting_of(asked, device)
    work = work_of(asked)
    names = possible_methods(work) if asked.methods is None else asked.methods
    methods = methods_of(names, rank=asked.rank, dropout=asked.lora_dropout)
    if not methods:
        raise ConfigError("--methods names none; expected are names such as full,lora,E+H+2L.")
    rows = []
    for method in methods:
        found = estimate(work, method, setting)
        measured = measure(work, method, setting, found, device) if asked.measure else None
        fits = None if card is None else found.largest.total_bytes <= card
        rows.append(Row(estimate=found, fits=fits, measured=measured))
    return Found(
        title=f"{work.title}, {_named(asked.dtype, asked)}",
        note=_note(setting, asked, device),
        card_name=asked.card or "",
        card_bytes=card,
        rows=tuple(rows),
    )


def draw(found: Found, path: Path) -> None:
    """Stacked bars of what is there at each method's peak; of several devices, on the fullest one."""
    stacks = [
        Stack(
            name=row.estimate.method,
            parts=[row.estimate.largest.by_category[category] for category in CATEGORIES],
            measured=None if row.measured is None or row.measured.refused else row.measured.peak,
        )
        for row in found.rows
    ]
    limit = None if found.card_bytes is None else (f"card of {byte_count(found.card_bytes)}", found.card_bytes)
    names = [_NAMES.get(category, category) for category in CATEGORIES]
    title = found.title + (", the fullest device" if found.has_devices else "")
    write_text(path, standalone(draw_stacks(stacks, names, title=title, limit=limit)) + "\n")


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


def setting_of(asked: Asked, device: torch.device) -> Setting:
    """Types and kernels.

    Raises:
        ConfigError: there is none of that name.
    """
    weights = _dtype("--dtype", asked.dtype or _own_dtype(asked))
    states = _dtype("--state-dtype", asked.state_dtype) if asked.state_dtype else weights
    if asked.masters and asked.state_dtype not in (None, "float32"):
        raise ConfigError(
            f"--masters was given with --state-dtype {asked.state_dtype}; copies for the optimiser are float32, and so are their "
            "moments: leave one of the two out."
        )
    if asked.measure and asked.devices > 1:
        raise ConfigError(
            f"--measure was given with --devices {asked.devices}, but a step is measured on one device; leave one of the two out."
        )
    here = device.type if asked.measure else "cuda"
    return Setting(
        precision=Precision(
            weights=weights,
            gradients=_dtype("--gradient-dtype", asked.gradient_dtype) if asked.gradient_dtype else weights,
            states=torch.float32 if asked.masters else states,
            masters=asked.masters,
        ),
        device=_one_of("--kernels", asked.kernels or here, get_args(Device)),
        attention=_one_of("--attention", asked.attention, get_args(AttentionKind)),
        adam=_one_of("--adamw", asked.adamw, get_args(AdamKind)),
        devices=asked.devices,
    )


def work_of(asked: Asked) -> Work:
    """A model by name, or an experiment's.

    Raises:
        ConfigError: both were given, or there is no such model.
    """
    if not _is_named(asked):
        if asked.model is not None:
            raise ConfigError(
                "--model was given beside --config or --set; an experiment has a model of its own: give one of the two."
            )
        return _of_experiment(asked)
    subject, tokens = subject_of(asked.model or DEFAULT_MODEL), asked.tokens or DEFAULT_TOKENS
    if subject.longest is not None and tokens > subject.longest:
        raise ConfigError(
            f"--tokens {tokens} was given, but {subject.title} has {subject.longest} positions; expected is at most that."
        )
    num = asked.batch or 1
    return Work(
        title=f"{subject.title}, {num} x {tokens:,} tokens",
        make=partial(subject.make, tokens, asked.checkpoint),
        batch=lambda dtype: next_tokens(num, tokens, subject.vocabulary),
    )


def _of_experiment(asked: Asked) -> Work:
    """The model of a configuration, on a batch of its own data's shape and type."""
    from fedsign.workload import Workload

    config = _experiment(asked)
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
    if asked.checkpoint:
        raise ConfigError(
            "--checkpoint is for a model by name; an experiment says it itself: --set model.checkpoint_activations=true."
        )
    if asked.tokens is not None:
        raise ConfigError(
            f"--tokens {asked.tokens} was given beside --config or --set; an experiment's rows are as long as its data says: "
            f"--set data.block_length={asked.tokens}."
        )
    workload, client = Workload(config), config.client
    dataset, task = workload.dataset, workload.task
    num = asked.batch or min(client.batch_size, client.micro_batch or client.batch_size)
    features, targets = dataset.train.batch(torch.arange(min(num, len(dataset.train))))

    def make() -> nn.Module:
        model: nn.Module = config.model.build(dataset.input_shape, dataset.num_outputs)
        return model

    def batch(dtype: torch.dtype) -> Batch:
        kind = dtype if features.is_floating_point() else features.dtype
        return Batch(
            features=torch.zeros((num, *features.shape[1:]), dtype=kind),
            targets=torch.zeros((num, *targets.shape[1:]), dtype=targets.dtype),
            loss=lambda outputs, wanted: task.loss(outputs.float(), wanted),
        )

    return Work(title=f"{config.model.name} on {config.data.name}, batches of {num}", make=make, batch=batch)


def _experiment(asked: Asked) -> "ExperimentConfig":
    from fedsign.config import load

    return load(asked.config, asked.overrides)


def _own_dtype(asked: Asked) -> str:
    """What the weights are held in where --dtype does not say it: bf16 for models by name, else what the experiment says."""
    return "bf16" if _is_named(asked) else str(_experiment(asked).model.settings.get("dtype", "float32"))


def _is_named(asked: Asked) -> bool:
    return asked.config is None and not asked.overrides


def _dtype(option: str, name: str) -> torch.dtype:
    return _DTYPES[_one_of(option, name, _DTYPES)]


def _one_of(option: str, name: str, expected: Any) -> Any:
    if name not in expected:
        raise ConfigError(
            f"{option} {name} was given.{nearest(name, expected)} Expected is one of {', '.join(expected)}."
        )
    return name


def _named(dtype: str | None, asked: Asked) -> str:
    name = dtype or _own_dtype(asked)
    return name + (" with float32 masters" if asked.masters else "")


def _note(setting: Setting, asked: Asked, device: torch.device) -> str:
    where = f"measured on {'the GPU' if device.type == 'cuda' else 'the CPU'}; " if asked.measure else ""
    return (
        f"{where}{setting.device} kernels, {setting.attention} attention, {setting.adam} AdamW. The peak is below the sum: gradients come "
        "while activations go. A device's context and libraries are not in it."
    )


def _check_picture(path: Path | None) -> None:
    if path is not None and path.suffix != ".svg":
        raise ConfigError(f"--out {path} was given; expected is a file that ends in .svg.")
