"""Normalization, augmentation and the validation split: their promises, on data where these can be computed."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsign.config import from_dict
from fedsign.data.augment import augmented
from fedsign.data.base import Dataset, Samples, normalized
from fedsign.data.normalize import IDENTITY, Normalization, measured
from fedsign.data.splitting import hold_out_validation
from fedsign.errors import ConfigError, DataError
from fedsign.seeding import Purpose, global_stream
from fedsign.workload import Workload


def dataset(features: torch.Tensor, targets: torch.Tensor | None = None, *, classes: int = 3) -> Dataset:
    labels = torch.arange(len(features)) % classes if targets is None else targets
    train = Samples(features=features, targets=labels, owners=torch.arange(len(features)))
    names = () if labels.is_floating_point() else tuple(str(label) for label in range(classes))
    return Dataset(train=train, test=Samples(features=features[:2] + 7, targets=labels[:2]), class_names=names)


@pytest.mark.parametrize("shape", [(50, 4), (50, 2, 3, 3), (50, 2, 5)], ids=["rows", "images", "series"])
@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_per_channel_gives_training_samples_mean_0_and_deviation_1(shape: tuple[int, ...], offset: float) -> None:
    """In batches of any size; NumPy's mean and std of the whole, in float64, are the reference."""
    features = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + offset
    axes = (0, *range(2, len(shape)))
    for size in (50, 7, 1):
        found = measured("per_channel", features.split(size))
        np.testing.assert_allclose(found.shift, features.numpy().mean(axis=axes), rtol=1e-12)
        np.testing.assert_allclose(found.scale, features.numpy().std(axis=axes), rtol=1e-9)


def test_unit_maps_training_samples_onto_0_to_1() -> None:
    data = normalized(dataset(torch.tensor([[2.0, -4.0], [6.0, 0.0], [3.0, -1.0]])), "unit")
    assert data.train.features.tolist() == [[0, 0], [1, 1], [0.25, 0.75]]


@pytest.mark.parametrize("preset", ["per_channel", "unit"])
def test_test_samples_are_scaled_by_training_samples_and_do_not_move_the_scale(preset: Any) -> None:
    features = torch.rand(20, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    near, far = dataset(features), dataset(features)
    far = Dataset(
        train=far.train,
        test=near.train.normalized(Normalization(shift=(0.0,) * 2, scale=(1e-3,) * 2)),
        class_names=far.class_names,
    )
    assert normalized(near, preset).normalization == normalized(far, preset).normalization != IDENTITY
    used = normalized(near, preset)
    torch.testing.assert_close(used.test.features, used.normalization.apply(near.test.features))


@pytest.mark.parametrize("preset", ["per_channel", "unit"])
def test_a_constant_channel_becomes_0(preset: Any) -> None:
    data = normalized(dataset(torch.tensor([[5.0, 1.0], [5.0, 3.0], [5.0, 2.0]])), preset)
    assert data.train.features[:, 0].tolist() == [0, 0, 0]
    assert torch.isfinite(data.test.features).all()


def test_default_and_none_leave_the_digits_as_they_are() -> None:
    for preset in ("default", "none"):
        work = Workload(from_dict({"data": {"name": "digits", "normalize": preset}}))
        raw = work.config.data.build(0)
        assert torch.equal(work.dataset.train.features, raw.train.features)


def test_held_out_samples_do_not_count_for_the_scale() -> None:
    work = Workload(from_dict({"data": {"name": "digits", "normalize": "per_channel", "validation_fraction": 0.5}}))
    train = work.dataset.train.features
    raw = hold_out_validation(work.config.data.build(0), 0.5, 0)
    assert work.dataset.normalization == measured("per_channel", [raw.train.features])
    spread = train.double().std(dim=0, correction=0)
    torch.testing.assert_close(spread[spread > 0], torch.ones(int((spread > 0).sum()), dtype=torch.float64))


def images(num: int = 200, *, height: int = 6, width: int = 5) -> torch.Tensor:
    """Every pixel another number above 0, so that where it came from can be read off."""
    return torch.arange(1, num * 2 * height * width + 1, dtype=torch.float64).reshape(num, 2, height, width)


@pytest.mark.parametrize("normalization", [IDENTITY, Normalization(shift=(10.0, 20.0), scale=(2.0, 4.0))])
def test_every_image_is_a_window_of_itself_padded_by_4_black_pixels_perhaps_mirrored(
    normalization: Normalization,
) -> None:
    """Pad the raw image, cut a window, mirror, and normalize: one of 9 x 9 x 2 results, written with NumPy."""
    raw = images()
    with global_stream(0, Purpose.TRAINING):
        found = augmented(normalization.apply(raw), "crop_flip", normalization).numpy()
    seen = set()
    for image, result in zip(raw.numpy(), found, strict=True):
        padded = np.pad(image, ((0, 0), (4, 4), (4, 4)))
        candidates = {
            (top, left, step): normalization.apply(
                torch.from_numpy(padded[:, top : top + 6, left : left + 5][:, :, ::step].copy())[None]
            )[0].numpy()
            for top in range(9)
            for left in range(9)
            for step in (1, -1)
        }
        matches = [key for key, candidate in candidates.items() if np.array_equal(candidate, result)]
        assert matches
        seen.update(matches)
    assert {top for top, _, _ in seen} == {left for _, left, _ in seen} == set(range(9))
    assert {step for _, _, step in seen} == {1, -1}


def test_flip_mirrors_half_of_the_images_and_moves_nothing() -> None:
    """200 coins: heads within 5 standard deviations, 100 +- 35."""
    raw = images()
    with global_stream(0, Purpose.TRAINING):
        found = augmented(raw, "flip", IDENTITY)
    same = [torch.equal(one, other) for one, other in zip(raw, found, strict=True)]
    mirrored = [torch.equal(one.flip(2), other) for one, other in zip(raw, found, strict=True)]
    assert all(one != other for one, other in zip(same, mirrored, strict=True))
    assert 65 <= sum(mirrored) <= 135


def test_augmentation_repeats_with_the_stream_and_leaves_its_input_alone() -> None:
    raw = images()
    kept = raw.clone()
    results = []
    for round in (1, 1, 2):
        with global_stream(0, Purpose.TRAINING, round=round):
            results.append(augmented(raw, "crop_flip", IDENTITY))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    assert torch.equal(raw, kept)


def test_without_augmentation_the_batch_is_the_same_and_nothing_is_drawn() -> None:
    state, raw = torch.random.get_rng_state(), images()
    assert augmented(raw, "none", IDENTITY) is raw
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("preset", ["flip", "crop_flip"])
def test_flat_features_cannot_be_augmented(preset: str) -> None:
    work = Workload(from_dict({"data": {"name": "digits", "augment": preset}}))
    with pytest.raises(
        ConfigError, match=rf"={preset} was given, but .* shape \[64\].*data.flat=false.*data.augment=none"
    ):
        _ = work.dataset


def test_digits_as_images_can_be_augmented() -> None:
    """The remedy of the sentence above: a batch comes back mirrored row by row, or as it was."""
    work = Workload(from_dict({"data": {"name": "digits", "flat": False, "augment": "flip"}, "model": {"name": "cnn"}}))
    batch = work.dataset.train.features[:50]
    with global_stream(0, Purpose.TRAINING):
        found = work.augment(batch)
    mirrored = [torch.equal(one.flip(2), other) for one, other in zip(batch, found, strict=True)]
    assert all(torch.equal(found[at], batch[at]) for at in range(50) if not mirrored[at])
    assert 0 < sum(mirrored) < 50
    assert work.make_model()(found).shape == (50, 10)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=200),
    st.floats(0.01, 0.99),
    st.integers(0, 2**31 - 1),
)
def test_the_validation_split_takes_the_same_share_of_every_class_and_loses_nothing(
    labels: list[int], fraction: float, seed: int
) -> None:
    """floor(fraction * size) of each class; features name the samples."""
    whole = dataset(torch.arange(float(len(labels)))[:, None], torch.tensor(labels), classes=4)
    expected = {label: int(fraction * labels.count(label)) for label in labels}
    if not sum(expected.values()):
        with pytest.raises(DataError, match=r"data.validation_fraction=.*raise it"):
            hold_out_validation(whole, fraction, seed)
        return
    split = hold_out_validation(whole, fraction, seed)
    assert split.validation is not None and split.test is whole.test
    assert {label: split.validation.targets.tolist().count(label) for label in labels} == expected
    both = torch.cat([split.train.features, split.validation.features])[:, 0].tolist()
    assert sorted(both) == list(range(len(labels)))
    for part in (split.train, split.validation):
        assert part.owners is not None and part.owners.tolist() == part.features[:, 0].tolist()
        assert part.targets.tolist() == [labels[int(row)] for row in part.features[:, 0]]
    assert set(split.train.targets.tolist()) == set(labels)


