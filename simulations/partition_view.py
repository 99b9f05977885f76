"""`fedsign partition`: how an experiment's training samples are dealt out, without training anything."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any

import numpy as np

from fedsign import config as configs
from fedsign.data.partition.base import label_distance
from fedsign.errors import ConfigError
from fedsign.report import figures
from fedsign.report.population import Population, draw_clients, panels
from fedsign.report.template import render
from fedsign.report.wording import middle, plural
from fedsign.storage.disk import write_text
from fedsign.workload import Workload
from simulations.api import environment, split_facts

DEFAULT_PATH = Path("partition.svg")
_MAX_COLUMNS = 160
_LINE = 120  # characters above the picture
_SAID_IN_THE_PICTURE = ("clients", "training samples", "samples per client", "classes per client")


def look(config: Path | None, overrides: Sequence[str], path: Path | None) -> dict[str, Any]:
    """Split the data of a configuration, draw the split into `path`, if one is given, and return its facts.

    Raises:
        FedSignError: the configuration is wrong, the data cannot be split so, or the picture not written.
    """
    if path is not None:
        figures.check_name(path, ".html")  # before data is read, which may take minutes
    facts = describe(Workload(configs.load(config, overrides)))
    if path is not None:
        draw(facts, path)
    return facts | {"picture": None if path is None else str(path)}


def describe(workload: Workload) -> dict[str, Any]:
    """The facts of a split, as JSON takes them.

    `label_skew` is the mean over clients of the total variation between a client's label histogram and that of all
    training samples: 0 where every client has the mix of the whole, toward 1 where each has rare classes only.
    Of a large lazy population everything is said of the `counted_clients`.
    """
    config, record, train = workload.config, split_facts(workload), workload.dataset.train
    names, counts = workload.dataset.class_names, record["counts"]
    if not counts:
        raise ConfigError(
            f"partition.name={config.partition.name} was given with engine.name={config.engine.name}, where what a "
            "site holds stays with it; look at it where the sites' folders lie, with engine.name=in_process and "
            "partition.roots."
        )
    sizes = [sum(row) for row in counts]
    held = [sum(count > 0 for count in row) for row in counts]
    is_shared = record.get("samples_are_shared", False)
    total = len(train) if is_shared else sum(sizes)
    whole = np.sum(counts, axis=0, keepdims=True)
    if is_shared and names:
        whole = np.bincount(train.targets.numpy(), minlength=len(names))[None]
    return {
        "data": config.data.name,
        "seed": config.seed,
        "partition": {"name": config.partition.name, **config.partition.settings},
        "clients": len(workload.partition),
        "samples": {
            "total": total,
            "left_out": len(train) - total,
            "min": min(sizes),
            "median": median(sizes),
            "max": max(sizes),
        },
        "classes": {"total": len(names), "min": min(held), "mean": sum(held) / len(held), "max": max(held)}
        if names
        else None,
        "label_skew": label_distance(counts, np.repeat(whole, len(counts), axis=0)) if names else None,
        **record,
    }


def rows(facts: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The facts for a reader: (name, value, remark)."""
    samples, classes, moved = facts["samples"], facts["classes"], facts["num_moved"]
    left = samples["left_out"]  # by a partition of the user's own
    counted, is_shared = facts.get("counted_clients"), facts.get("samples_are_shared")
    remark = (
        f"{left:,} more are left out" if left else "every client draws its own from all of them" if is_shared else ""
    )
    said = [
        (
            "clients",
            f"{facts['clients']:,}",
            f"the figures are of {len(counted):,}, evenly spaced from the first to the last" if counted else "",
        ),
        ("training samples", f"{samples['total']:,}", remark),
        (
            "samples per client",
            middle([sum(row) for row in facts["counts"]]),
            f"the median; from {samples['min']:,} to {samples['max']:,}",
        ),
    ]
    if classes:
        said += [
            (
                "classes per client",
                f"{classes['mean']:.1f}",
                f"the mean; from {classes['min']} to {classes['max']} of {classes['total']}",
            ),
            (
                "label skew",
                f"{facts['label_skew']:.3f}",
                "mean total variation between a client's labels and all labels",
            ),
        ]
    distance = facts["moved_label_distance"]
    remark = ""
    if moved:
        remark = "to give every client its minimum"
        if distance is not None:
            remark += f"; mean total variation between labels drawn and dealt: {distance:.4f}"
    return [*said, ("moved", plural(moved, "sample"), remark)]


def title(facts: Mapping[str, Any]) -> str:
    """Which split of which data."""
    settings = dict(facts["partition"])
    name = settings.pop("name")
    said = "".join(f", {key} = {value}" for key, value in settings.items())
    return f"{facts['data']}: {name}{said}, seed {facts['seed']}"


def draw(facts: Mapping[str, Any], path: Path) -> None:
    """Write the picture of a split: a page that loads nothing, or a figure.

    Raises:
        ResultsError: it cannot be written.
    """
    clients = replace(Population.of(facts), max_columns=_MAX_COLUMNS)
    others = [row for row in rows(facts) if row[0] not in _SAID_IN_THE_PICTURE]
    if path.suffix.lower() == ".html":
        page = render(
            "split.html.jinja",
            title=title(facts),
            sizes=clients.size_sentence(),
            facts=others,
            clients=clients,
            panels=panels(clients),
            caption=clients.caption(),
            environment=environment(),
        )
        write_text(path, page)
        return
    said = [f"{name}: {value} ({remark})" if remark else f"{name}: {value}" for name, value, remark in others]
    lines = [title(facts), clients.size_sentence(), *said, clients.caption()]
    above = "\n".join(fill(line, _LINE) for line in lines)
    figures.write(partial(draw_clients, clients, title=above), path)
