"""`fedsign condense`: a condensation on disk, that can be gone on with.

FOLDER/config.toml            the complete configuration
FOLDER/steps.jsonl            a line for each step, the same whenever it is repeated or resumed; accuracies where they were measured
FOLDER/timings.jsonl          how long each took
FOLDER/start.safetensors      the images it began with
FOLDER/images.safetensors     images, their classes (or shares of them), Adam's memory and the number of steps: what --resume goes on from
FOLDER/condensation.html      the page; images.png and start.png, the images as sheets
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from fedsign.bilevel.condensation import IMAGES, LABELS
from fedsign.bilevel.condense import Condensation, Progress
from fedsign.bilevel.report import write_condensation
from fedsign.bilevel.settings import CondensationConfig, load
from fedsign.errors import ResultsError
from fedsign.storage.checkpoints import save_model
from fedsign.storage.disk import exclusive, write_text

Line = dict[str, Any]
CLASSES = "classes"
_CONFIG, _STEPS, _TIMINGS = "config.toml", "steps.jsonl", "timings.jsonl"
_START, _IMAGES = "start.safetensors", "images.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """A finished condensation: its files, and its lines."""

    written: list[Path]
    lines: list[Line]

    @property
    def accuracy(self) -> float:
        """Test accuracy of networks trained on the images."""
        return float(self.lines[-1]["accuracy"])


def condense(config: CondensationConfig, folder: Path, *, on_step: Callable[[Line], None] = lambda line: None) -> Done:
    """Condense into a new folder.

    Raises:
        ResultsError: there is something in it already.
        FedSignError: the data or the methods do not fit.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ResultsError(
            f"{folder} holds something already; give another folder with --out, or go on with --resume {folder}."
        )
    condensation = Condensation(config)
    progress = condensation.begin()
    lines = [{"step": 0, "accuracy": condensation.evaluate(progress.meta)}]
    folder.mkdir(parents=True, exist_ok=True)
    with _held(folder):
        save_model(folder / _START, _with_classes(condensation, progress))
        _save(folder, condensation, progress, lines, [])
        write_text(folder / _CONFIG, config.to_toml())
        return _go_on(condensation, progress, folder, lines, [], on_step)


def resume(folder: Path, *, on_step: Callable[[Line], None] = lambda line: None) -> Done:
    """Go on with a condensation that was stopped: the same images as if it had not been.

    Raises:
        ResultsError: there is none in the folder, or it is damaged.
    """
    if not (folder / _CONFIG).exists():
        raise ResultsError(f"{folder} holds no condensation; 'fedsign condense --out {folder}' makes one.")
    condensation = Condensation(load(folder / _CONFIG))
    with _held(folder):
        try:
            tensors = {key: each.to(condensation.device) for key, each in load_file(folder / _IMAGES).items()}
            progress = Progress.of_tensors(tensors)
            lines, timings = (_read(folder / name, progress.step) for name in (_STEPS, _TIMINGS))
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise ResultsError(f"the condensation in {folder} cannot be read ({error}); make it again.") from error
        return _go_on(condensation, progress, folder, lines, timings, on_step)


def _go_on(
    condensation: Condensation,
    progress: Progress,
    folder: Path,
    lines: list[Line],
    timings: list[Line],
    on_step: Callable[[Line], None],
) -> Done:
    config = condensation.config
    for line in condensation.steps(progress):
        timings.append({"step": line["step"], "time_s": line.pop("time_s")})
        if progress.step % config.outer.evaluate_every == 0 or progress.step == config.num_steps:
            line["accuracy"] = condensation.evaluate(progress.meta)
        lines.append(line)
        if "accuracy" in line:
            _save(folder, condensation, progress, lines, timings)
        on_step(line)
    return Done(written=_page(condensation, folder, lines), lines=lines)


def _save(folder: Path, condensation: Condensation, progress: Progress, lines: list[Line], timings: list[Line]) -> None:
    """Lines first: those beyond the images' step are dropped when it goes on."""
    for name, rows in ((_STEPS, lines), (_TIMINGS, timings)):
        write_text(folder / name, "".join(json.dumps(row) + "\n" for row in rows))
    save_model(folder / _IMAGES, _with_classes(condensation, progress))


def _with_classes(condensation: Condensation, progress: Progress) -> dict[str, torch.Tensor]:
    soft = progress.meta.get(LABELS)
    return {**progress.as_tensors(), CLASSES: condensation.labels if soft is None else torch.softmax(soft, dim=-1)}


def _read(path: Path, step: int) -> list[Line]:
    rows: list[Line] = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["step"] <= step]


def _held(folder: Path) -> Any:
    return exclusive(folder / "lock", what=f"the condensation {folder}")


def _page(condensation: Condensation, folder: Path, lines: list[Line]) -> list[Path]:
    from simulations.api import environment

    config, network = condensation.config, condensation.config.network
    before, after = (load_file(folder / name)[IMAGES].numpy() for name in (_START, _IMAGES))
    first = config.first_phase
    kind = f"MLP {list(network.hidden)}" if network.kind == "mlp" else f"ConvNet of width {network.width}"
    facts = [
        ("data", config.data.name, f"{len(condensation.dataset.train):,} training images"),
        ("images", str(len(after)), f"{config.images_per_class} of each class, from {config.start}"),
        ("network", kind, f"{condensation.network.size:,} parameters"),
        ("training", f"{config.inner.depth} steps", f"at {config.inner.lr:g}, momentum {config.inner.momentum:g}"),
        ("method", config.method.name, f"{config.outer.steps} steps at {config.outer.lr:g}"),
    ]
    if first.steps:
        facts.append(("first phase", first.method.name, f"{first.steps} steps at {first.lr:g}"))
    begun, ended = lines[0]["accuracy"], lines[-1]["accuracy"]
    written = write_condensation(
        folder,
        name=config.name,
        headline=("accuracy", f"{100 * ended:.1f} %", f"{100 * begun:.1f} % at the start"),
        facts=facts,
        class_names=condensation.dataset.class_names,
        labels=condensation.labels.tolist(),
        before=before,
        after=after,
        lines=lines,
        config_toml=config.to_toml(),
        environment={key: str(value) for key, value in environment().items()},
    )
    return [folder / _IMAGES, *written]
