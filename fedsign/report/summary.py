"""The content of a run's page, computed from its folder as plain values for the template."""

import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsign.errors import ResultsError
from fedsign.naming import data_label
from fedsign.report import wording
from fedsign.report.population import Population, panels
from fedsign.storage.results import Record, RunFolder, changed_settings, final_value
from fedsign.storage.tags import Tags, read_tags

LAST = 5
"""The number of last rounds averaged for the headline."""

_MAX_FAILURES = 200
_SHOWN_ELSEWHERE = {"num_clients", "roots", "names", "input_shape", "test_root"}  # keys of a partition
_MAX_REASON = 600
_MOST_SETTINGS = 6  # in a remark


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run's files, read once."""

    path: Path
    config: Record
    config_toml: str
    environment: Record
    outcome: Record
    partition: Record
    rounds: Sequence[Record]
    timings: Sequence[Record]
    failures: Sequence[Record]
    findings: Sequence[Record] = ()
    tags: Tags = field(default_factory=Tags)

    def section(self, name: str) -> Record:
        """A table of the configuration, empty if missing."""
        table = self.config.get(name)
        return table if isinstance(table, dict) else {}

    @property
    def metrics(self) -> list[str]:
        """The names of the metrics, as in the records."""
        # a user's metric is `module:name`, its column in the records `name`
        return [str(name).rpartition(":")[2] for name in self.config.get("metrics", ())]

    def has(self, key: str) -> bool:
        """Whether any round has a value for this key."""
        return any(record.get(key) is not None for record in self.rounds)

    @property
    def round_numbers(self) -> list[int]:
        """The numbers of the completed rounds."""
        return [int(record["round"]) for record in self.rounds]

    def values(self, key: str) -> list[float | None]:
        """A metric's value in each round."""
        return [record.get(key) for record in self.rounds]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """A value in the page's head, with its name and a remark."""

    name: str
    value: str
    remark: str = ""


def read(folder: RunFolder) -> Run:
    """Read all inputs of the page.

    Raises:
        ResultsError: a file is missing or damaged.
    """
    try:
        config = tomllib.loads(folder.config_toml)
    except tomllib.TOMLDecodeError as error:
        raise ResultsError(f"{folder.path / 'config.toml'} cannot be read ({error}).") from error
    # a run stopped at its very start has no partition yet
    has_partition = (folder.path / "partition.json").exists()
    return Run(
        path=folder.path,
        config=config,
        config_toml=folder.config_toml,
        environment=folder.environment,
        outcome=folder.outcome,
        partition=folder.partition if has_partition else {"class_names": [], "counts": []},
        rounds=folder.rounds(),
        timings=folder.timings(),
        failures=folder.records("failures.jsonl"),
        findings=folder.findings(),
        tags=_tags(folder),
    )


def _tags(folder: RunFolder) -> Tags:
    try:
        return read_tags(folder)
    except ResultsError:
        return Tags(note="tags.json is damaged")  # no reason to have no page


def headline(run: Run) -> Fact:
    """The first metric, or else the loss, averaged over the last rounds."""
    return _final(run, run.metrics[0] if run.metrics else "loss")


def facts(run: Run, added: Iterable[Fact] = ()) -> list[Fact]:
    """The other facts in the head, including those added by capabilities."""
    rounds, partition = run.rounds, run.section("partition")
    down, up = (sum(record.get(key) or 0 for record in rounds) for key in ("bytes_down", "bytes_up"))
    seconds = sum(_seconds(record) for record in run.timings)
    num_clients = partition.get("num_clients", len(run.partition["counts"]))
    others = [*run.metrics[1:], "loss"] if run.metrics else []
    return [
        *(_final(run, key) for key in others),
        Fact(name="rounds", value=f"{len(rounds):,}", remark=f"of {run.config.get('rounds', len(rounds)):,} planned"),
        Fact(
            name="clients per round",
            value=wording.setting(run.section("server").get("cohort_size", "")),
            remark=f"of {num_clients:,}",
        ),
        *added,
        Fact(
            name="data",
            value=data_label(run.config) or wording.MISSING,
            remark=named(partition, without=_SHOWN_ELSEWHERE),
        ),
        Fact(name="model", value=_part_name(run.section("model")), remark=_settings(run.section("model"))),
        Fact(name="bytes down", value=wording.byte_count(down), remark="server to clients"),
        Fact(name="bytes up", value=wording.byte_count(up), remark="clients to server"),
        Fact(
            name="wall time",
            value=wording.duration(seconds) if run.timings else wording.MISSING,
            remark=f"{wording.duration(seconds / len(run.timings))} a round" if run.timings else "",
        ),
        *(
            [Fact(name="tags", value=", ".join(run.tags.tags) or wording.MISSING, remark=run.tags.note)]
            if run.tags != Tags()
            else []
        ),
    ]


