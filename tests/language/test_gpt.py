"""Our decoder against `transformers`', published sizes, and what a decoder must not do."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedsign import plugins
from fedsign.errors import ConfigError
from fedsign.models.features import classifier_of, forward_with_features
from fedsign.models.gpt import GPT, rotated, rotations
from fedsign.seeding import Purpose, global_stream

LLAMA = {"activation": "swiglu", "norm": "rms_norm", "tied": False, "positions": "rotary", "bias": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "GPT-2": {},
    "LLaMA": LLAMA,
    "grouped queries": {**LLAMA, "num_kv_heads": 2},
    "one for all": {"num_kv_heads": 1, "positions": "rotary"},
    "tied LLaMA": {**LLAMA, "tied": True},
    "without bias": {"bias": False},
}


def build(length: int = 12, vocabulary: int = 17, *, seed: int = 0, **settings: Any) -> GPT:
    settings = {"depth": 2, "width": 32, "num_heads": 4, **settings}
    with global_stream(seed, Purpose.MODEL):
        model: GPT = plugins.build("model", "gpt", settings, (length,), vocabulary)
    return model


def tokens(batch: int = 3, length: int = 12, vocabulary: int = 17, seed: int = 1) -> Tensor:
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("vocabulary", "length", "settings", "number"),
    [
        (50257, 1024, {"depth": 12, "width": 768, "num_heads": 12}, 124_439_808),
        (32000, 4096, {**LLAMA, "depth": 32, "width": 4096, "num_heads": 32}, 6_738_415_616),
        (
            32000,
            4096,
            {**LLAMA, "depth": 80, "width": 8192, "num_heads": 64, "num_kv_heads": 8, "ffn_width": 28672},
            68_976_648_192,
        ),
        (
            32000,
            4096,
            {**LLAMA, "depth": 32, "width": 4096, "num_heads": 32, "num_kv_heads": 8, "ffn_width": 14336},
            7_241_732_096,
        ),
        (32000, 2048, {**LLAMA, "depth": 22, "width": 2048, "num_heads": 32, "num_kv_heads": 4}, 1_100_048_384),
    ],
    ids=["GPT-2", "LLaMA-2-7B", "LLaMA-2-70B", "Mistral-7B", "TinyLlama"],
)
def test_published_models_have_their_published_number_of_parameters_and_take_no_memory_on_the_meta_device(
    vocabulary: int, length: int, settings: dict[str, Any], number: int
) -> None:
    with torch.device("meta"):
        model = build(length, vocabulary, **settings)
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    assert sum(parameter.numel() for parameter in model.parameters()) == number


@pytest.mark.parametrize("name", VARIANTS)
def test_a_position_sees_itself_and_what_is_before_it(name: str) -> None:
    model = build(**VARIANTS[name]).double()
    given = tokens()
    changed = given.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 17
    before, after = model(given), model(changed)
    assert before.shape == (3, 12, 17)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-12)
    assert ((before - after).abs().amax(dim=2)[:, 7:] > 1e-9).all()


@pytest.mark.parametrize("name", VARIANTS)
def test_all_its_parameters_train_and_the_state_holds_no_tensor_twice(name: str) -> None:
    model = build(**VARIANTS[name])
    assert list(model.state_dict()) == [key for key, _ in model.named_parameters()]
    assert not list(model.buffers())
    assert ("head.weight" in model.state_dict()) == (not VARIANTS[name].get("tied", True))
    functional.cross_entropy(model(tokens()).flatten(0, 1), tokens(seed=2).flatten()).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), key
        if not key.endswith("key.bias"):  # which adds the same to all logits of a softmax: its gradient is rounding
            assert parameter.grad.abs().sum() > 0, key


def test_the_seed_alone_decides_the_initial_bits() -> None:
    outside = torch.get_rng_state()
    one, again, other = (build(seed=seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), outside)
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["embedding.weight"], other["embedding.weight"])


def test_matrices_start_with_their_deviation_and_those_that_add_to_the_stream_with_a_smaller_one() -> None:
    model = build(vocabulary=500, width=256, depth=8, init_std=0.03)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding) and name != "positions":
            expected = 0.03 / 4 if name.endswith(("out", "down")) else 0.03  # sqrt(2 x 8 blocks) = 4
            assert module.weight.std().item() == pytest.approx(expected, rel=0.02), name
            assert isinstance(module, nn.Embedding) or module.bias is None or not module.bias.any(), name


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("name", VARIANTS)
def test_activations_that_are_computed_again_give_the_same_gradients_to_the_bit(name: str, dropout: float) -> None:
    gradients = []
    for again in (False, True):
        model = build(**VARIANTS[name], dropout=dropout, checkpoint_activations=again)
        with global_stream(3, Purpose.TRAINING):
            model(tokens()).logsumexp(dim=-1).mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_less_is_kept_for_the_backward_pass_where_activations_are_computed_again() -> None:
    kept = []
    for again in (False, True):
        sizes: list[int] = []

        def count(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        model = build(depth=6, checkpoint_activations=again)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            model(tokens())
        kept.append(sum(sizes))
    assert kept[1] < kept[0] / 4


def test_rotary_positions_make_the_scores_of_attention_depend_on_distances_alone() -> None:
    """Angles are float32, hence 1e-6."""
    query, key = torch.randn(2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def scores(start: int) -> Tensor:
        turn = rotations(torch.arange(start, start + 3), 8, 10_000.0)
        return rotated(query, *turn) @ rotated(key, *turn).mT

    torch.testing.assert_close(scores(0), scores(40), rtol=0, atol=1e-5)
    torch.testing.assert_close(scores(0).diagonal(), (query * key).sum(dim=1), rtol=0, atol=1e-6)
    assert (scores(0) - query @ key.mT).abs().max() > 0.1


def test_longer_samples_than_learned_positions_are_a_sentence_and_rotary_ones_have_no_end() -> None:
    with pytest.raises(
        ConfigError, match=r"a sample of 13 tokens was given to model\.name=gpt with 12 learned positions"
    ):
        build()(tokens(length=13))
    assert build(positions="rotary")(tokens(length=13)).shape == (3, 13, 17)
    assert build(num_positions=20)(tokens(length=13)).shape == (3, 13, 17)


def test_the_representation_is_what_enters_an_untied_head_and_a_tied_one_is_refused() -> None:
    model = build(tied=False)
    assert classifier_of(model) is model.head
    outputs, z = forward_with_features(model, {}, tokens())
    assert z.shape == (3, 12 * 32)
    torch.testing.assert_close(functional.linear(z.view(3, 12, 32), model.head.weight), outputs)
    with pytest.raises(ConfigError, match=r"has no head of its own, .* since it is tied to the embedding; untie it"):
        classifier_of(build())


def test_shapes_that_cannot_be_are_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"takes rows of tokens, but a sample has the shape \(1, 28, 28\)"):
        plugins.build("model", "gpt", {}, (1, 28, 28), 10)
    with pytest.raises(ConfigError, match=r"model\.width=30, model\.num_heads=4, model\.num_kv_heads=4 were given"):
        build(width=30)
    with pytest.raises(ConfigError, match=r"num_kv_heads=3 were given"):
        build(num_kv_heads=3)
    with pytest.raises(ConfigError, match=r"model\.positions=rotary, which turns pairs of a head's 5 coordinates"):
        build(width=20, positions="rotary")
