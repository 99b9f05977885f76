"""The `fedsign data check` command: options and printed results.

Importing this module imports neither torch nor Flower nor NumPy, so that `--help` stays fast.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import typer
from rich.console import Console

from fedsign.errors import ConfigError
from simulations.options import ConfigArgument, JsonOption, SetOption
from simulations.printing import escaped, print_json

_MOST = 20  # classes and columns that are named
_NUM_FETCHED = 1_024  # samples that a lazy data set fetches; the start of a run fetches fewer


def check(config: ConfigArgument = None, overrides: SetOption = None, json: JsonOption = False) -> None:
    """Look for likely mistakes in the data, without training: scales, duplicates, classes, clients.

    A run does the same before its first round. Exit codes: 0, a run would start, findings are warnings; 1, a
    finding would refuse it; 2, the data cannot be read.
    """
    from fedsign import config as configs
    from fedsign.diagnosis.data import examine
    from fedsign.workload import Workload
    from simulations import api

    experiment = configs.load(config, overrides or [])
    workload = Workload(experiment)
    dataset = workload.dataset
    if not len(dataset.train):
        raise ConfigError(
            f"partition.name={experiment.partition.name} was given with engine.name={experiment.engine.name}, where "
            "the data stay at the sites: check a site's own with fedsign deploy check KIT --experiment FILE."
        )
    workload = api.check(experiment, like=workload)  # whatever a run builds, so that it would start
    found = [(finding, rule.refuses) for rule, finding in examine(workload, num_fetched=_NUM_FETCHED)]
    if json:
        print_json([finding.record | {"is_refused": is_refused} for finding, is_refused in found])
    else:
        console = Console(soft_wrap=True, highlight=False)
        console.print(
            f"{len(dataset.train):,} training and {len(dataset.test):,} test samples, {len(workload.partition):,} "
            f"clients: {len(found) or 'no'} finding{'s' if len(found) > 1 else ''}"
        )
        for line in _reading(dataset):
            console.print(escaped(line))
        for warning in workload.data_warnings:
            console.print(f"[bold]warning[/]: {escaped(warning)}")
        for finding, is_refused in found:
            console.print(
                f"[bold]{finding.rule}[/]{' [bold red]refused[/]' if is_refused else ''}: {escaped(str(finding))}"
            )
    if any(is_refused for _, is_refused in found):
        raise typer.Exit(1)


def _reading(dataset: Any) -> Iterator[str]:
    """How the data were read: the shape of a sample, the columns, the classes with their training samples."""
    yield from dataset.read_as
    if dataset.text is None:
        yield f"features of a sample: {' x '.join(map(str, dataset.input_shape))}{_columns(dataset)}"
    target = dataset.target
    if target.class_names:
        counts = Counter(dataset.train.targets.tolist())
        named = [f"{_plain(name)} {counts[label]:,}" for label, name in enumerate(target.class_names)]
        yield f"training samples of each class: {_first(named, 'classes')}"
    elif target.shape and dataset.text is None:
        yield f"targets: {target}"


def _columns(dataset: Any) -> str:
    """The columns of a table, and how many features those with texts have."""
    if not dataset.feature_texts:
        return ""
    texts = dict(zip(dataset.feature_names, dataset.feature_texts, strict=True))
    nums = Counter(dataset.feature_names)
    named = [_plain(name) + ("" if text is None else f" ({nums[name]} texts)") for name, text in texts.items()]
    return f", of the columns {_first(named, 'columns')}"


def _first(words: list[str], kind: str) -> str:
    more = len(words) - _MOST
    return ", ".join(words[:_MOST]) + (f", and {more} more {kind}" if more > 0 else "")


def _plain(name: str) -> str:
    """A name, in quotes if white space at its ends would not be seen."""
    return name if name == name.strip() and name else f"'{name}'"
