"""LISA against the paper's Algorithm 1: what trains when, optimizer state at every step, and equivalent trainings."""

import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from fedsign import plugins
from fedsign.errors import ConfigError, StepError
from fedsign.optim.lisa import LISA, ClientLISA, Moments
from tests.partial.lisa_models import (
    NUM_BLOCKS,
    Tower,
    backward,
    size_of_block,
    sizes_outside,
    snapshot,
    tower,
    train,
)

COUNTER_BYTES = 4  # AdamW's count of steps, a float32 for each tensor
MOMENT_BYTES = 2 * 4  # m and v of an element, in float32
TENSORS_OUTSIDE = 5  # embedding, final norm and head with their biases
TENSORS_OF_BLOCK = 6
PERIOD = 3


def cycle(index: int) -> list[int]:
    """Draws with everything that can happen: blocks that leave, stay, and come back."""
    return [[0, 1], [1, 2], [1, 2], [5, 3], [0, 4], [4, 5]][index % 6]


def blocks_bytes(model: Tower, blocks: set[int]) -> int:
    return sum(MOMENT_BYTES * size_of_block(model, block) + COUNTER_BYTES * TENSORS_OF_BLOCK for block in blocks)


def outside_bytes(model: Tower) -> int:
    return MOMENT_BYTES * sizes_outside(model) + COUNTER_BYTES * TENSORS_OUTSIDE


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Counted in the optimizer's state itself."""
    return sum(value.nbytes for state in optimizer.state.values() for value in state.values())


