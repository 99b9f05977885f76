"""Rules, as data: which combinations of settings are refused.

A rule holds a condition, a sentence that says what is wrong, and a remedy.  Its texts are templates over the
checked's attributes and `found`, which is what `when` returned:

>>> import types
>>> rule = Rule(lambda its: its.ranks % its.groups, "ranks={ranks} leaves a remainder of {found}", "choose a divisor")
>>> rule.refusal(types.SimpleNamespace(ranks=4, groups=3))
'ranks=4 leaves a remainder of 1; choose a divisor'
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fedsign.errors import ConfigError
from fedsign.extensions import load

CheckedT = TypeVar("CheckedT")


@dataclass(frozen=True)  # no slots: they forbid `Rule[Experiment](...)`
class Rule(Generic[CheckedT]):
    """One refused combination."""

    when: Callable[[CheckedT], object]  # truthy if the combination is refused; available as {found}
    sentence: str
    remedy: str = ""

    def __str__(self) -> str:
        return re.sub(r"\{[^}]*\}", "...", "; ".join(filter(None, (self.sentence, self.remedy))))

    def refusal(self, checked: CheckedT) -> str:
        """Sentence and remedy; empty if the combination is allowed."""
        return "; ".join(filter(None, self.texts(checked)))

    def texts(self, checked: CheckedT) -> tuple[str, ...]:
        """Sentence and remedy; no text if the combination is allowed."""
        found = self.when(checked)
        return tuple(_filled(text, checked, found) for text in (self.sentence, self.remedy)) if found else ()


@dataclass(frozen=True, kw_only=True)
class Choice(Generic[CheckedT]):
    """An option of an experiment, and the rules that apply once it is chosen."""

    made: Callable[[CheckedT], object]
    rules: tuple[Rule[CheckedT], ...] | str  # or "module:NAME", imported when the choice is made
    given: str = ""  # prefix of each message
    remedy: str = ""  # suffix of each message

    def refusal(self, checked: CheckedT) -> str:
        """The message of the first broken rule; empty if the option is not chosen, or allowed."""
        why = self.why_not(checked) if self.made(checked) else ""
        return why and "; ".join(filter(None, (f"{_filled(self.given, checked, None)} {why}".lstrip(), self.remedy)))

    def why_not(self, checked: CheckedT) -> str:
        """Why the option is not allowed, as the middle of a sentence; empty if it is."""
        return next(filter(None, (rule.refusal(checked) for rule in self.all_rules)), "")

    @property
    def all_rules(self) -> tuple[Rule[CheckedT], ...]:
        """The rules, imported on first use."""
        rules: tuple[Rule[CheckedT], ...] = load(self.rules) if isinstance(self.rules, str) else self.rules
        return rules


def check(rules: Iterable[Rule[CheckedT] | Choice[CheckedT]], checked: CheckedT) -> None:
    """Raise ConfigError with the first refusal, if any."""
    for rule in rules:
        if refusal := rule.refusal(checked):
            raise ConfigError(f"{refusal}.")


@dataclass(frozen=True, slots=True)
class _Fields:
    """The fields of a template."""

    checked: Any
    found: object

    def __getitem__(self, name: str) -> Any:
        # lazily: only a template that names the model builds it
        return self.found if name == "found" else getattr(self.checked, name)


def _filled(template: str, checked: object, found: object) -> str:
    return template.format_map(_Fields(checked, found))
