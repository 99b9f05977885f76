"""Live bytes equal closed forms and the allocator's count."""

import numpy as np
import pytest
import torch
from torch import nn

from fedsign.memory.live import LiveBytes, allocated

BATCH, INPUTS, OUTPUTS = 7, 100, 200
WEIGHTS = 4 * (INPUTS * OUTPUTS + OUTPUTS)
IN, OUT = 4 * BATCH * INPUTS, 4 * BATCH * OUTPUTS
SCALAR = 4
CPU = torch.device("cpu")


class Step:
    """Linear, squared, summed: forward, backward, AdamW."""

    def __init__(self, device: str = "cpu", **settings: bool) -> None:
        self.layer = nn.Linear(INPUTS, OUTPUTS, device=device)
        self.optimizer = torch.optim.AdamW(self.layer.parameters(), **settings)
        self.features = torch.ones(BATCH, INPUTS, device=device)

    def take(self, live: LiveBytes | None = None) -> None:
        live = LiveBytes() if live is None else live
        self.optimizer.zero_grad()
        live.begin("forward")
        loss = self.layer(self.features).pow(2).sum()
        live.begin("backward")
        loss.backward()
        live.name("gradients", [parameter.grad for parameter in self.layer.parameters()])
        live.begin("optimizer")
        self.optimizer.step()


def counted(step: Step, live: LiveBytes) -> None:
    """Two steps, so that the second one begins with moments."""
    live.name("weights", step.layer.parameters())
    live.name("batch", [step.features])
    for _ in range(2):
        step.take(live)
    live.name("moments", [value for state in step.optimizer.state.values() for value in state.values()])


def test_a_linear_layers_step_holds_what_its_formula_says() -> None:
    """Forward: y and y^2.  Backward: dL/dy while computing dW and db, the loss and its gradient 1.  A step count is a
    scalar.
    """
    step = Step(fused=True)
    with LiveBytes() as live:
        counted(step, live)
    moments = 2 * WEIGHTS + 2 * SCALAR
    fixed = {"weights": WEIGHTS, "batch": IN, "moments": moments}
    assert live.peak_of("forward").by_category == fixed | {"other": 2 * OUT + SCALAR}
    assert live.peak_of("backward").by_category == fixed | {"gradients": WEIGHTS, "other": OUT + 2 * SCALAR}
    assert live.peak.phase == "backward"
    assert live.current == fixed | {"gradients": WEIGHTS}


@pytest.mark.parametrize("settings", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_the_allocator_agrees_to_scalars(settings: dict[str, bool]) -> None:
    step = None
    with allocated(CPU) as given:
        step = Step(**settings)
        for _ in range(2):
            step.take()
    other = Step(**settings)
    with LiveBytes() as live:
        counted(other, live)
    assert live.peak.total_bytes > WEIGHTS
    assert abs(given.peak_bytes - live.peak.total_bytes) <= 10 * SCALAR
    assert given.kept_bytes == sum(live.current.values())


def test_foreach_takes_a_copy_of_all_trained_and_a_loop_two_of_the_largest() -> None:
    """Beyond weights, gradients and two moments: the denominator sqrt(v) + eps, and in a loop also its quotient."""
    peaks = {}
    for name, settings in {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}.items():
        step = Step(**settings)
        with LiveBytes() as live:
            counted(step, live)
        peaks[name] = live.peak_of("optimizer").total_bytes
    assert peaks["foreach"] - peaks["fused"] == pytest.approx(WEIGHTS, abs=10 * SCALAR)
    largest = 4 * INPUTS * OUTPUTS
    assert peaks["loop"] - peaks["fused"] == pytest.approx(2 * largest, abs=10 * SCALAR)


def test_a_step_on_the_meta_device_counts_as_much_as_a_real_one() -> None:
    found = []
    for device in ("cpu", "meta"):
        step = Step(device, foreach=True)
        with LiveBytes() as live:
            counted(step, live)
        found.append([live.peak_of(phase) for phase in ("forward", "backward", "optimizer")])
    assert found[0] == found[1]


def test_views_and_writes_in_place_count_nothing() -> None:
    values = torch.ones(10, 10)
    with LiveBytes() as live:
        values.add_(1)
        views = [values.view(100), values.t(), values.detach(), values[3]]
    assert live.peak.total_bytes == 0, views


def test_a_storage_is_alive_until_its_last_view_is_gone() -> None:
    with LiveBytes() as live:
        row = torch.ones(100)[3]
        assert sum(live.current.values()) == 400
        del row
        assert sum(live.current.values()) == 0
    assert live.peak.total_bytes == 400


def test_what_was_there_before_counts_once_it_is_named() -> None:
    before = torch.ones(100)
    with LiveBytes() as live:
        assert sum(live.current.values()) == 0
        live.name("received", [before, before.view(10, 10), None])
        assert live.current == {"received": 400}
        del before
        assert live.current == {}


def test_what_was_made_before_a_phase_counts_in_it_while_it_is_alive() -> None:
    with LiveBytes() as live:
        kept = torch.ones(10)
        torch.ones(1000)
        live.begin("later")
        torch.ones(20)
        assert live.peak.total_bytes == 4040
        assert live.peak_of("later").total_bytes == 120, kept


def test_tensors_made_of_python_numbers_count() -> None:
    with LiveBytes() as live:
        made = torch.tensor([1.0, 2.0])
    assert sum(live.current.values()) == 8, made


def test_memory_that_numpy_lends_counts_though_the_allocator_does_not_know_of_it() -> None:
    array = np.zeros(1000)
    with LiveBytes() as live:
        lent = torch.from_numpy(array)
    assert sum(live.current.values()) == 8000, lent
    with allocated(CPU) as given:
        lent = torch.from_numpy(array)
    assert given.kept_bytes == 0, lent


def test_a_block_that_allocates_nothing_has_no_peak() -> None:
    with allocated(CPU) as given:
        pass
    assert (given.kept_bytes, given.peak_bytes) == (0, 0)
    with LiveBytes() as live:
        pass
    assert live.peak.total_bytes == 0
    assert live.peak_of("backward").total_bytes == 0
