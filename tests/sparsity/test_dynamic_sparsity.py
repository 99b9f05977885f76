"""RigL (arXiv 1911.11134, Algorithm 1) and gradual magnitude pruning (arXiv 1710.01878, Equation 1)."""

from collections.abc import Iterator
from math import cos, pi
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsign.config import from_dict
from fedsign.errors import ConfigError
from fedsign.models.cnn import cnn
from fedsign.models.gpt import gpt
from fedsign.optim.base import optimizer_of
from fedsign.parameterization.apply import Parameterized, parameterize, parameterized
from fedsign.parameterization.masks import Mask
from fedsign.parameterization.schemes import SmuPar
from fedsign.parameterization.sparsity.base import Masked, MaskRule, largest
from fedsign.parameterization.sparsity.gmp import GMP
from fedsign.parameterization.sparsity.rigl import RigL
from fedsign.sections import OptimizerPart
from fedsign.workload import Workload
from simulations.api import run

VOCABULARY, LENGTH = 40, 12
DENSITY = 1 / 8
ADAMW = {"name": "packed_adamw", "beta1": 0.9, "beta2": 0.95}
SGD = {"name": "packed_sgd", "momentum": 0.9}
RIGL = RigL(drop_fraction=0.3, every=3, last_step=12)
GRADUAL = GMP(initial_density=1.0, every=2, first_step=1, last_step=9)


def text_model(rule: MaskRule | None) -> nn.Module:
    torch.manual_seed(0)
    model = gpt((LENGTH,), VOCABULARY, depth=2, width=32, num_heads=2)
    parameterize(model, SmuPar(base_width=16, density=DENSITY, init_std=0.1), seed=3, rule=rule)
    return model


def image_model(rule: MaskRule | None) -> nn.Module:
    torch.manual_seed(0)
    model = cnn((3, 8, 8), 5, channels=(16, 32))
    parameterize(model, SmuPar(base_width=16, density=DENSITY, init_std=0.1), seed=3, rule=rule)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def made_of(model: nn.Module) -> Parameterized:
    made = parameterized(model)
    assert made is not None and made.masks
    return made


def gradients(model: nn.Module, num_steps: int) -> Iterator[int]:
    """Put a batch's gradients on the parameters, step after step, counted from 1."""
    stream = torch.Generator().manual_seed(1)
    for step in range(1, num_steps + 1):
        model.zero_grad()
        if hasattr(model, "embedding"):
            given = torch.randint(VOCABULARY, (3, LENGTH), generator=stream)
            outputs, targets = model(given[:, :-1]).flatten(0, 1), given[:, 1:].flatten()
        else:
            outputs = model(torch.randn(6, 3, 8, 8, generator=stream))
            targets = torch.randint(5, (6,), generator=stream)
        nn.functional.cross_entropy(outputs, targets).backward()
        yield step


