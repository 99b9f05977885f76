"""The principal plane equals scikit-learn's PCA of the same steps, and is exact for a path within a plane."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from fedsign.errors import ConfigError
from fedsign.landscape import trajectory
from fedsign.landscape.trajectory import principal_plane, window


def walk(num: int, size: int) -> torch.Tensor:
    steps = torch.randn(num, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return torch.cumsum(steps, 0)


@pytest.mark.parametrize("block", [7, 2**20])
def test_directions_shares_and_projections_are_those_of_pca(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Li et al.'s code: scikit-learn's PCA of theta_i - theta_n, and projections of these onto the components."""
    monkeypatch.setattr(trajectory, "_BLOCK", block)
    path = walk(12, 50)
    steps = (path - path[-1]).numpy()
    expected = PCA(n_components=2).fit(steps)
    found = principal_plane(path)
    unit = found.directions.numpy() / path[-1].norm().item()
    signs = np.sign((unit * expected.components_).sum(1))
    assert np.allclose(unit, signs[:, None] * expected.components_, atol=1e-8)
    assert np.allclose(found.explained, expected.explained_variance_ratio_, rtol=1e-8)
    projected = steps @ expected.components_.T * signs / path[-1].norm().item()
    assert np.allclose(found.coordinates, projected, atol=1e-8)
    assert (found.coordinates[0] >= 0).all() and not found.coordinates[-1].any()


def test_a_path_in_a_plane_is_the_plane_to_the_last_checkpoint() -> None:
    plane = walk(2, 40)
    path = walk(9, 2) @ plane + 3.0
    found = principal_plane(path)
    assert found.explained.sum() == pytest.approx(1)
    rebuilt = path[-1] + torch.from_numpy(found.coordinates) @ found.directions
    assert torch.allclose(rebuilt, path, atol=1e-9)


@pytest.mark.parametrize("num", [2, 6])
def test_a_path_on_a_line_is_refused(num: int) -> None:
    with pytest.raises(ConfigError, match=f"the {num} checkpoints lie on a line"):
        principal_plane(torch.arange(1.0, num + 1).unsqueeze(1) * walk(1, 20))


def test_the_window_holds_the_path_with_room_on_all_sides() -> None:
    path = np.array([[2.0, 0.1], [1.0, 0.3], [0.0, 0.0]])
    rows, columns = window(path, 21)
    for sides, places in ((columns, path[:, 0]), (rows, path[:, 1])):
        assert sides[0] < places.min() - 0.5 and sides[-1] > places.max() + 0.5 and len(sides) == 21
