"""The digits: exact values, disjoint splits."""

import subprocess
import sys

import numpy as np
import torch

from fedsign.data.digits import digits


def test_digits_are_1797_images_of_64_pixels_between_0_and_1() -> None:
    """1,797 * 0.8 = 1,437.6, cut off."""
    data = digits(0)
    assert data.train.features.shape == (1437, 64)
    assert data.test.features.shape == (360, 64)
    assert (data.input_shape, data.num_outputs, len(data.class_names)) == ((64,), 10, 10)
    for part in (data.train, data.test):
        assert (part.features.dtype, part.targets.dtype) == (torch.float32, torch.int64)
        assert (part.features.min(), part.features.max()) == (0.0, 1.0)
        assert torch.equal(part.features * 16, (part.features * 16).round()), "pixels are whole sixteenths"
        assert set(part.targets.tolist()) == set(range(10))


def test_digits_as_images_are_the_same_pixels_row_by_row() -> None:
    flat, images = digits(0), digits(0, flat=False)
    assert images.input_shape == (1, 8, 8)
    for one, other in ((flat.train, images.train), (flat.test, images.test)):
        assert torch.equal(one.targets, other.targets)
        for row in range(8):
            assert torch.equal(one.features[:, 8 * row : 8 * row + 8], other.features[:, 0, row])


def test_the_split_of_digits_loses_and_repeats_nothing() -> None:
    """Together the two parts are scikit-learn's rows, each with its label, as a multiset."""
    from sklearn.datasets import load_digits

    data = digits(5, test_fraction=0.3)
    rows = torch.cat(
        [torch.cat([part.features * 16, part.targets[:, None]], dim=1) for part in (data.train, data.test)]
    )
    pixels, labels = load_digits(return_X_y=True)
    expected = np.concatenate([pixels, labels[:, None]], axis=1)
    assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, expected.tolist()))


def test_the_seed_decides_the_split() -> None:
    assert torch.equal(digits(0).test.features, digits(0).test.features)
    assert not torch.equal(digits(0).test.features, digits(1).test.features)


def test_torchvision_works_beside_this_torch() -> None:
    """In a process of its own, since an import happens once."""
    program = """
from fedsign.torchvision_shim import torchvision
datasets, transforms = torchvision("torchvision.datasets"), torchvision("torchvision.transforms")
import torchvision.transforms.functional
steps = transforms.Compose([transforms.Resize(4), transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3)])
image, label = datasets.FakeData(size=2, image_size=(3, 8, 8), transform=steps)[0]
assert image.shape == (3, 4, 4) and -1 <= image.min() <= image.max() <= 1, image
print("works")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "works", done.stderr
