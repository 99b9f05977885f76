"""Memory estimates equal formulas over shapes, and an allocator's measurements."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedsign.errors import ConfigError
from fedsign.memory.estimate import CATEGORIES, Estimate, Setting, Work, estimate
from fedsign.memory.measure import measure
from fedsign.memory.methods import Method, methods_of
from fedsign.memory.named import NAMED, named_model
from fedsign.memory.step import EIGHT_BITS, next_tokens
from fedsign.models.gpt import gpt

CPU = torch.device("cpu")
FLOAT = torch.float32
SETTING = Setting(weights=FLOAT, gradients=FLOAT, states=FLOAT, device="cpu")
DEPTH, WIDTH, VOCABULARY, BATCH, TOKENS = 4, 64, 97, 2, 48
FFN = 4 * WIDTH
BLOCK = 4 * WIDTH * WIDTH + 4 * WIDTH + 2 * WIDTH * FFN + FFN + WIDTH + 4 * WIDTH  # attention, feed-forward, two norms
OUTSIDE = 2 * VOCABULARY * WIDTH + TOKENS * WIDTH + 2 * WIDTH  # embedding and head, positions, the last norm


def tiny(**settings: Any) -> Work:
    return Work(
        title="tiny",
        make=lambda: gpt((TOKENS,), VOCABULARY, **{"depth": DEPTH, "width": WIDTH, "tied": False, **settings}),
        batch=lambda dtype: next_tokens(BATCH, TOKENS, VOCABULARY),
    )


def method(name: str, rank: int = 8) -> Method:
    (found,) = methods_of([name], rank=rank)
    return found


def estimated(name: str, setting: Setting = SETTING, work: Work | None = None) -> Estimate:
    return estimate(tiny() if work is None else work, method(name), setting)


PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-70b": 68_976_648_192,
    "mistral-7b": 7_241_732_096,
    "tinyllama": 1_100_048_384,
    "gpt2-small": 124_439_808,
}


def test_every_named_model_has_a_published_size_here() -> None:
    assert PUBLISHED.keys() == NAMED.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_named_models_have_their_published_sizes(name: str) -> None:
    with torch.device("meta"):
        model = named_model(name).make(16, False)
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]


def test_full_training_keeps_a_gradient_and_two_moments_of_every_weight() -> None:
    found = estimated("full")
    num = OUTSIDE + DEPTH * BLOCK
    assert (found.num_parameters, found.num_trained) == (num, num)
    assert (found.weights_bytes, found.gradients_bytes, found.optimizer_bytes) == (4 * num, 4 * num, 8 * num)


@pytest.mark.parametrize("layers", [0, 1, 2, 4])
def test_lisa_keeps_them_of_what_is_outside_the_blocks_and_of_the_drawn_blocks(layers: int) -> None:
    found = estimated(f"E+H+{layers}L")
    trained = OUTSIDE + layers * BLOCK
    assert found.num_trained == trained
    assert found.static_bytes == 4 * (OUTSIDE + DEPTH * BLOCK) + 12 * trained


def test_lora_trains_r_times_the_sides_of_every_layer() -> None:
    rank = 8
    found = estimated("lora")
    of_block = rank * (4 * (WIDTH + WIDTH) + 2 * (WIDTH + FFN))
    adapters = DEPTH * of_block + rank * (2 * (VOCABULARY + WIDTH) + (TOKENS + WIDTH))
    assert found.num_trained == adapters
    assert found.weights_bytes == 4 * (OUTSIDE + DEPTH * BLOCK + adapters)
    assert found.optimizer_bytes == 8 * adapters


@pytest.mark.parametrize(
    "gradients", [torch.float32, torch.float64]
)  # torch's GaLore, and what it would take in other types
def test_galore_keeps_moments_of_rank_times_the_longer_side_and_a_projector_of_the_shorter(
    gradients: torch.dtype,
) -> None:
    rank = 8
    found = estimated("galore", replace(SETTING, gradients=gradients))
    matrices = 4 * WIDTH * WIDTH + 2 * WIDTH * FFN
    projected = 4 * rank * (2 * WIDTH + WIDTH) + 2 * rank * (2 * FFN + WIDTH)
    others = OUTSIDE + DEPTH * (BLOCK - matrices)
    assert found.optimizer_bytes == 4 * (2 * others + DEPTH * projected)
    assert found.gradients_bytes == gradients.itemsize * (OUTSIDE + DEPTH * BLOCK)


def test_types_of_weights_gradients_and_moments_count_apart() -> None:
    bf16 = torch.bfloat16
    num = OUTSIDE + DEPTH * BLOCK
    mixed = replace(SETTING, weights=bf16, masters=True)
    found = estimated("full", mixed)
    assert (found.weights_bytes, found.gradients_bytes, found.optimizer_bytes) == (2 * num, 4 * num, 12 * num)
    in_bf16 = replace(SETTING, weights=bf16, gradients=bf16, states=bf16)
    assert estimated("full", in_bf16).static_bytes == 8 * num


def test_moments_in_8_bits_have_a_scale_for_each_256_and_small_tensors_float32_ones() -> None:
    """n bytes and 4 for each 256 of them, twice, from 4096 elements on; else 8 n; and 4 n for masters."""
    found = estimated("full", replace(SETTING, states=EIGHT_BITS, masters=True))
    sizes = [parameter.numel() for parameter in tiny().make().parameters()]
    large, small = [n for n in sizes if n >= 4096], [n for n in sizes if n < 4096]
    assert large and small and any(n % 256 for n in large)
    assert found.optimizer_bytes == sum(2 * (n + 4 * -(-n // 256)) for n in large) + 8 * sum(small) + 4 * sum(sizes)


@pytest.mark.parametrize("name", ["full", "lora", "E+H", "E+H+2L"])
@pytest.mark.parametrize("adam", ["fused", "foreach", "loop"])
def test_a_real_step_takes_what_was_estimated(name: str, adam: Any) -> None:
    """The allocator's account, to a thousandth, where the claim is three hundredths of the static part."""
    setting = replace(SETTING, adam=adam)
    found = estimated(name, setting)
    measured = measure(tiny(), method(name), setting, found, CPU)
    assert not measured.refused
    assert measured.static == pytest.approx(found.static_bytes, rel=1e-3)
    assert measured.peak == pytest.approx(found.peak.total_bytes, rel=1e-3)