def optimizer(settings: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    return optimizer_of(OptimizerPart(**settings), model, 0.01, 0.1)


def rows(state: dict[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}


def test_the_share_that_rigl_drops_decays_as_a_cosine() -> None:
    """f(0) = alpha, f(T_end / 2) = alpha / 2, f(T_end) = 0."""
    rule = RigL(drop_fraction=0.3, every=100, last_step=800)
    assert [rule.fraction(step) for step in (0, 400, 800)] == pytest.approx([0.3, 0.15, 0.0])
    assert rule.fraction(200) == pytest.approx(0.15 * (1 + 2**-0.5))
    assert [step for step in range(1, 1200) if rule.changes_at(step)] == [100, 200, 300, 400, 500, 600, 700]


def test_density_of_gradual_pruning_follows_the_cubic_schedule() -> None:
    """n = 4 changes from 1 to 0.36: 0.36 + 0.64 (1 - k / 4)^3, which is 0.63, 0.44, 0.37 and 0.36."""
    rule = GMP(initial_density=1.0, every=10, first_step=5, last_step=45)
    steps = [step for step in range(1, 100) if rule.changes_at(step)]
    assert steps == [15, 25, 35, 45]
    assert [rule.density(step, 0.36) for step in steps] == pytest.approx([0.63, 0.44, 0.37, 0.36])
    assert rule.density(5, 0.36) == 1.0
    assert GMP(initial_density=0.5, every=10, first_step=0, last_step=49).span == 40


def test_of_equal_scores_the_earlier_count() -> None:
    assert largest(torch.tensor([0.0, 2.0, 2.0, 2.0, 1.0]), 2).tolist() == [False, True, True, False, False]
    assert not largest(torch.ones(3), 0).any()


@pytest.mark.parametrize("make", [text_model, image_model])
@pytest.mark.parametrize("settings", [ADAMW, SGD])
def test_a_change_of_rigl_drops_the_smallest_and_grows_what_the_gradient_asks_for(
    make: Any, settings: dict[str, Any]
) -> None:
    model = make(RIGL)
    made, its = made_of(model), optimizer(settings, model)
    changes = 0
    for step in gradients(model, 14):
        there = {name: mask.is_present.clone() for name, mask in made.masks.items()}
        weights = {name: each.detach().clone() for name, each in model.named_parameters()}
        states = {name: rows(its.state[model.get_parameter(name)]) for name in there}
        dense = {name: mask.dense_gradient for name, mask in made.masks.items()}
        assert all((each is not None) == (step in (3, 6, 9)) for each in dense.values())
        its.step()
        if step not in (3, 6, 9):
            assert all(torch.equal(made.masks[name].is_present, was) for name, was in there.items())
            continue
        for name, each in model.named_parameters():
            if name not in there:  # no weight is moved in a step that changes masks
                assert torch.equal(each, weights[name]), name
        for name, before in there.items():
            gradient = dense[name]
            assert gradient is not None
            k = int(int(before.sum()) * 0.15 * (1 + cos(pi * step / 12)))
            changes += check_rigl(name, made, model, its, before, weights[name], states[name], gradient, k)
    assert changes > 0


def check_rigl(
    name: str,
    made: Parameterized,
    model: nn.Module,
    its: torch.optim.Optimizer,
    before: Tensor,
    weights: Tensor,
    states: dict[str, Tensor],
    gradient: Tensor,
    k: int,
) -> int:
    """All that Algorithm 1 says of a tensor; how many weights are new."""
    parameter, after = model.get_parameter(name).detach(), made.masks[name].is_present
    order = np.lexsort((np.arange(before.numel()), weights.abs().flatten().numpy()))
    dropped = [place for place in order if before.flatten()[place]][:k]
    absent = ~before.flatten()
    absent[dropped] = True
    candidates = absent.nonzero().squeeze(1)
    asked = gradient.abs().flatten()[candidates]
    grown = candidates[torch.from_numpy(np.lexsort((np.arange(len(asked)), -asked.numpy())))[:k]]
    expected = before.clone().flatten()
    expected[dropped] = False
    expected[grown] = True
    assert torch.equal(after.flatten(), expected), name
    assert int(after.sum()) == int(before.sum()) == made.masks[name].num
    stays = before & after
    assert torch.equal(parameter[stays], weights[stays]) and not parameter[~stays].any()
    fresh = rows(its.state[model.get_parameter(name)])
    for key, row in states.items():
        whole = torch.zeros(before.shape)
        whole[before] = row
        assert torch.equal(fresh[key], (whole * stays)[after]), key
        assert not fresh[key][~before[after]].any() and row.any()
    return int((after & ~before).sum())


class Reference:
    """A straightforward implementation: torch's optimizer, masks of 0 and 1, moments set to 0."""

    def __init__(self, model: nn.Module, settings: dict[str, Any]) -> None:
        self.model = model
        groups = [
            {"params": group["params"], "lr": group["lr"], "weight_decay": group["weight_decay"]}
            for group in optimizer(settings, model).param_groups
        ]
        self.optimizer = (
            torch.optim.AdamW(groups, betas=(settings["beta1"], settings["beta2"]))
            if settings is ADAMW
            else torch.optim.SGD(groups, momentum=settings["momentum"])
        )
        self.masks = {name: mask.is_present.float() for name, mask in made_of(model).masks.items()}

    def hear(self) -> dict[str, Tensor]:
        """Dense gradients; what the parameters keep is masked."""
        dense = {}
        for name, mask in self.masks.items():
            gradient = self.model.get_parameter(name).grad
            assert gradient is not None
            dense[name] = gradient.clone()
            gradient.mul_(mask)
        return dense

    @torch.no_grad()
    def change(self, masks: dict[str, Tensor]) -> None:
        for name, mask in masks.items():
            parameter = self.model.get_parameter(name)
            parameter.mul_(self.masks[name] * mask)
            for key, value in self.optimizer.state[parameter].items():
                if key != "step":
                    value.mul_(self.masks[name] * mask)
            self.masks[name] = mask


@torch.no_grad()
def rigl_by_hand(weights: Tensor, mask: Tensor, gradient: Tensor, step: int) -> Tensor:
    num = int(mask.sum())
    k = int(num * RIGL.drop_fraction / 2 * (1 + cos(pi * step / RIGL.last_step)))
    score = torch.where(mask > 0, weights.abs(), torch.full_like(weights, -1.0)).flatten().numpy()
    kept = np.argsort(-score, kind="stable")[: num - k]
    hungry = gradient.abs().flatten().numpy().copy()
    hungry[kept] = -1.0
    found = np.zeros(mask.numel(), dtype=np.float32)
    found[kept] = 1
    found[np.argsort(-hungry, kind="stable")[:k]] = 1
    return torch.from_numpy(found).view_as(mask)


@torch.no_grad()
def gmp_by_hand(weights: Tensor, mask: Tensor, gradient: Tensor, step: int) -> Tensor:
    num = round((DENSITY + (1 - DENSITY) * (1 - (step - 1) / 8) ** 3) * mask.numel())
    found = np.zeros(mask.numel(), dtype=np.float32)
    found[np.argsort(-weights.abs().flatten().numpy(), kind="stable")[:num]] = 1
    return torch.from_numpy(found).view_as(mask)


@pytest.mark.parametrize("make", [text_model, image_model])
@pytest.mark.parametrize("settings", [ADAMW, SGD])
@pytest.mark.parametrize(
    ("rule", "by_hand", "steps"), [(RIGL, rigl_by_hand, (3, 6, 9)), (GRADUAL, gmp_by_hand, (3, 5, 7, 9))]
)
def test_packed_training_under_changing_masks_gives_the_bits_of_dense_training(
    make: Any, settings: dict[str, Any], rule: MaskRule, by_hand: Any, steps: tuple[int, ...]
) -> None:
    """The reference shares neither masks nor selection nor optimizer with the code under test."""
    packed, plain = make(rule), make(rule)
    its, reference = optimizer(settings, packed), Reference(plain, settings)
    for name in made_of(plain).masks:  # its hooks would mask the gradients
        plain.get_parameter(name)._backward_hooks.clear()  # type: ignore[union-attr]
    for step, _ in zip(gradients(packed, 12), gradients(plain, 12), strict=True):
        dense = reference.hear()
        if not (step in steps and rule.replaces_step):
            reference.optimizer.step()
        if step in steps:
            masks = {
                name: by_hand(plain.get_parameter(name), mask, dense[name], step)
                for name, mask in reference.masks.items()
            }
            reference.change(masks)
        its.step()
        for name, tensor in plain.state_dict().items():
            assert torch.equal(packed.state_dict()[name], tensor), (step, name)
        for name, mask in made_of(packed).masks.items():
            assert torch.equal(mask.is_present.float(), reference.masks[name]), (step, name)


@pytest.mark.parametrize(("settings", "width"), [(ADAMW, 8), (SGD, 4)])
@pytest.mark.parametrize("rule", [RIGL, GRADUAL])
def test_state_takes_its_width_times_the_weights_that_there_are_at_every_step(
    settings: dict[str, Any], width: int, rule: MaskRule
) -> None:
    model = text_model(rule)
    made, its = made_of(model), optimizer(settings, model)
    seen = []
    for _ in gradients(model, 12):
        its.step()
        there = sum(
            made.masks[name].num if name in made.masks else each.numel() for name, each in model.named_parameters()
        )
        taken = sum(row.untyped_storage().nbytes() for state in its.state.values() for row in rows(state).values())
        assert taken == width * there
        seen.append(there)
    assert (len(set(seen)) == 1) == (rule is RIGL)


def test_rigl_keeps_the_number_of_weights_of_every_tensor() -> None:
    model, static = text_model(RIGL), text_model(None)
    its = optimizer(ADAMW, model)
    for _ in gradients(model, 12):
        its.step()
    for name, mask in made_of(static).masks.items():
        changed = made_of(model).masks[name]
        assert changed.num == mask.num == int((changed.is_present).sum()) == len(changed.indices)
        assert not torch.equal(changed.is_present, mask.is_present)
        assert not model.get_parameter(name)[~changed.is_present].any()


def test_gradual_pruning_starts_dense_ends_at_its_density_exactly_and_takes_the_smallest() -> None:
    model = text_model(GRADUAL)
    made, its = made_of(model), optimizer(ADAMW, model)
    assert all(mask.is_present.all() for mask in made.masks.values())
    assert {made.plan.tensors[name].density for name in made.masks} == {DENSITY}
    for step in gradients(model, 12):
        before = {name: mask.is_present for name, mask in made.masks.items()}
        was = {name: rows(its.state[model.get_parameter(name)]) for name in before}
        its.step()
        if step not in (3, 5, 7, 9):
            continue
        for name, mask in made.masks.items():
            expected = DENSITY + (1 - DENSITY) * (1 - (step - 1) / 8) ** 3
            assert mask.num == round(expected * mask.is_present.numel())
            assert not (mask.is_present & ~before[name]).any()  # nothing comes back
            assert len(was[name]["exp_avg"]) > mask.num == len(rows(its.state[model.get_parameter(name)])["exp_avg"])
    for name, mask in made.masks.items():
        size = mask.is_present.numel()
        assert size % 8 == 0 and mask.num == size // 8
        assert (
            model.get_parameter(name)[mask.is_present].all() and not model.get_parameter(name)[~mask.is_present].any()
        )


def test_pruning_takes_the_smallest_of_those_that_are_there() -> None:
    rule = GMP(initial_density=0.75, every=1, first_step=0, last_step=1)
    assert rule.first_density(0.25) == 0.75
    weights, there = torch.tensor([[3.0, -1.0], [0.5, 9.0]]), torch.tensor([[True, True], [True, False]])
    kept = rule.new_mask(Masked(weights, Mask(there), density=0.5), step=1)
    assert kept.tolist() == [[True, True], [False, False]]


def test_a_dense_gradient_in_pieces_is_the_sum() -> None:
    mask, weights = Mask(torch.tensor([True, False])), nn.Parameter(torch.zeros(2))
    weights.register_hook(mask)
    mask.keep_gradient(True)
    for factor in (1.0, 3.0):
        (factor * weights * torch.tensor([1.0, 2.0])).sum().backward()
    assert mask.dense_gradient is not None and mask.dense_gradient.tolist() == [4.0, 8.0]
    assert weights.grad is not None and weights.grad.tolist() == [4.0, 0.0]
    mask.keep_gradient(False)
    assert mask.dense_gradient is None


BASE: dict[str, Any] = {
    "callbacks": [],
    "rounds": 1,
    "partition": {"num_clients": 2, "alpha": 1.0},
    "server": {"cohort_size": 2},
    "client": {"optimizer": {"name": "packed_adamw"}},
    "parameterization": {"name": "smupar", "density": 0.25, "base_width": 64},
    "sparsity": {"name": "rigl", "every": 2, "last_step": 10},
}


def test_a_configuration_names_the_rule() -> None:
    made = made_of(Workload(from_dict(BASE)).make_model())
    assert made.rule == RigL(drop_fraction=0.3, every=2, last_step=10)
    settings = {"name": "gmp", "every": 2, "last_step": 10}
    made = made_of(Workload(from_dict({**BASE, "sparsity": settings})).make_model())
    assert made.rule == GMP(initial_density=1.0, every=2, first_step=0, last_step=10)
    assert RigL(last_step=109) == RigL(drop_fraction=0.3, every=100, last_step=109)


@pytest.mark.parametrize("rule", [RigL, GMP])
def test_a_rule_that_would_never_change_a_mask_is_refused(rule: Any) -> None:
    with pytest.raises(ConfigError, match=r"sparsity\.last_step=9 leaves no step"):
        rule(last_step=9, every=10)


def no_rule() -> Any:
    return 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"client": {"optimizer": {"name": "adamw"}}}, "use packed_sgd or packed_adamw"),
        ({"parameterization": {"name": "none"}}, "no masks to change"),
        ({"sparsity": {"name": "gmp", "last_step": 5, "initial_density": 0.125}}, "raise it, or lower"),
        ({"sparsity": {"name": "gmp", "last_step": 300, "initial_density": 0.125}}, "is below a density of 0.25"),
        ({"sparsity": {"name": f"{__name__}:no_rule"}}, "expected a MaskRule"),
    ],
)
def test_what_does_not_go_with_changing_masks_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        workload = Workload(from_dict({**BASE, **changes}))
        optimizer_of(workload.config.client.optimizer, workload.make_model(), 0.1, 0.0)


