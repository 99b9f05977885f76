"""`fedsign condense`: a condensation on disk, that can be gone on with.

FOLDER/config.toml            the complete configuration
FOLDER/steps.jsonl            a line for each step, the same whenever it is repeated or resumed; accuracies where they were measured
FOLDER/timings.jsonl          how long each took
FOLDER/start.safetensors      the images it began with
FOLDER/images.safetensors     images, their classes (or shares of them), Adam's memory and the number of steps: what --resume goes on from
FOLDER/condensation.html      the page; images.png and start.png, the images as sheets
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from fedsign.bilevel.condensation import IMAGES, LABELS
from fedsign.bilevel.condense import Condensation, Progress
from fedsign.bilevel.settings import CondensationConfig, load
from fedsign.errors import ResultsError
from fedsign.storage.checkpoints import save_model
from fedsign.storage.disk import exclusive, write_text
from simulations.bilevel.page import write_page

Line = dict[str, Any]
CLASSES = "classes"
_CONFIG, _STEPS, _TIMINGS = "config.toml", "steps.jsonl", "timings.jsonl"
_START, _IMAGES = "start.safetensors", "images.safetensors"


def condense(config: CondensationConfig, folder: Path) -> tuple[list[Line], list[Path]]:
    """Condense into a new folder: the lines, of which the last one has the accuracy, and the files.

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
        return _go_on(condensation, progress, folder, lines, [])


def resume(folder: Path) -> tuple[list[Line], list[Path]]:
    """Go on with a condensation that was stopped: the same images as if it had not been.

    Raises:
        ResultsError: there is none in the folder, or it is damaged.
    """
    if not (folder / _CONFIG).exists():
        raise ResultsError(f"{folder} holds no condensation; 'fedsign condense --out {folder}' makes one.")
    condensation = Condensation(load(folder / _CONFIG))
    with _held(folder):
        try:
            state = {key: each.to(condensation.device) for key, each in load_file(folder / _IMAGES).items()}
            progress = Progress(state, step=int(state.pop("step")))
            del state[CLASSES]
            lines, timings = (_read(folder / name, progress.step) for name in (_STEPS, _TIMINGS))
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise ResultsError(f"the condensation in {folder} cannot be read ({error}); make it again.") from error
        return _go_on(condensation, progress, folder, lines, timings)


def _go_on(
    condensation: Condensation, progress: Progress, folder: Path, lines: list[Line], timings: list[Line]
) -> tuple[list[Line], list[Path]]:
    config = condensation.config
    while progress.step < config.num_steps:
        line = condensation.take(progress)
        timings.append({"step": line["step"], "time_s": line.pop("time_s")})
        if progress.step % config.outer.evaluate_every == 0 or progress.step == config.num_steps:
            line["accuracy"] = condensation.evaluate(progress.meta)
        lines.append(line)
        if "accuracy" in line:
            _save(folder, condensation, progress, lines, timings)
    before, after = (load_file(folder / name)[IMAGES].numpy() for name in (_START, _IMAGES))
    return lines, [folder / _IMAGES, *write_page(folder, condensation, lines, before=before, after=after)]


def _save(folder: Path, condensation: Condensation, progress: Progress, lines: list[Line], timings: list[Line]) -> None:
    """Lines first: those beyond the images' step are dropped when it goes on."""
    for name, rows in ((_STEPS, lines), (_TIMINGS, timings)):
        write_text(folder / name, "".join(json.dumps(row) + "\n" for row in rows))
    save_model(folder / _IMAGES, _with_classes(condensation, progress))


def _with_classes(condensation: Condensation, progress: Progress) -> dict[str, torch.Tensor]:
    soft = progress.state.get(LABELS)
    classes = condensation.labels if soft is None else torch.softmax(soft, dim=-1)
    return {**progress.state, CLASSES: classes, "step": torch.tensor(progress.step)}


def _read(path: Path, step: int) -> list[Line]:
    rows: list[Line] = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["step"] <= step]


def _held(folder: Path) -> Any:
    return exclusive(folder / "lock", what=f"the condensation {folder}")
