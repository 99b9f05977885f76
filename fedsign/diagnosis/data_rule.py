"""A rule about the data: a likely mistake, and what to set."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from fedsign.diagnosis.examined import Examined
from fedsign.diagnosis.finding import Finding
from fedsign.rules import Rule


@dataclass(frozen=True)
class DataRule(Rule[Examined]):
    """A likely mistake in the data."""

    name: str = ""
    refuses: bool = False
    holds_at_sites: bool = True  # else one site's data need not resemble the data of all

    def findings(self, data: Examined) -> Iterator[Finding]:
        """The finding, if any."""
        if (self.holds_at_sites or not data.is_at_site) and (texts := self.texts(data)):
            yield Finding(rule=self.name, source="data", message=texts[0], remedy=texts[1])


class Found(NamedTuple):
    """What a rule found, for its texts."""

    num: int = 0
    total: int = 0
    what: str = ""
    low: float = 0.0
    high: float = 0.0
    remedy: str = ""


def data_rule(name: str, when: Any, sentence: str, remedy: str = "{found.remedy}", **more: bool) -> DataRule:
    """A rule; `when` gives what was found, or None."""
    return DataRule(when, sentence, remedy, name=name, **more)


def found_columns(data: Examined, columns: list[int]) -> Found | None:
    """Features that should be left out; None without any."""
    if not columns:
        return None
    names, settings = data.dataset.feature_names, data.config.data.settings
    if not names:
        remedy = (
            f"leave them out, such as by np.delete(x, {columns[:5]}, axis=1)" if len(columns) < 6 else "leave them out"
        )
    elif settings.get("features"):
        remedy = "leave them out of data.features"
    else:
        remedy = f"leave them out: --set 'data.unused={extended(data, 'unused', (names[each] for each in columns))}'"
    return Found(num=len(columns), total=data.sample.shape[1], what=data.named(columns), remedy=remedy)


def extended(data: Examined, key: str, names: Iterable[str]) -> str:
    """A setting that lists columns, with further ones, in TOML."""
    listed = dict.fromkeys([*data.config.data.settings.get(key, ()), *names])
    return json.dumps([*listed], ensure_ascii=False)
