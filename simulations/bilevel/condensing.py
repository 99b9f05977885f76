"""`fedsign condense`: a condensation on disk that can be resumed.

FOLDER/config.toml            the complete configuration
FOLDER/steps.jsonl            a record per step, with accuracies where measured; identical when repeated or resumed
FOLDER/timings.jsonl          the duration of each step
FOLDER/start.safetensors      the initial images
FOLDER/images.safetensors     what --resume needs: images, (soft) labels, Adam's moments, the number of steps
FOLDER/condensation.html      the page; images.png and start.png show the images
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from fedsign.bilevel.condensation import IMAGES, LABELS
from fedsign.bilevel.condense import Condensation, Progress
from fedsign.bilevel.settings import CondensationConfig, load
from fedsign.errors import ResultsError, ResumeError
from fedsign.storage.checkpoints import load_tensors, save_model
from fedsign.storage.digests import BLANK, chain_of, chained, check_seal, sealed
from fedsign.storage.disk import exclusive, write_text
from fedsign.storage.owned import check_writable
from fedsign.storage.results import read_records
from simulations.bilevel.page import FILES, write_page
from simulations.progress import display

Record = dict[str, Any]
CLASSES = "classes"
CONFIG, _STEPS, _TIMINGS = "config.toml", "steps.jsonl", "timings.jsonl"
_FIRST = {_STEPS: 0, _TIMINGS: 1}  # the step of a file's first record
_START, _IMAGES = "start.safetensors", "images.safetensors"


def condense(config: CondensationConfig, folder: Path) -> tuple[list[Record], list[Path]]:
    """Condense into a new folder. Return the records, the last of which has the accuracy, and the written files.

    Raises:
        ResultsError: the folder is not empty.
        FedSignError: the data or the methods do not fit.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ResultsError(
            f"{folder} holds something already; give another folder with --out, or resume with --resume {folder}."
        )
    # built and evaluated before the folder is made: a mistake leaves nothing behind
    condensation = Condensation(config)
    progress = condensation.begin()
    records = [{"step": 0, "accuracy": condensation.evaluate(progress.meta)}]
    folder.mkdir(parents=True, exist_ok=True)
    with _held(folder):
        save_model(folder / _START, _with_classes(condensation, progress))
        _save(folder, condensation, progress, records, [])
        # last: `resume` takes a folder with a configuration for complete
        write_text(folder / CONFIG, sealed(f"# digest: {BLANK}\n\n{config.to_toml()}"))
        return _go_on(condensation, progress, folder, records, [])


def resume(folder: Path) -> tuple[list[Record], list[Path]]:
    """Resume an interrupted condensation; the images are the same as without the interruption.

    Raises:
        ResultsError: the folder holds no condensation, or a damaged one.
    """
    if not (folder / CONFIG).exists():
        raise ResultsError(f"{folder} holds no condensation; 'fedsign condense --out {folder}' makes one.")
    with _held(folder):
        try:
            check_seal((folder / CONFIG).read_text(encoding="utf-8"))
            condensation = Condensation(load(folder / CONFIG))
            state = {key: each.to(condensation.device) for key, each in load_tensors(folder / _IMAGES).items()}
            progress = Progress(state, step=int(state.pop("step")))
            # derived from the labels and written for readers; here Adam would take it for a parameter
            del state[CLASSES]
            records, timings = (_read(folder / name, range(start, progress.step + 1)) for name, start in _FIRST.items())
        except (OSError, SafetensorError, KeyError, ValueError, ResumeError) as error:
            raise ResultsError(f"the condensation in {folder} cannot be read ({error}); make it again.") from error
        return _go_on(condensation, progress, folder, records, timings)


def _go_on(
    condensation: Condensation, progress: Progress, folder: Path, records: list[Record], timings: list[Record]
) -> tuple[list[Record], list[Path]]:
    config = condensation.config
    check_writable(folder, *FILES)
    with display(config.num_steps, start=progress.step, unit="step", first=f"condensation {folder}") as shown:
        accuracy = next(record["accuracy"] for record in reversed(records) if "accuracy" in record)
        while progress.step < config.num_steps:
            record = condensation.take(progress)
            # apart, so that steps.jsonl is the same whenever a condensation is repeated
            timings.append({"step": record["step"], "time_s": record.pop("time_s")})
            if progress.step % config.outer.evaluate_every == 0 or progress.step == config.num_steps:
                record["accuracy"] = accuracy = condensation.evaluate(progress.meta)
            records.append(record)
            if "accuracy" in record:
                _save(folder, condensation, progress, records, timings)
            shown.show(progress.step, {"accuracy": accuracy})
    before, after = (load_tensors(folder / name)[IMAGES].numpy() for name in (_START, _IMAGES))
    return records, [folder / _IMAGES, *write_page(folder, condensation, records, before=before, after=after)]


def _save(
    folder: Path, condensation: Condensation, progress: Progress, records: list[Record], timings: list[Record]
) -> None:
    """Save records before images: resuming drops the records of steps that the images have not reached."""
    for name, rows in ((_STEPS, records), (_TIMINGS, timings)):
        # each line's digest covers the line before, so the file is chained anew from its first line
        chain, text = "", ""
        for row in rows:
            text_line = chained(json.dumps(row), chain)
            chain, text = chain_of(text_line), f"{text}{text_line}\n"
        write_text(folder / name, text)
    save_model(folder / _IMAGES, _with_classes(condensation, progress))


def _with_classes(condensation: Condensation, progress: Progress) -> dict[str, torch.Tensor]:
    soft = progress.state.get(LABELS)
    classes = condensation.labels if soft is None else torch.softmax(soft, dim=-1)
    # a tensor, since a .safetensors file holds nothing else
    return {**progress.state, CLASSES: classes, "step": torch.tensor(progress.step)}


def _read(path: Path, steps: range) -> list[Record]:
    # records beyond the images belong to steps that are taken again
    rows = [row for row in read_records(path) if row["step"] in steps]
    if [row["step"] for row in rows] != [*steps]:
        raise ValueError(f"{path.name} lacks steps")
    return rows


def _held(folder: Path) -> Any:
    return exclusive(folder / "lock", name=f"the condensation {folder}")
