"""What `fedsign compare` does with its arguments."""

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsign import config as configs
from fedsign.comparison_folder import PLAN, Comparison
from fedsign.errors import ConfigError, ResultsError
from simulations.comparison import play as playing
from simulations.comparison.plan import NUM_SEEDS, STRATEGIES, parse_axis
from simulations.comparison.table import as_json, print_summary


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """The arguments as they were typed."""

    config: Path | None
    strategies: str | None
    seeds: str | None
    grid: list[str]
    by: list[str]
    overrides: list[str]
    name: str | None
    out: Path | None
    reference: str | None
    target: float | None
    validation_fraction: float | None
    workers: int | None
    resume: Path | None
    extend: bool
    retry_failed: bool
    export: Path | None

    @property
    def plans_something(self) -> bool:
        """Whether a plan is described that a resumed comparison, which has one, could not follow."""
        single = (
            self.config, self.strategies, self.seeds, self.name, self.out, self.reference, self.target,
            self.validation_fraction,
        )  # fmt: skip
        return any(value is not None for value in single) or bool(self.grid or self.by or self.overrides or self.extend)


def play(asked: Asked) -> Comparison:
    """Play the comparison that is asked for, or go on with it."""
    if asked.export is not None:
        _check_export(asked.export)
    if asked.resume is not None:
        if asked.plans_something:
            raise ConfigError(
                "--resume was given with options of a new plan; a comparison is gone on with as it was planned: drop them, "
                "or give the whole command again with --extend."
            )
        return playing.go_on(asked.resume, workers=asked.workers, retry_failed=asked.retry_failed)
    settings = dict(map(configs.parse_override, asked.overrides))
    return playing.compare(
        _base(asked),
        strategies=STRATEGIES if asked.strategies is None else _names(asked.strategies),
        seeds=NUM_SEEDS if asked.seeds is None else _seeds(asked.seeds),
        grid=_axes("--grid", asked.grid),
        by=_axes("--by", asked.by),
        settings={key: value for key, value in settings.items() if not playing.is_for_all(key)},
        name=asked.name,
        out=asked.out,
        reference=asked.reference,
        target=asked.target,
        validation_fraction=asked.validation_fraction,
        workers=asked.workers,
        extend=asked.extend,
        retry_failed=asked.retry_failed,
    )


def how_to_go_on(asked: Asked) -> str:
    """What Ctrl-C leaves on the terminal."""
    folder = asked.resume or asked.out
    if folder is None:
        folder = playing.folder_of(asked.name or _base(asked).name)
    if not (folder / PLAN).is_file():
        return "stopped."
    return f"stopped; go on with: fedsign compare --resume {shlex.quote(str(folder))}"


def present(done: Comparison, *, export: Path | None, print_json: Callable[[Any], None] | None) -> None:
    """The table, the page, and the tables and figures for a paper."""
    summary = done.summary()
    paths = {"page": done.path / "report.html", "folder": done.path}
    if export is not None:
        from fedsign.report.export import export as write_export

        write_export(summary, export)
        paths["export"] = export
    if print_json is not None:
        print_json(as_json(done, summary))
        return
    print_summary(done, summary)
    for what, path in paths.items():
        print(f"{what:<8}{path}")


def _base(asked: Asked) -> configs.ExperimentConfig:
    """The base experiment, with the settings that are not for single strategies."""
    of_all = [text for text in asked.overrides if playing.is_for_all(configs.parse_override(text)[0])]
    return configs.load(asked.config, of_all)


def _check_export(folder: Path) -> None:
    """Raise ResultsError if nothing could be exported in the end."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ResultsError(f"{there} is a file; give a folder, or the name of one to be made, to --export.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ResultsError(f"{there} cannot be written; give another folder to --export.")


def _axes(option: str, given: list[str]) -> dict[str, list[Any]]:
    """Key -> values, of `--grid` or `--by`."""
    axes: dict[str, list[Any]] = {}
    for key, values in (parse_axis(text, option=option) for text in given):
        if key in axes:
            raise ConfigError(f"{option} {key} was given twice; give all its values at once, separated by commas.")
        axes[key] = values
    return axes


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _seeds(text: str) -> int | list[int]:
    """`5`, or `0,3,7`."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"--seeds {text} was given, but expected is how many, such as 5, or which, such as 0,3,7."
        ) from error
    return numbers if "," in text else numbers[0]