def population(run: Run) -> dict[str, Any] | None:
    """The picture of the clients with its texts; None without a partition."""
    if not run.partition["counts"]:
        return None
    sampled = Counter(client for record in run.rounds for client in record.get("clients", ()))
    clients = Population.of(run.partition, sampled=sampled, num_rounds=len(run.rounds))
    return {
        "clients": clients,
        "panels": panels(clients),
        "sizes": clients.size_sentence(),
        "participation": clients.participation_sentence(),
        "caption": clients.caption(),
    }


def private_counts(run: Run) -> str:
    """A sentence for clients whose label counts are private, else empty."""
    if not run.partition.get("counts_are_private"):
        return ""
    num_clients = wording.plural(run.partition.get("num_clients", 0), "client")
    return f"{num_clients}, whose label counts stay with them: there is no picture of the split."


def failures(run: Run) -> dict[str, Any]:
    """All failures, deduplicated: one may be in both files, and twice if it ended the run."""
    all_failures = [
        (record["round"], record.get("partition"), str(record.get("reason", ""))) for record in run.failures
    ]
    for record in run.rounds:
        all_failures += [
            (record["round"], failure.get("client"), str(failure.get("reason", "")))
            for failure in record.get("failures", ())
        ]
    # a stable sort by round: within a round, failures stay in the order in which they were recorded
    unique = sorted(dict.fromkeys(all_failures), key=lambda row: row[0])
    rows = [
        (round, client, reason if len(reason) <= _MAX_REASON else reason[:_MAX_REASON] + " …")
        for round, client, reason in unique[:_MAX_FAILURES]
    ]
    return {"rows": rows, "total": len(unique)}


def settings_by_section(config: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """The settings by section; nested tables become their own sections."""
    sections: list[tuple[str, list[tuple[str, str]]]] = []

    def add(title: str, table: Mapping[str, Any]) -> None:
        leaves = [(key, wording.setting(value)) for key, value in table.items() if not isinstance(value, dict)]
        if leaves:
            sections.append((title, leaves))
        for key, value in table.items():
            if isinstance(value, dict):
                add(f"{title}.{key}" if table is not config else key, value)

    add("experiment", config)
    return sections


def settings_changed(run: Run) -> list[tuple[str, str, str]] | None:
    """Path, value and default of each setting that differs from its default; None for a run of an earlier version."""
    changed = changed_settings(run.config_toml)
    return (
        None
        if changed is None
        else [
            (path, wording.setting(value), "" if default is None else wording.setting(default))
            for path, (value, default) in changed.items()
        ]
    )


def strategy(run: Run) -> dict[str, Any]:
    """The name and settings of the strategy."""
    part = run.section("strategy")
    return {
        "name": _part_name(part),
        "settings": [(key, wording.setting(value)) for key, value in part.items() if key != "name"],
    }


def _final(run: Run, key: str) -> Fact:
    value = final_value(list(run.rounds), key, last=LAST)
    value_text = wording.figure(value, percent=wording.is_share(key))
    return Fact(name=f"test {key.replace('_', ' ')}", value=value_text, remark=_last_rounds(run, value))


def _last_rounds(run: Run, value: float | None) -> str:
    """The rounds over which a final value was averaged, or the reason why there is none."""
    if not run.rounds:
        return "no round was run"
    last = run.rounds[-LAST:]
    if value is None:
        return f"not finite in the last {wording.plural(len(last), 'round')}"
    if len(last) == 1:
        return f"round {last[0]['round']:,}"
    return f"mean of the last {len(last)} rounds"


def _seconds(timing: Record) -> float:
    return sum(value or 0.0 for key, value in timing.items() if key.endswith("_s"))


def _part_name(part: Record) -> str:
    return str(part.get("name", wording.MISSING))


def _settings(part: Record, *, without: frozenset[str] | set[str] = frozenset()) -> str:
    """The first few nonempty settings; the page lists all of them further down."""
    chosen = {key: value for key, value in part.items() if key not in {"name", *without} and value not in ("", [])}
    texts = [f"{key} {wording.setting(value)}" for key, value in chosen.items()]
    more = [f"{len(texts) - _MOST_SETTINGS} more"] if len(texts) > _MOST_SETTINGS else []
    return ", ".join(texts[:_MOST_SETTINGS] + more)


def named(part: Record, *, without: set[str]) -> str:
    """The name of a part and its settings."""
    return " ".join(filter(None, [_part_name(part), _settings(part, without=without)]))
