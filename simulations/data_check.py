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

_MOST_CLASSES = 20
_NUM_FETCHED = 1_024  # samples that a lazy data set fetches; the start of a run fetches fewer


def check(config: ConfigArgument = None, overrides: SetOption = None, json: JsonOption = False) -> None:
    """Look for likely mistakes in the data, without training: scales, duplicates, classes, clients.

    A run does the same before its first round. Exits with code 1 if a run would be refused.
    """
    from fedsign import config as configs
    from fedsign.diagnosis.data import examine
    from fedsign.workload import Workload

    experiment = configs.load(config, overrides or [])
    workload = Workload(experiment)
    dataset = workload.dataset
    if not len(dataset.train):
        raise ConfigError(
            f"partition.name={experiment.partition.name} was given with engine.name={experiment.engine.name}, where "
            "the data stay at the sites: check a site's own with fedsign deploy check KIT --experiment FILE."
        )
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
        for finding, is_refused in found:
            console.print(
                f"[bold]{finding.rule}[/]{' [bold red]refused[/]' if is_refused else ''}: {escaped(str(finding))}"
            )
    if any(is_refused for _, is_refused in found):
        raise typer.Exit(1)


def _reading(dataset: Any) -> Iterator[str]:
    """How the data were read: the shape of a sample, the classes with their training samples, notes."""
    if dataset.text is None:
        yield f"features of a sample: {' x '.join(map(str, dataset.input_shape))}"
    if dataset.class_names:
        counts = Counter(dataset.train.targets.tolist())
        shown = [f"{name} {counts[label]:,}" for label, name in enumerate(dataset.class_names[:_MOST_CLASSES])]
        more = len(dataset.class_names) - len(shown)
        yield f"training samples of each class: {', '.join(shown)}{f', and {more} more classes' if more else ''}"
    yield from dataset.notes
