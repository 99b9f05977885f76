"""The comparisons in the documentation can be planned."""

import re
import shlex

import pytest

from fedsign.config import load
from fedsign.overrides import parse_override
from simulations.comparison.execution import is_for_all
from simulations.comparison.plan import make_plan
from simulations.comparison.request import STRATEGIES, Request, parse_axis
from tests.e2e.test_docs import PAGES, ROOT


def comparisons_in(page: str) -> list[str]:
    """The commands `fedsign compare ...` of a page that need no file of the reader's, each in one line."""
    text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
    found = re.findall(r"^fedsign compare --.*", text, flags=re.MULTILINE)
    return [each for each in found if "--resume" not in each and "mine:" not in each]


@pytest.mark.parametrize(
    "command",
    [each for page in PAGES for each in comparisons_in(page)],
    ids=lambda command: shlex.split(command, comments=True)[-1],
)
def test_a_comparison_in_the_documents_can_be_planned(command: str) -> None:
    """Without those that name a file of the reader's."""
    given: dict[str, list[str]] = {}
    words = shlex.split(command, comments=True)[2:]
    for option, value in zip(words[::2], words[1::2], strict=True):
        given.setdefault(option, []).append(value)
    settings_ = dict(map(parse_override, given.get("--set", [])))
    request = Request(
        strategies=given.get("--strategies", [",".join(STRATEGIES)])[0].split(","),
        seeds=tuple(range(int(given.get("--seeds", ["5"])[0]))),
        grid=dict(map(parse_axis, given.get("--grid", []))),
        by=dict(map(parse_axis, given.get("--by", []))),
        settings={key: value for key, value in settings_.items() if not is_for_all(key)},
    )
    base = load().replace(**{key: value for key, value in settings_.items() if is_for_all(key)})
    plan, _ = make_plan(base, request, name="planned", environment={})
    assert len(plan.cells) >= len(request.strategies) * len(request.seeds)
