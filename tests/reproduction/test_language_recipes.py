"""Quick checks of the recipes of LISA and SμPar; a file of their own, since pytest-xdist runs a file in one process."""

from pathlib import Path

import pytest

from simulations.recipes import table as recipes
from simulations.recipes.base import Verdict


@pytest.mark.slow
def test_silos_fine_tune_a_language_model_that_transformers_loads() -> None:
    finding = recipes.get("federated-llm").check(quick=True)
    assert finding.as_expected, (finding.reason, finding.metrics)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smupar-coordinate-check", "smupar-dynamic", "smupar-pareto", "federated-smupar"])
def test_sparse_models_under_smupar(name: str) -> None:
    finding = recipes.get(name).check(quick=True)
    assert finding.as_expected, finding.metrics


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smupar-lr-transfer", "smupar-init-transfer", "smupar-ablation"])
def test_settings_of_a_dense_proxy_hold_for_sparse_models_under_smupar_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    finding = recipes.get(name).check(quick=True)
    assert finding.as_expected, finding.metrics
    assert finding.page is not None and finding.page.exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lisa-convergence", "lisa-ablation", "lisa-weight-norms", "federated-lisa"])
def test_lisa_fine_tunes_a_language_model(name: str) -> None:
    finding = recipes.get(name).check(quick=True)
    assert finding.as_expected, finding.metrics


@pytest.mark.slow
def test_the_speed_of_lisa_is_that_of_steps_taken_in_turn() -> None:
    metrics = recipes.get("lisa-speed").measure(True)  # the verdict is for a machine that does nothing else
    assert metrics.keys() == {"full_s", "lora_s", "lisa_s", "full_over_lisa", "lora_over_lisa", "full_over_lisa_flops"}
    assert (
        1.1 <= metrics["full_over_lisa_flops"] <= 1.2
    )  # 4 blocks, 2 of them trained: 3 / (1 + 1 + 1/2) without embedding and head
    assert all(value > 0 for value in metrics.values())


@pytest.mark.slow
def test_what_is_certain_of_the_lisa_papers_memory_holds_but_for_attention_without_a_kernel() -> None:
    finding = recipes.get("lisa-memory").check()
    assert finding.verdict is Verdict.IN_PART, finding.metrics