def test_a_real_step_of_galore_takes_what_was_estimated() -> None:
    """But for what LAPACK takes for itself in a decomposition."""
    found = estimated("galore")
    measured = measure(tiny(), method("galore"), SETTING, found, CPU)
    assert measured.static == pytest.approx(found.static_bytes, rel=0.03)
    assert measured.peak == pytest.approx(found.peak.total_bytes, rel=0.1)


def test_the_peak_is_the_sum_of_its_parts_and_lies_in_one_of_the_phases() -> None:
    found = estimated("E+H+2L")
    assert tuple(found.peak.by_category) == CATEGORIES
    assert sum(found.peak.by_category.values()) == found.peak.total_bytes
    assert found.phases[found.peak.phase] == max(found.phases.values()) == found.peak.total_bytes
    assert found.peak.total_bytes < found.static_bytes + found.activations_bytes


def test_the_last_blocks_are_the_worst_that_lisa_can_draw_where_weights_are_larger_than_activations() -> None:
    """Their gradients come first in the backward pass, when the activations of all others are still there."""
    wide = Work(
        title="wide",
        make=lambda: gpt((16,), VOCABULARY, depth=DEPTH, width=4 * WIDTH, tied=False),
        batch=lambda dtype: next_tokens(1, 16, VOCABULARY),
    )
    worst = estimated("E+H+2L", work=wide).peak.total_bytes
    for drawn in ((0, 1), (0, 3), (1, 2)):
        work = replace(wide, make=lambda drawn=drawn: only(wide.make(), drawn))
        assert estimated("full", work=work).peak.total_bytes < worst, drawn


def only(model: nn.Module, drawn: tuple[int, ...]) -> nn.Module:
    for index, block in enumerate(model.blocks):  # type: ignore[arg-type]
        block.requires_grad_(index in drawn)
    return model


