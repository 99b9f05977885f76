"""The judge of a run: applies the rules to each round's record, and reports each finding once."""

from collections.abc import Collection

import torch

from fedsign.diagnosis.finding import FILE, Finding
from fedsign.diagnosis.run_rules import RULES, Facts
from fedsign.federation.exchange import RoundHook
from fedsign.storage.results import Record, RunFolder
from fedsign.workload import Workload


class Judge:
    """The rules of one run, except those `reported` already."""

    def __init__(self, facts: Facts, *, reported: Collection[str] = ()) -> None:
        self._rules = [rule(facts) for rule in RULES if rule.name not in reported]

    def see(self, record: Record) -> list[Finding]:
        """The findings of a round; the rules of these are not applied again."""
        found = []
        for rule in [*self._rules]:
            if message := rule.see(record):
                found.append(
                    Finding(rule=rule.name, source="run", message=message, remedy=rule.remedy, round=record["round"])
                )
                self._rules.remove(rule)
        return found


class JudgeHook(RoundHook):
    """Judges the rounds of a run; `withheld` are keys that are not published."""

    def __init__(self, judge: Judge, folder: RunFolder, *, withheld: Collection[str] = ()) -> None:
        self._judge, self._folder, self._withheld = judge, folder, withheld

    def write(self, record: Record, *, durable: bool) -> Record:
        """Judge the record as it will be published; it is returned unchanged."""
        published = {key: value for key, value in record.items() if key not in self._withheld}
        for finding in self._judge.see(published):
            finding.warn()
            self._folder.append(FILE, finding.record, durable=durable)
        return record


def round_hook(workload: Workload, strategy: object, folder: RunFolder, *, round: int) -> JudgeHook:
    """The extension point `round_hook`: the judge, who has seen the rounds before a resumption."""
    reported = [each["rule"] for each in folder.records(FILE) if each["source"] == "run"]
    judge = Judge(facts_of(workload), reported=reported)
    for record in folder.rounds() if round else ():
        judge.see(record)
    # with privacy, the aggregator withholds what it does not protect
    return JudgeHook(judge, folder, withheld=getattr(getattr(strategy, "aggregator", None), "withheld", ()))


def facts_of(workload: Workload) -> Facts:
    """What the rules know of an experiment."""
    dataset, config = workload.dataset, workload.config
    targets = dataset.test.targets
    is_of_classes = bool(dataset.target.class_names) and len(targets) > 0
    return Facts(
        num_clients=config.partition.num_clients,
        rounds=config.rounds,
        majority=float(torch.bincount(targets).max()) / len(targets) if is_of_classes else None,
        num_test=len(targets),
        can_select=config.get("results.patience", None) == 0 and config.get("results.keep_best", False) is False,
    )
