"""CITATION.cff names this version, and papers that the program names."""

import re
from pathlib import Path

import pytest

from fedsign._version import __version__

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_the_citation_has_the_version_of_the_program() -> None:
    assert f"\nversion: {__version__}\n" in TEXT


@pytest.mark.needs("bilevel", "partial", "privacy", "sharding", "sparsity")  # that alone name a paper
def test_every_paper_that_is_cited_is_named_in_the_code_or_the_documents() -> None:
    papers = re.findall(r"arXiv:(\d{4}\.\d{5})", TEXT)
    assert len(papers) == len({*papers}) > 10
    told = "".join(
        path.read_text("utf-8")
        for path in (*ROOT.glob("docs/**/*.md"), *ROOT.glob("fedsign/**/*.py"), *ROOT.glob("strategies/**/*.py"))
    )
    assert all(paper in told for paper in papers)