def test_the_seed_decides_what_is_held_out_and_0_holds_out_nothing() -> None:
    whole = dataset(torch.arange(90.0)[:, None])
    first, again, other = (hold_out_validation(whole, 0.3, seed).validation for seed in (0, 0, 1))
    assert first is not None and again is not None and other is not None
    assert torch.equal(first.features, again.features) and not torch.equal(first.features, other.features)
    assert hold_out_validation(whole, 0.0, 0) is whole


def test_real_targets_are_held_out_at_random() -> None:
    split = hold_out_validation(dataset(torch.arange(10.0)[:, None], torch.arange(10.0)), 0.35, 0)
    assert split.validation is not None and (len(split.train), len(split.validation)) == (7, 3)


def test_the_partition_deals_out_only_what_is_left_and_evaluation_has_both_figures() -> None:
    """1,437 training digits; a tenth of each of 10 classes is 143 less at most 10 for rounding."""
    work = Workload(from_dict({"data": {"name": "digits", "validation_fraction": 0.1}}))
    assert work.dataset.validation is not None
    held = len(work.dataset.validation)
    assert 133 <= held <= 143
    assert sum(map(len, work.partition)) == 1437 - held
    figures = work.evaluate(work.make_model())
    assert list(figures) == ["loss", "accuracy", "validation_loss", "validation_accuracy"]
    assert figures["loss"] != figures["validation_loss"]
    plain = Workload(from_dict({"data": {"name": "digits"}}))
    model = plain.make_model()
    assert list(plain.evaluate(model)) == ["loss", "accuracy"]
    assert plain.evaluate(model)["loss"] == figures["loss"], "the test set is the same"


@pytest.mark.parametrize("name", ["validation_loss", "validation_accuracy", "validation_anything"])
def test_a_metric_cannot_have_a_validation_columns_name(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"would be written as '{name}'"):
        from_dict({"metrics": [f"{__name__}:{name}"]})


def validation_loss(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    return 0.0


validation_accuracy = validation_anything = validation_loss


@pytest.mark.parametrize(
    ("key", "value"),
    [("normalize", "zscore"), ("augment", "rotate"), ("validation_fraction", 1.0), ("validation_fraction", -0.1)],
)
def test_other_presets_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"data\.{key}="):
        from_dict({"data": {"name": "digits", key: value}})
