"""Findings on pages: what looks wrong, and what to set."""

from dataclasses import dataclass

from fedsign.report.summary import Fact
from fedsign.storage.results import Record


@dataclass(frozen=True, kw_only=True, slots=True)
class FindingRow:
    """A finding, for the macro `findings` of the pages."""

    where: str
    sentence: str
    rule: str


def finding_row(record: Record, *, runs: str = "") -> FindingRow:
    """The row of a record of findings.jsonl; `runs` says whose it is, where there are several.

    >>> record = {"rule": "plateau", "message": "no loss has moved", "remedy": "raise client.lr", "round": 30}
    >>> finding_row(record, runs="FedAvg, seed 1").where, finding_row(record).where, finding_row(record).sentence
    ('FedAvg, seed 1, round 30', 'Round 30', 'no loss has moved; raise client.lr.')
    """
    at = f"round {record['round']}" if record["round"] else "data"
    return FindingRow(
        where=f"{runs}, {at}" if runs else at.capitalize(),
        sentence=f"{record['message']}; {record['remedy']}.",
        rule=record["rule"],
    )


def findings_facts(num: int, *, see: str = "see findings.jsonl") -> list[Fact]:
    """How many there are, for the head of a page and the end of a run; nothing if there are none."""
    return [Fact(name="findings", value=f"{num:,}", remark=f"likely mistakes, {see}")] if num else []
