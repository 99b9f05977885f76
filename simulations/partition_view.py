"""`fedsign partition`: how an experiment's training samples are distributed, without any training."""

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
from fedsign.storage.owned import write_owned
from fedsign.workload import Workload
from simulations.api import environment, split_facts

DEFAULT_PATH = Path("partition.svg")
_MAX_COLUMNS = 160
_LINE = 120  # characters per line above the picture
_SHOWN_IN_PICTURE = ("clients", "training samples", "samples per client", "classes per client")


def inspect(config: Path | None, overrides: Sequence[str], path: Path | None) -> dict[str, Any]:
    """Partition a configuration's data, draw the partition if a path is given, and return its facts.

    Raises:
        FedSignError: the configuration is invalid, the data cannot be partitioned, or the picture cannot be written.
    """
    if path is not None:
        figures.check_name(path, ".html")  # before loading data, which may take minutes
    facts = describe(Workload(configs.load(config, overrides)))
    if path is not None:
        draw(facts, path)
    return facts | {"picture": None if path is None else str(path)}


def describe(workload: Workload) -> dict[str, Any]:
    """Return the facts of a partition as JSON values.

    `label_skew` is the mean over clients of the total variation distance between the label histograms of a client and
    of all training samples: 0 if every client has the global label distribution, near 1 if each has only rare classes.
    For a large lazy population, all facts are about the `counted_clients`.
    """
    config, record, train = workload.config, split_facts(workload), workload.dataset.train
    names, counts = workload.dataset.target.class_names, record["counts"]
    if not counts:
        raise ConfigError(
            f"partition.name={config.partition.name} was given with engine.name={config.engine.name}, where what a "
            "site holds stays with it; look at it where the sites' folders lie, with engine.name=in_process and "
            "partition.roots."
        )
    sizes = [sum(row) for row in counts]
    held = [sum(count > 0 for count in row) for row in counts]
    is_shared = record.get("samples_are_shared", False)
    # shared samples would be counted once per client
    total = len(train) if is_shared else sum(sizes)
    whole = np.sum(counts, axis=0, keepdims=True)
    if is_shared and names:
        whole = np.bincount(train.targets.numpy(), minlength=len(names))[None]
    return {
        "data": config.data_label,
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
    """Return the facts for display: (name, value, remark)."""
    samples, classes, moved = facts["samples"], facts["classes"], facts["num_moved"]
    left = samples["left_out"]  # by a custom partition
    counted, is_shared = facts.get("counted_clients"), facts.get("samples_are_shared")
    remark = (
        f"{left:,} more are left out" if left else "every client draws its own from all of them" if is_shared else ""
    )
    entries = [
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
        entries += [
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
    return [*entries, ("moved", plural(moved, "sample"), remark)]


def title(facts: Mapping[str, Any]) -> str:
    """Name the partition and its data."""
    settings = dict(facts["partition"])
    name = settings.pop("name")
    arguments = "".join(f", {key} = {value}" for key, value in settings.items())
    return f"{facts['data']}: {name}{arguments}, seed {facts['seed']}"


def draw(facts: Mapping[str, Any], path: Path) -> None:
    """Write the picture of a partition: a self-contained page, or a figure.

    Raises:
        ResultsError: it cannot be written.
    """
    clients = replace(Population.of(facts), max_columns=_MAX_COLUMNS)
    others = [row for row in rows(facts) if row[0] not in _SHOWN_IN_PICTURE]
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
        write_owned(path, lambda staged: write_text(staged, page))
        return
    details = [f"{name}: {value} ({remark})" if remark else f"{name}: {value}" for name, value, remark in others]
    lines = [title(facts), clients.size_sentence(), *details, clients.caption()]
    above = "\n".join(fill(line, _LINE) for line in lines)
    figures.write_picture(partial(draw_clients, clients, title=above), path)
