"""The page of a run with privacy or with attackers: the budget, its meaning, and the attackers."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedsign.storage.results import RunFolder
from tests.unit.test_report import a_line, a_run, page_of, pictures, words


def a_private_run(path: Path, lines: list[dict[str, Any]], section: str, releases: Any = ()) -> RunFolder:
    folder = a_run(path, lines, outcome={"status": "finished"})
    config = path / "config.toml"
    config.write_text(config.read_text() + section)
    (path / "privacy.jsonl").write_text("".join(json.dumps(line) + "\n" for line in releases))
    return folder


CENTRAL = '\n[privacy]\nname = "central"\nclip_norm = 1.0\ndelta = 0.001\nsampling = "secret"\n'


def private_line(round: int, **values: Any) -> dict[str, Any]:
    """Without the figures that such a run leaves out."""
    line = a_line(round, epsilon=0.5 * round, **values)
    del line["train_loss"]
    return line


def test_the_budget_stands_on_the_page_with_what_it_counts_on(tmp_path: Path) -> None:
    page = page_of(a_private_run(tmp_path, [private_line(n) for n in (1, 2, 3)], CENTRAL))
    text = words(page)
    assert "ε = 1.50, δ = 0.001. The server, which is trusted" in text
    assert "nobody knowing which clients took part" in text and "operator’s" in text
    assert "dropped" not in text and "training, mean of the clients" not in text
    assert len(pictures(page)) > 3


def test_an_adaptive_norm_is_drawn_and_dropped_rounds_are_told(tmp_path: Path) -> None:
    lines = [private_line(n, clip_norm=0.1 * n) for n in (1, 2)]
    releases = [{"round": n, "epsilon": 0.5 * n} for n in (1, 2, 3)]
    text = words(page_of(a_private_run(tmp_path, lines, CENTRAL.replace("central", "central_adaptive"), releases)))
    assert "Clipping norm" in text and "(ε = 1.50 with rounds that were dropped)" in text


def test_without_noise_there_is_no_guarantee(tmp_path: Path) -> None:
    lines = [{**private_line(1), "epsilon": None}]
    assert "no guarantee, as there is no noise" in words(page_of(a_private_run(tmp_path, lines, CENTRAL)))


def test_with_local_privacy_the_page_says_so(tmp_path: Path) -> None:
    section = '\n[privacy]\nname = "local"\ndelta = 1e-5\n'
    text = words(page_of(a_private_run(tmp_path, [private_line(1)], section)))
    assert "add noise before they reply" in text and "nobody knowing" not in text


@pytest.mark.needs("robustness")
def test_malicious_clients_are_a_number_of_the_head(tmp_path: Path) -> None:
    section = '\n[attack]\nname = "sign_flip"\nfraction = 0.2\nstrength = 5.0\n'
    text = words(page_of(a_private_run(tmp_path, [a_line(1, malicious=1), a_line(2, malicious=2)], section)))
    assert "malicious clients 1.50 a round, sign_flip strength 5.0" in text


def test_a_run_without_either_says_nothing_of_them(tmp_path: Path) -> None:
    section = '\n[privacy]\nname = "none"\n\n[attack]\nname = "none"\nfraction = 0.2\n'
    text = words(page_of(a_private_run(tmp_path, [a_line(1)], section)))
    assert "ε" not in text and "malicious" not in text