def test_lisa_takes_more_with_every_block_and_less_than_full_training() -> None:
    totals = [estimated(name).peak.total_bytes for name in ("E+H", "E+H+1L", "E+H+2L", "E+H+3L", "full")]
    assert totals == sorted(totals) and len({*totals}) == len(totals)


def test_attention_without_a_fused_kernel_keeps_a_square_of_the_tokens_for_each_head() -> None:
    """Where the fused one keeps the logarithm of a row's sum; queries, keys, values and the outcome both keep."""
    heads = 4
    fused, math = (estimated("full", replace(SETTING, attention=kind)) for kind in ("fused", "math"))
    assert math.activations_bytes - fused.activations_bytes == 4 * DEPTH * BATCH * heads * (TOKENS * TOKENS - TOKENS)


def test_checkpointing_keeps_one_stream_a_block() -> None:
    plain, checkpointed = (estimated("full", work=tiny(checkpoint_activations=on)) for on in (False, True))
    assert checkpointed.static_bytes == plain.static_bytes
    assert checkpointed.activations_bytes < plain.activations_bytes / 2


def test_several_devices_hold_the_weights_among_them_and_no_more() -> None:
    whole, shared = (estimated("full", replace(SETTING, devices=devices)) for devices in (1, 2))
    assert whole.peak == shared.peak and len(shared.of_devices) == 2
    weights = [peak.by_category["weights"] for peak in shared.of_devices]
    assert sum(weights) == whole.weights_bytes
    assert weights[0] == 4 * ((VOCABULARY + TOKENS) * WIDTH + DEPTH // 2 * BLOCK)
    assert shared.largest.total_bytes < whole.peak.total_bytes
    assert sum(peak.total_bytes for peak in shared.of_devices) >= whole.peak.total_bytes


def test_more_devices_than_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most 4"):
        estimated("full", replace(SETTING, devices=5))


def test_more_layers_than_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"at most E\+H\+4L"):
        estimated("E+H+5L")


def test_a_step_that_would_not_fit_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedsign.memory.measure.free_bytes", lambda device: 1000)
    measured = measure(tiny(), method("full"), SETTING, estimated("full"), CPU)
    assert "1.0\u202fkB are free" in measured.refused and not measured.peak


CONFIGS: dict[str, dict[str, Any]] = {
    "llama-2-70b": {
        "model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64,
        "num_key_value_heads": 8, "intermediate_size": 28_672, "vocab_size": 32_000,
    },
    "mistral-7b": {
        "model_type": "mistral", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14_336, "vocab_size": 32_000,
    },
    "gpt2-small": {
        "model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50_257,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_file_makes_the_named_model(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]), encoding="utf-8")
    with torch.device("meta"):
        model = named_model(str(tmp_path)).make(16, False)
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]


def test_another_family_is_made_by_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = {
        "model_type": "qwen2", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 97, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    named = named_model(str(tmp_path))
    work = Work(title="qwen2", make=lambda: named.make(TOKENS, False), batch=tiny().batch)
    found = estimated("E+H+1L", work=work)
    of_block = 64 * (64 + 1) + 2 * 32 * (64 + 1) + 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert found.num_trained == 2 * 97 * 64 + 64 + of_block
    measured = measure(work, method("E+H+1L"), SETTING, found, CPU)
    assert measured.static == pytest.approx(found.static_bytes, rel=0.03)
    assert measured.peak == pytest.approx(found.peak.total_bytes, rel=0.03)


def test_without_transformers_a_file_has_to_be_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That library fills what is missing, as it does when it trains."""
    monkeypatch.setattr("fedsign.memory.named.find_spec", lambda name: None)
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "gpt2"}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"whole config\.json"):
        named_model(str(path))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "no JSON"),
        ("[]", "no 'model_type'"),
        ('{"model_type": "bert2"}', "transformers"),
    ],
)
def test_what_is_no_config_is_refused_in_a_sentence(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=said):
        named_model(str(tmp_path))


def test_an_unknown_model_or_method_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'llama-2-7b'"):
        named_model("llama-2-8b")
    with pytest.raises(ConfigError, match="Did you mean 'galore'"):
        methods_of(["galor"], rank=8)
