"""The benchmarks' hand-written baseline is an independent check of condensation's tangents."""

from dataclasses import replace

import pytest
import torch

from benchmarks.alone import hypergradients
from fedsign.bilevel.unroll import pushed


def test_a_training_written_out_by_hand_has_our_tangents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Momentum, weight decay and a falling rate over three steps of the ConvNet, in float64."""
    monkeypatch.setattr(hypergradients, "CONV_DEPTH", 3)
    inner, problem, *trees = hypergradients.conv_problem(4)
    meta, vectors = ({key: each.double() for key, each in tree.items()} for tree in trees)
    inner = replace(inner, start=inner.start.double())
    problem = replace(problem, inner=inner)
    _, tangents = pushed(problem, meta, vectors)
    assert tangents["parameters"].norm() > 1e-3
    by_hand = hypergradients.by_hand(inner, problem, meta, vectors)
    torch.testing.assert_close(tangents["parameters"], by_hand, atol=1e-12, rtol=1e-9)