@pytest.mark.parametrize(
    ("rule", "num"),
    [
        ({"name": "rigl", "last_step": 200}, 64 * 64 // 4),
        ({"name": "gmp", "last_step": 200, "initial_density": 0.5}, 64 * 64 // 2),
    ],
)
def test_a_rule_starts_from_an_exact_draw_if_that_is_asked_for(rule: dict[str, Any], num: int) -> None:
    """RigL keeps the number of weights; pruning starts with that of its initial density."""
    changes = {"model": {"name": "mlp", "hidden": [64, 64]}, "sparsity": {**rule, "draw": "exact"}}
    made = made_of(Workload(from_dict({**BASE, **changes})).make_model())
    assert [mask.num for mask in made.masks.values()] == [num]


ALONE: dict[str, Any] = {
    **BASE,
    "partition": {"name": "iid", "num_clients": 1},
    "server": {"cohort_size": 1},
    "strategy": {"name": "fedavg"},
    "client": {"local_steps": 12, "optimizer": {"name": "packed_adamw"}},
}


@pytest.mark.parametrize("changes", [{"rounds": 2}, {"partition": BASE["partition"], "server": BASE["server"]}])
def test_a_federation_refuses_masks_that_change(changes: dict[str, Any], tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r"sparsity.name=rigl was given with rounds=.*use sparsity.name=static"):
        run({**ALONE, **changes, "results": {"root": str(tmp_path)}})
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="leaves no step"):
        GMP(last_step=10, every=20)


@pytest.mark.parametrize("name", ["rigl", "gmp"])
def test_one_client_in_one_round_trains_under_masks_that_change(name: str, tmp_path: Any) -> None:
    """What is served afterwards is what the client had: so many weights, in places of their own."""
    changes = {"sparsity": {"name": name, "every": 2, "last_step": 10}, "results": {"root": str(tmp_path)}}
    done = run({**ALONE, **changes})
    static = made_of(Workload(from_dict({**ALONE, "sparsity": {"name": "static"}})).make_model())
    model = done.model()
    for key, mask in static.masks.items():
        there = model.get_parameter(key).detach() != 0
        size = there.numel()
        assert int(there.sum()) == (mask.num if name == "rigl" else size // 4)
        assert int((there & ~mask.is_present).sum()) > size // 100
    workload = Workload(from_dict({**ALONE, **changes}))
    assert workload.evaluate(model)["loss"] == pytest.approx(done.rounds[-1]["loss"], rel=1e-6)
