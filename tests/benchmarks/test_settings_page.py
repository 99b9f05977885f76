"""The reference page has every setting, with a line that says what it is."""

import re

import pytest

from benchmarks import settings
from fedsign.config import ExperimentConfig
from fedsign.registry import KINDS
from fedsign.sections import tables
from simulations import explain

PAGE = settings.page()
ANCHORS = re.findall(r'(?:<span id="|\{#)([^"}]+)', PAGE)


@pytest.mark.parametrize("section", ["", *(path for path, _ in tables(ExperimentConfig))])
def test_every_key_of_a_section_says_what_it_is(section: str) -> None:
    table = dict(tables(ExperimentConfig)).get(section, ExperimentConfig)
    keys = [key for key in table.model_fields if f"{section}.{key}".strip(".") not in dict(tables(ExperimentConfig))]
    assert not [key for key in keys if not explain.line_of(key, section=section)]
    assert {f"{section or explain.EXPERIMENT}.{key}" for key in keys} <= {*ANCHORS}


@pytest.mark.parametrize("kind", KINDS)
def test_every_setting_of_a_component_says_what_it_is(kind: str) -> None:
    silent = [
        f"{name}.{key}"
        for name in KINDS[kind].table
        for key in explain.settings_of(kind, name)
        if not explain.line_of(key, kind=kind, name=name)
    ]
    assert not silent, f"simulations/settings.toml says nothing of {silent}"


def test_no_anchor_is_there_twice() -> None:
    assert len(ANCHORS) == len({*ANCHORS})