@pytest.mark.parametrize("moments", ["drop", "reset", "offload", "keep"])
@pytest.mark.parametrize("draw", [cycle, 0], ids=["cycle", "seeded"])
def test_bytes_of_the_optimizer_equal_the_formula_at_each_of_200_steps(moments: Moments, draw: Any) -> None:
    """8 bytes for each trained element and 4 for each of its tensors; with `keep`, of all that was ever trained."""
    model = tower()
    optimizer = LISA(model, num_sampled_layers=2, period=PERIOD, draw=draw, moments=moments)
    ever: set[int] = set()
    switches = 0
    for step in range(200):
        before = optimizer.drawn
        train(model, optimizer, range(step, step + 1))
        switches += before != optimizer.drawn
        now = set(optimizer.drawn)
        assert len(now) == 2 and (draw == 0 or now == set(cycle(step // PERIOD)))
        ever |= now
        on_device = now if moments != "keep" else ever
        assert optimizer.state_bytes == state_bytes(optimizer) == outside_bytes(model) + blocks_bytes(model, on_device)
        assert optimizer.waiting_bytes == (blocks_bytes(model, ever - now) if moments == "offload" else 0)
    assert switches > 40 and ever == set(range(NUM_BLOCKS))  # not vacuous


@pytest.mark.parametrize("moments", ["drop", "reset", "offload", "keep"])
def test_frozen_parameters_have_no_gradient_and_do_not_move_by_one_bit(moments: Moments) -> None:
    """Weight decay and moments of former periods included: both are as large as they can be here."""
    model = tower()
    optimizer = LISA(model, period=PERIOD, draw=cycle, moments=moments, weight_decay=0.5)
    for step in range(40):
        before = snapshot(model)
        train(model, optimizer, range(step, step + 1))
        trained = {f"blocks.{block}." for block in cycle(step // PERIOD)}
        for name, parameter in model.named_parameters():
            trains = not name.startswith("blocks.") or any(name.startswith(prefix) for prefix in trained)
            assert parameter.requires_grad == trains == (parameter.grad is not None), name
            assert torch.equal(parameter, before[name]) != trains, name


@pytest.mark.parametrize("implementation", [{}, {"foreach": True}, {"fused": True}], ids=["loop", "foreach", "fused"])
def test_with_all_blocks_drawn_it_is_adamw_bit_for_bit(implementation: dict[str, bool]) -> None:
    ours, torchs = tower(), tower()
    settings: dict[str, Any] = {"betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.1, **implementation}
    train(ours, LISA(ours, num_sampled_layers=NUM_BLOCKS, period=PERIOD, **settings), range(50))
    train(torchs, torch.optim.AdamW(torchs.parameters(), **settings), range(50))
    assert all(torch.equal(mine, its) for mine, its in zip(ours.parameters(), torchs.parameters(), strict=True))


def test_reset_is_a_fresh_adamw_of_the_blocks_in_every_period_while_the_rest_goes_on() -> None:
    """Two optimizers of torch's, the one of the blocks made anew at every draw, as in the authors' trainer."""
    ours, torchs = tower(), tower()
    train(ours, LISA(ours, period=PERIOD, draw=cycle, moments="reset"), range(30))
    outside = torch.optim.AdamW([p for name, p in torchs.named_parameters() if not name.startswith("blocks.")])
    inside = outside
    for step in range(30):
        drawn = [parameter for block in cycle(step // PERIOD) for parameter in torchs.blocks[block].parameters()]
        if step % PERIOD == 0:
            inside = torch.optim.AdamW(drawn)
        for each in (outside, inside):
            each.param_groups[0]["lr"] = 1e-2 / (1 + step)
        torchs.zero_grad()
        backward(torchs, step)
        outside.step()
        inside.step()
    assert all(torch.equal(mine, its) for mine, its in zip(ours.parameters(), torchs.parameters(), strict=True))


def test_drop_keeps_the_moments_of_a_block_that_is_drawn_again_at_once_and_no_others() -> None:
    """In `cycle` block 1 is in the draws 0, 1 and 2, block 2 in 1 and 2: their counts of steps say since when."""
    model = tower()
    optimizer = LISA(model, period=PERIOD, draw=cycle, moments="drop")
    train(model, optimizer, range(3 * PERIOD))
    counts = {block: int(optimizer.state[model.blocks[block].up.weight]["step"]) for block in optimizer.drawn}
    assert counts == {1: 3 * PERIOD, 2: 2 * PERIOD}
    assert int(optimizer.state[model.head.weight]["step"]) == 3 * PERIOD
    train(model, optimizer, range(3 * PERIOD, 7 * PERIOD))  # draw 6 is draw 0 again
    counts = {block: int(optimizer.state[model.blocks[block].up.weight]["step"]) for block in optimizer.drawn}
    assert counts == {0: PERIOD, 1: PERIOD}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"moments": "droped"}, r"moments='droped' .* drop, reset, offload, keep"),
        ({"period": 0}, r"period=0 .* at least 1"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LISA(tower(), **settings)


def test_offload_and_keep_remember_the_moments_of_former_periods() -> None:
    """Where the moments wait makes no difference to what is computed from them."""
    models = [tower(), tower()]
    for model, moments in zip(models, ("offload", "keep"), strict=True):
        optimizer = LISA(model, period=PERIOD, draw=cycle, moments=moments)  # type: ignore[arg-type]
        train(model, optimizer, range(7 * PERIOD))
        assert int(optimizer.state[model.blocks[1].up.weight]["step"]) == 4 * PERIOD  # draws 0, 1, 2 and 6
    assert all(torch.equal(one, other) for one, other in zip(*(model.parameters() for model in models), strict=True))


@pytest.mark.parametrize("moments", ["drop", "reset", "offload", "keep"])
@pytest.mark.parametrize("until", [PERIOD * 7 + 1, PERIOD * 7], ids=["mid-period", "at a switch"])
def test_a_state_that_was_saved_goes_on_with_the_same_bits(moments: Moments, until: int) -> None:
    model = tower()
    optimizer = LISA(model, period=PERIOD, draw=3, moments=moments)
    train(model, optimizer, range(until))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = tower(seed=1)
    again = LISA(other, period=PERIOD, draw=3, moments=moments)
    other.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    assert again.drawn == optimizer.drawn and again.state_bytes == optimizer.state_bytes
    assert again.waiting_bytes == optimizer.waiting_bytes
    train(model, optimizer, range(until, until + 50))
    train(other, again, range(until, until + 50))
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))


def test_a_scheduler_of_torchs_goes_on_over_the_draws() -> None:
    """With all blocks drawn again and again: AdamW's steps under the same scheduler, bit for bit."""
    models = [tower(), tower()]
    optimizers = [
        LISA(models[0], lr=1e-2, num_sampled_layers=NUM_BLOCKS, period=2),
        torch.optim.AdamW(models[1].parameters(), lr=1e-2),
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
        for step in range(12):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-12)
    assert all(torch.equal(one, two) for one, two in zip(*(model.parameters() for model in models), strict=True))


def test_hooks_of_a_step_are_called_once_a_step() -> None:
    """Also after AdamW itself was made, whose own step torch has wrapped by then."""
    model = tower()
    torch.optim.AdamW(model.parameters())
    optimizer, calls = LISA(model), []
    optimizer.register_step_post_hook(lambda *given: calls.append(1))
    train(model, optimizer, range(5))
    assert len(calls) == 5


@pytest.mark.parametrize("drawn", [[6], [-1, 2], [0, 17]])
def test_blocks_that_are_not_there_cannot_be_drawn(drawn: list[int]) -> None:
    with pytest.raises(ConfigError, match="expected numbers from 0 to 5"):
        LISA(tower(), draw=lambda index: drawn)


def test_an_optimizer_that_nobody_has_any_more_is_gone_with_its_moments() -> None:
    """No cycle of references keeps it: on a GPU that would be memory until the garbage is collected."""
    model = tower()
    optimizer = LISA(model, draw=cycle, period=1)
    train(model, optimizer, range(3))
    moment = weakref.ref(optimizer.state[model.head.weight]["exp_avg"])
    gc.disable()
    try:
        del optimizer
        assert moment() is None
    finally:
        gc.enable()


def test_to_look_at_the_state_does_not_change_it() -> None:
    model = tower()
    optimizer = LISA(model, period=PERIOD, draw=cycle, moments="offload")
    train(model, optimizer, range(2 * PERIOD))
    before = optimizer.state_bytes, optimizer.waiting_bytes
    assert before[1] > 0
    optimizer.state_dict()
    assert (optimizer.state_bytes, optimizer.waiting_bytes) == before


def test_the_state_of_another_optimizer_is_refused() -> None:
    model = tower()
    with pytest.raises(ConfigError, match="without 'lisa'"):
        LISA(model).load_state_dict(torch.optim.AdamW(model.parameters()).state_dict())


def test_a_step_without_zero_grad_between_two_periods_is_refused() -> None:
    model = tower()
    optimizer = LISA(model, period=2, draw=cycle)
    for step in range(2):
        backward(model, step)
        optimizer.step()
    backward(model, 2)
    with pytest.raises(StepError, match="zero_grad"):
        optimizer.step()


def test_gradients_may_be_accumulated_over_several_passes() -> None:
    """Two passes of one batch are one pass with twice the gradient; the draw stays."""
    model, other = tower(), tower()
    optimizers = [LISA(each, period=1, draw=cycle) for each in (model, other)]
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(model, step)
        backward(model, step)
        backward(other, step)
        for parameter in other.parameters():
            if parameter.grad is not None:
                parameter.grad *= 2
        for optimizer in optimizers:
            optimizer.step()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two)


def test_a_closure_takes_its_gradients_after_the_draw() -> None:
    ours, plain = tower(), tower()
    with_closure, without = LISA(ours, period=1, draw=cycle, lr=1e-2), LISA(plain, period=1, draw=cycle, lr=1e-2)

    def closure() -> float:
        with_closure.zero_grad()
        backward(ours, step)
        return 0.0

    for step in range(6):
        with_closure.step(closure)
        without.zero_grad()
        backward(plain, step)
        without.step()
    assert all(torch.equal(one, two) for one, two in zip(ours.parameters(), plain.parameters(), strict=True))


def test_gradients_of_zero_are_not_left_on_what_is_frozen() -> None:
    """zero_grad(set_to_none=False) would have AdamW decay the weights of frozen blocks."""
    model = tower()
    optimizer = LISA(model, period=1, draw=cycle)
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert {parameter.grad is not None for parameter in model.blocks[1].parameters()} == {True}  # stays, zeros
    assert {parameter.grad for parameter in model.blocks[0].parameters()} == {None}


def test_after_the_end_everything_is_as_it_was_for_others_to_train() -> None:
    model = tower()
    model.blocks[2].up.bias.requires_grad_(False)  # never trained, by its owner's will
    optimizer = LISA(model, draw=cycle, period=1)
    train(model, optimizer, range(4))
    optimizer.end()
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen == ["blocks.2.up.bias"]


def test_a_parameter_that_its_owner_froze_stays_frozen_when_its_block_is_drawn() -> None:
    model = tower()
    model.blocks[0].up.bias.requires_grad_(False)
    before = snapshot(model)["blocks.0.up.bias"]
    optimizer = LISA(model, draw=lambda index: [0])
    train(model, optimizer, range(3))
    assert torch.equal(model.blocks[0].up.bias, before) and "blocks.0.up.bias" not in optimizer.trained


def test_no_block_at_all_trains_what_lies_around_them() -> None:
    """gamma = 0 of the paper's ablation: embedding and head alone."""
    model = tower()
    before = snapshot(model)
    train(model, LISA(model, num_sampled_layers=0), range(3))
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == {name for name in before if not name.startswith("blocks.")}


def test_a_tensor_that_two_layers_share_trains_with_either_and_has_both_names() -> None:
    model = tower()
    model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())
    model.embedding.weight = model.head.weight  # tied, as in GPT-2
    model.blocks[3].up = model.blocks[2].up = nn.Linear(8, 6)
    model.blocks[3].down = nn.Linear(6, 8)
    model.blocks[2].down = nn.Linear(6, 8)
    optimizer = LISA(model, draw=lambda index: [3])
    train(model, optimizer, range(2))
    assert {"embedding.weight", "head.weight", "blocks.2.up.weight", "blocks.3.up.weight"} <= optimizer.trained
    assert "blocks.2.down.weight" not in optimizer.trained


def test_drawn_once_and_kept_for_the_ablation() -> None:
    """LISA-fix of the paper's Table 12."""
    model = tower()
    optimizer = LISA(model, period=1, redraw=False, draw=0)
    first = optimizer.drawn
    for step in range(20):
        train(model, optimizer, range(step, step + 1))
        assert optimizer.drawn == first
    assert int(optimizer.state[model.blocks[first[0]].up.weight]["step"]) == 20


# --- Draws of an experiment's clients


def of_clients(**settings: Any) -> ClientLISA:
    optimizer = plugins.build("optimizer", "lisa", settings, tower(), 0.01, 0.0)
    assert isinstance(optimizer, ClientLISA)
    return optimizer


def drawn_in_round(optimizer: ClientLISA, num_steps: int = 4, **where: int) -> list[tuple[int, ...]]:
    """The draw of every step of a client's round; steps without gradients count like others."""
    optimizer.begin(**{"seed": 0, "client": 0, "round": 1, "first_step": 0, **where})
    found = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        found.append(optimizer.drawn)
        optimizer.step()
    optimizer.end()
    return found


def test_periods_go_on_over_a_clients_rounds() -> None:
    """Rounds of 4 steps and a period of 6: round 1 is one draw, round 2 two steps of it and two of the next."""
    optimizer = of_clients(period=6)
    together = drawn_in_round(optimizer, num_steps=12)
    parts = [drawn_in_round(optimizer, round=round, first_step=4 * (round - 1)) for round in (1, 2, 3)]
    assert [draw for part in parts for draw in part] == together
    assert together[0:6] == [together[0]] * 6 and together[6:12] == [together[6]] * 6
    assert together[0] != together[6]


def test_clients_draw_apart_and_a_client_draws_the_same_again() -> None:
    optimizer = of_clients(period=1)
    draws = [drawn_in_round(optimizer, client=client, num_steps=8) for client in range(5)]
    assert all(draws[one] != draws[two] for one in range(5) for two in range(one))
    assert drawn_in_round(of_clients(period=1), client=3, num_steps=8) == draws[3]
    assert drawn_in_round(optimizer, client=3, seed=1, num_steps=8) != draws[3]


def test_per_round_all_clients_draw_the_same_and_every_round_begins_anew() -> None:
    optimizer = of_clients(period=3, draws="per_round")
    rounds = [drawn_in_round(optimizer, client=0, round=round, first_step=4 * round) for round in range(1, 9)]
    assert all(draw[:3] == [draw[0]] * 3 for draw in rounds)  # a period begins with the round
    assert len({draw[0] for draw in rounds}) > 3 and any(draw[3] != draw[0] for draw in rounds)
    assert drawn_in_round(optimizer, client=7, round=5, first_step=123) == rounds[4]


@pytest.mark.parametrize("draws", ["per_client", "per_round"])
def test_drawn_once_and_kept_holds_over_rounds(draws: str) -> None:
    optimizer = of_clients(period=1, draws=draws, redraw=False)
    found = {tuple(drawn_in_round(optimizer, round=round, first_step=4 * round)) for round in (1, 2, 3)}
    assert len(found) == 1 and len(set(found.pop())) == 1


def test_a_clients_round_begins_without_a_past() -> None:
    optimizer = of_clients(period=1, moments="offload")
    drawn_in_round(optimizer)
    optimizer.begin(seed=0, client=1, round=1, first_step=0)
    assert optimizer.state_bytes == optimizer.waiting_bytes == 0 and not optimizer.trained


def test_before_training_names_what_trains_next() -> None:
    optimizer = of_clients(period=1)
    told: list[frozenset[str]] = []
    optimizer.before_training = told.append
    drawn_in_round(optimizer, num_steps=3)
    assert len(told) == 3 and frozenset().union(*told) == optimizer.trained
    assert all(any(name.startswith("blocks.") for name in names) and "head.weight" in names for names in told)


def test_a_copy_of_the_state_does_not_share_moments() -> None:
    model = tower()
    optimizer = LISA(model, draw=cycle)
    train(model, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, range(2, 3))
    index = next(iter(saved["state"]))
    assert saved["state"][index]["step"] == 2
