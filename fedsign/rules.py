"""Rules, as data: which combinations of settings are refused.

A rule holds a condition, a sentence that says what is wrong, and a remedy.  Its texts are templates over the
subject's attributes and `found`, which is what `when` returned:

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

SubjectT = TypeVar("SubjectT")


@dataclass(frozen=True)  # no slots: they forbid `Rule[Experiment](...)`
class Rule(Generic[SubjectT]):
    """One refused combination."""

    when: Callable[[SubjectT], object]  # truthy if the combination is refused; available as {found}
    sentence: str
    remedy: str = ""

    def __str__(self) -> str:
        return re.sub(r"\{[^}]*\}", "...", "; ".join(filter(None, (self.sentence, self.remedy))))

    def refusal(self, subject: SubjectT) -> str:
        """Sentence and remedy; empty if the combination is allowed."""
        found = self.when(subject)
        if not found:
            return ""
        return "; ".join(_filled(text, subject, found) for text in (self.sentence, self.remedy) if text)


@dataclass(frozen=True, kw_only=True)
class Choice(Generic[SubjectT]):
    """An option of an experiment, and the rules that apply once it is chosen."""

    made: Callable[[SubjectT], object]
    rules: tuple[Rule[SubjectT], ...] | str  # or "module:NAME", imported when the choice is made
    given: str = ""  # prefix of each message
    remedy: str = ""  # suffix of each message

    def refusal(self, subject: SubjectT) -> str:
        """The message of the first broken rule; empty if the option is not chosen, or allowed."""
        why = self.why_not(subject) if self.made(subject) else ""
        return why and "; ".join(filter(None, (f"{_filled(self.given, subject, None)} {why}".lstrip(), self.remedy)))

    def why_not(self, subject: SubjectT) -> str:
        """Why the option is not allowed, as the middle of a sentence; empty if it is."""
        return next(filter(None, (rule.refusal(subject) for rule in self.all_rules)), "")

    @property
    def all_rules(self) -> tuple[Rule[SubjectT], ...]:
        """The rules, imported on first use."""
        rules: tuple[Rule[SubjectT], ...] = load(self.rules) if isinstance(self.rules, str) else self.rules
        return rules


def check(rules: Iterable[Rule[SubjectT] | Choice[SubjectT]], subject: SubjectT) -> None:
    """Raise ConfigError with the first refusal, if any."""
    for rule in rules:
        if refusal := rule.refusal(subject):
            raise ConfigError(f"{refusal}.")


@dataclass(frozen=True, slots=True)
class _Fields:
    """The fields of a template."""

    subject: Any
    found: object

    def __getitem__(self, name: str) -> Any:
        return self.found if name == "found" else getattr(self.subject, name)


def _filled(template: str, subject: object, found: object) -> str:
    return template.format_map(_Fields(subject, found))
