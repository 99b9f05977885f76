"""Findings on disk, in the log, and on the page."""

import logging
from pathlib import Path

import pytest

from fedsign.diagnosis.finding import FILE, Finding
from fedsign.report.page import render
from fedsign.report.summary import read
from simulations.api import run

FINDING = Finding(
    rule="plateau", source="run", message="the loss has not moved", remedy="raise client.lr=0.01", round=2
)


def test_a_finding_is_a_sentence_and_a_record(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fedsign"):
        FINDING.warn()
    assert caplog.messages == ["round 2: the loss has not moved; raise client.lr=0.01."]
    assert Finding(**FINDING.record) == FINDING


def test_the_page_shows_findings_and_a_resumed_run_drops_later_ones(tmp_path: Path) -> None:
    done = run({"rounds": 2, "callbacks": [], "results": {"root": str(tmp_path), "checkpoint_every": 1}})
    assert "Findings" not in render(read(done.folder))
    done.folder.append(FILE, FINDING.record)
    page = render(read(done.folder))
    assert "<b>Round 2</b><span>the loss has not moved; raise client.lr=0.01.</span>" in page
    assert page.index("Findings") < page.index("Learning curves")
    done.folder.rewind(1)
    assert done.folder.records(FILE) == []
