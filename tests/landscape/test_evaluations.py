"""An analysis that was stopped goes on with the points that it has evaluated."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fedsign.errors import ResultsError
from fedsign.landscape.landscape import Landscape, Values, grid
from fedsign.tasks.classification import Classification
from simulations.landscape.evaluations import evaluating
from tests.landscape.test_landscape import trained_like

LAMBDAS = grid(np.linspace(-1, 1, 6).tolist())


class Counting(Landscape):
    """Counts the points that it evaluates, one by one; stopped before point `last`."""

    num, last = 0, 1000

    def _has_slow_convolutions(self) -> bool:
        return True

    def _alone(self, point: torch.Tensor) -> Values:
        if self.num == self.last:
            raise KeyboardInterrupt
        self.num += 1
        return super()._alone(point)


def made(last: int = 1000) -> Counting:
    torch.manual_seed(0)
    model, samples, _ = trained_like("cnn with BatchNorm", torch.float32)
    landscape = Counting(model, Classification(), samples)
    landscape.last = last
    return landscape


def curve(landscape: Landscape, keep: Path | None, **request: int) -> Values:
    direction = torch.linspace(-1, 1, landscape.layout.size)
    with evaluating(landscape, len(LAMBDAS), keep=keep, request=request):
        return landscape.along([direction], LAMBDAS)


def stopped_in(folder: Path, *, after: int) -> Path:
    with pytest.raises(KeyboardInterrupt):
        curve(made(after), folder, seed=1)
    (kept,) = folder.iterdir()
    return kept


def test_it_goes_on_where_it_was_stopped_with_the_same_bits(tmp_path: Path) -> None:
    stopped_in(tmp_path, after=4)
    again, whole = made(), made()
    found, expected = curve(again, tmp_path, seed=1), curve(whole, None)
    assert (again.num, whole.num) == (2, 6)
    assert found.loss.tolist() == expected.loss.tolist() and len(set(expected.loss.tolist())) == 6
    assert found.error is not None and expected.error is not None
    assert found.error.tolist() == expected.error.tolist()
    assert [*tmp_path.iterdir()] == []


def test_another_request_begins_anew(tmp_path: Path) -> None:
    kept = stopped_in(tmp_path, after=4)
    other = made()
    curve(other, tmp_path, seed=2)
    assert other.num == 6 and kept.exists()


@pytest.mark.parametrize("cut", [b"", b'{"loss": [0.5], "error": [0.5], "chain": "0123456789abcdef"}\n'])
def test_after_a_damaged_record_points_are_evaluated_again(cut: bytes, tmp_path: Path) -> None:
    kept = stopped_in(tmp_path, after=4)
    lines = kept.read_bytes().splitlines(keepends=True)
    kept.write_bytes(b"".join(lines[:2]) + (cut or lines[2][:-5]))
    again = made()
    found = curve(again, tmp_path, seed=1)
    assert again.num == 4
    assert found.loss.tolist() == curve(made(), None).loss.tolist()


def test_the_same_analysis_is_not_made_twice_at_a_time(tmp_path: Path) -> None:
    with (
        evaluating(made(), 1, keep=tmp_path, request={}),
        pytest.raises(ResultsError, match="is in use by process"),
        evaluating(made(), 1, keep=tmp_path, request={}),
    ):
        pass
