"""What each tensor gets from a parameterization: Table 1 of arXiv 2405.15743, row by row."""

from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedsign.errors import ConfigError
from fedsign.models.cnn import cnn
from fedsign.models.gpt import GPT, gpt
from fedsign.models.mlp import linear, mlp
from fedsign.models.transform import plain_model
from fedsign.optim.base import optimizer_of
from fedsign.parameterization.apply import parameterize, parameterized
from fedsign.parameterization.masks import mask_of
from fedsign.parameterization.plan import Plan, plan_of
from fedsign.parameterization.roles import ModelRoles, Role
from fedsign.parameterization.schemes import MuP, Scheme, SmuPar
from fedsign.records import roles_of
from fedsign.sections import OptimizerPart

STD, WIDTH, HEAD, DEPTH, VOCABULARY, LENGTH = 0.1, 64, 16, 2, 40, 12
M_D, RHO = 4.0, 0.25  # of a base of width 16


def small_gpt(seed: int = 0, **settings: Any) -> GPT:
    torch.manual_seed(seed)
    return gpt((LENGTH,), VOCABULARY, **{"depth": DEPTH, "width": WIDTH, "num_heads": WIDTH // HEAD, **settings})


def tokens(seed: int = 1, rows: int = 3) -> Tensor:
    return torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


def made(scheme: Scheme, model: nn.Module | None = None, seed: int = 0) -> nn.Module:
    """A model drawn from one stream, whatever the scheme."""
    model = small_gpt() if model is None else model
    torch.manual_seed(7)
    parameterize(model, scheme, seed=seed)
    return model


def part(name: str = "adamw", **settings: Any) -> OptimizerPart:
    return OptimizerPart(name=name, **settings)


@pytest.mark.parametrize(
    ("scheme", "init", "adam", "sgd", "others_sgd"),
    [
        (Scheme(init_std=STD, density=RHO), 1, 1, 1, 1),
        (MuP(base_width=16, init_std=STD, density=RHO), M_D, 1 / M_D, 1, M_D),
        (SmuPar(base_width=16, init_std=STD, density=RHO), M_D * RHO, 1 / (M_D * RHO), 1 / RHO, M_D),
        (SmuPar(base_width=16, base_density=0.5, init_std=STD, density=RHO), M_D / 2, 2 / M_D, 2, M_D),
        (SmuPar(base_width=16, init_std=STD, density=RHO, corrects="init"), M_D * RHO, 1 / M_D, 1, M_D),
        (SmuPar(base_width=16, init_std=STD, density=RHO, corrects="rate"), M_D, 1 / (M_D * RHO), 1 / RHO, M_D),
    ],
)
def test_start_and_rates_of_every_tensor_are_those_of_table_1(
    scheme: Scheme, init: float, adam: float, sgd: float, others_sgd: float
) -> None:
    """`init`: sigma_base^2 over a hidden tensor's variance; `adam` and `sgd`: its rates over eta_base."""
    plan = plan_of(small_gpt(tied=False), scheme)
    for name, tensor in plan.tensors.items():
        hidden = name.endswith(tuple(f"{each}.weight" for each in ("query", "key", "value", "out", "up", "down")))
        adds = name.endswith(("out.weight", "down.weight"))
        if hidden:
            expected = STD / sqrt(init) / (sqrt(2 * DEPTH) if adds else 1)
            assert (tensor.role, tensor.density, tensor.decays) == (Role.HIDDEN, RHO, True), name
            assert tensor.init_std == pytest.approx(expected, rel=1e-12), name
            assert (tensor.adam_rate, tensor.sgd_rate) == pytest.approx((adam, sgd), rel=1e-12), name
            continue
        assert (tensor.density, tensor.adam_rate, tensor.sgd_rate) == (1, 1, others_sgd), name
        match name:
            case "embedding.weight" | "positions.weight":
                assert (tensor.role, tensor.init_std, tensor.decays) == (Role.EMBEDDING, STD, True)
            case "head.weight":
                assert (tensor.role, tensor.init_std, tensor.decays) == (Role.UNEMBEDDING, STD, True)
            case _:
                assert (tensor.role, tensor.init_std, tensor.decays) == (Role.VECTOR, None, False), name


def test_multipliers_of_the_passes_are_those_of_table_1() -> None:
    for scheme in (MuP, SmuPar):
        plan = plan_of(small_gpt(), scheme(base_width=16, alpha_input=3.0, alpha_output=2.0))
        assert (plan.input, plan.output) == (3.0, 2.0 / M_D)
        assert plan.attention == {f"blocks.{index}.attention": 1 / HEAD for index in range(DEPTH)}
        based = plan_of(small_gpt(), scheme(base_width=16, base_head_width=9))
        assert set(based.attention.values()) == {3 / HEAD}
    plan = plan_of(small_gpt(), Scheme())
    assert (plan.input, plan.output, plan.attention) == (1, 1, {})


@pytest.mark.parametrize("tied", [True, False])
def test_the_passes_are_multiplied_where_the_table_says(tied: bool) -> None:
    """A network whose blocks add nothing is norm(alpha_in (E + P)) alpha_out / m_d, read off."""
    model = made(SmuPar(base_width=16, alpha_input=3.0, alpha_output=2.0), small_gpt(tied=tied))
    assert isinstance(model, GPT)
    with torch.no_grad():
        for block in model.blocks:
            for part_of in (block.attention.out, block.ffn.down):  # type: ignore[union-attr]
                part_of.weight.zero_()  # type: ignore[union-attr,operator]
        given = tokens()
        stream = 3.0 * (model.embedding.weight[given] + model.positions.weight)  # type: ignore[union-attr]
        normed = nn.functional.layer_norm(stream, (WIDTH,), eps=1e-5) * (2.0 / M_D)
        head = model.embedding.weight if model.head is None else model.head.weight
        torch.testing.assert_close(model(given), normed @ head.T)
    assert [block.attention.scale for block in model.blocks] == [1 / HEAD] * DEPTH  # type: ignore[union-attr]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_a_folded_model_computes_the_same_without_multipliers(tied: bool, norm: str) -> None:
    scheme = SmuPar(base_width=16, init_std=0.3, density=RHO, alpha_input=3.0, alpha_output=2.0)
    model = made(scheme, small_gpt(tied=tied, norm=norm))
    plain = plain_model(model)
    assert isinstance(plain, GPT) and parameterized(plain) is None and parameterized(model) is not None
    standard = small_gpt(tied=tied, norm=norm)
    standard.load_state_dict(plain.state_dict())
    assert torch.equal(standard(tokens()), plain(tokens()))
    torch.testing.assert_close(standard(tokens()), model(tokens()), rtol=1e-4, atol=1e-5)
    assert plain_model(standard) is standard
    with pytest.raises(ConfigError, match="only the multipliers of a gpt"):
        plain_model(made(scheme, mlp((5,), 2, hidden=(32, 32))))


def test_mup_is_smupar_at_density_1() -> None:
    one, other = (made(scheme(base_width=16, init_std=STD, alpha_input=2.0)) for scheme in (MuP, SmuPar))
    assert same_training(one, other)


def test_all_are_standard_at_the_bases_width_and_density() -> None:
    """Bit for bit, through three steps of AdamW with weight decay."""
    base = {"base_width": WIDTH, "base_head_width": HEAD, "init_std": STD}
    for scheme in (MuP(**base), SmuPar(**base)):  # type: ignore[arg-type]
        assert same_training(made(Scheme(init_std=STD)), made(scheme))


def test_with_the_papers_scale_of_attention_only_the_logits_differ_from_standard() -> None:
    standard, paper = made(Scheme(init_std=STD)), made(SmuPar(base_width=WIDTH, init_std=STD))
    assert same(standard, paper)
    plans = [plan_of(model, scheme) for model, scheme in ((standard, Scheme()), (paper, SmuPar(base_width=WIDTH)))]
    assert rates(plans[0]) == rates(plans[1]) and (plans[1].input, plans[1].output) == (1, 1)
    assert not torch.equal(standard(tokens()), paper(tokens()))
    assert isinstance(paper, GPT)
    for block in paper.blocks:
        block.attention.scale = HEAD**-0.5  # type: ignore[union-attr]
    assert torch.equal(standard(tokens()), paper(tokens()))


def rates(plan: Plan) -> dict[str, tuple[float, float]]:
    return {name: (tensor.adam_rate, tensor.sgd_rate) for name, tensor in plan.tensors.items()}


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(name == its and torch.equal(tensor, theirs) for (name, tensor), (its, theirs) in pairs)


def same_training(one: nn.Module, other: nn.Module) -> bool:
    start = {name: tensor.clone() for name, tensor in one.state_dict().items()}
    for model in (one, other):
        train(model, optimizer_of(part(), model, 0.01, 0.1))
    assert not torch.equal(start["embedding.weight"], one.state_dict()["embedding.weight"])
    return same(one, other)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, clip: float = 0.0) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        given = tokens(step)
        logits = model(given[:, :-1]) if isinstance(model, GPT) else model(given.float())
        nn.functional.cross_entropy(logits.flatten(0, 1), given[:, 1:].flatten()).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def test_weights_are_drawn_with_the_planned_deviation_where_they_are() -> None:
    """The deviation of n normal numbers is within 5 / sqrt(2 n) of what it is drawn with."""
    model = made(SmuPar(base_width=16, init_std=STD, density=RHO), small_gpt(width=128, num_heads=8))
    found = parameterized(model)
    assert found is not None
    for name, tensor in found.plan.tensors.items():
        weights = model.get_parameter(name).detach()
        if tensor.init_std is None:
            assert torch.equal(
                weights, torch.ones_like(weights) if "norm" in name and "weight" in name else 0 * weights
            )
            continue
        if name in found.masks:
            assert bool((weights[~found.masks[name].is_present] == 0).all())
            weights = weights[found.masks[name].is_present]
        assert weights.std().item() == pytest.approx(tensor.init_std, rel=5 / sqrt(2 * weights.numel())), name


def test_a_mask_follows_from_seed_and_name_and_has_its_density() -> None:
    shape, density = (300, 400), 1 / 16
    mask = mask_of(3, "blocks.0.ffn.up.weight", shape, density)
    assert torch.equal(mask.is_present, mask_of(3, "blocks.0.ffn.up.weight", shape, density).is_present)
    deviation = sqrt(density * (1 - density) * 120_000)
    assert abs(mask.num - density * 120_000) < 5 * deviation
    for other in (mask_of(4, "blocks.0.ffn.up.weight", shape, density), mask_of(3, "other", shape, density)):
        shared = int((other.is_present & mask.is_present).sum())
        assert abs(shared - density**2 * 120_000) < 5 * sqrt(density**2 * 120_000)  # as of independent draws
    assert torch.equal(mask.indices.long(), mask.is_present.flatten().nonzero().squeeze(1))


def test_masks_and_multipliers_add_no_tensor() -> None:
    plain, sparse = small_gpt(), made(SmuPar(base_width=16, density=RHO, alpha_input=2.0))
    assert roles_of(plain) == roles_of(sparse)
    assert {name: tensor.shape for name, tensor in plain.state_dict().items()} == {
        name: tensor.shape for name, tensor in sparse.state_dict().items()
    }


def test_densities_of_layers_stand_before_the_density_of_all_and_correct_each_by_its_own() -> None:
    scheme = SmuPar(base_width=WIDTH, density=0.5, densities={"blocks.0.*": 1.0, "*.up.weight": 0.125})
    plan = plan_of(small_gpt(), scheme)
    expected = {"blocks.0.ffn.up.weight": 1.0, "blocks.1.ffn.up.weight": 0.125, "blocks.1.attention.key.weight": 0.5}
    for name, density in expected.items():
        assert (plan.tensors[name].density, plan.tensors[name].adam_rate) == (density, 1 / density)
    with pytest.raises(ConfigError, match="names no hidden tensor"):
        plan_of(small_gpt(), SmuPar(densities={"embedding.*": 0.5}))


def test_roles_follow_from_the_order_of_the_layers() -> None:
    found = {
        "mlp": plan_of(mlp((8, 8), 10, hidden=(32, 48)), MuP(base_width=24)),
        "cnn": plan_of(cnn((1, 8, 8), 10, channels=(8, 16)), MuP(base_width=24)),
    }
    roles = {name: {key: tensor.role for key, tensor in plan.tensors.items()} for name, plan in found.items()}
    weights = {
        name: [role for key, role in of.items() if key.endswith("weight") and role is not Role.VECTOR]
        for name, of in roles.items()
    }
    assert weights == {key: [Role.EMBEDDING, Role.HIDDEN, Role.UNEMBEDDING] for key in ("mlp", "cnn")}
    assert found["mlp"].output == 24 / 48 and found["cnn"].output == 24 / 16


def test_a_bias_behind_a_multiplied_input_is_not_multiplied() -> None:
    model = made(MuP(base_width=16, alpha_input=3.0, alpha_output=2.0), mlp((5,), 2, hidden=(32,)))
    first, last = model[0], model[2]  # type: ignore[index]
    with torch.no_grad():
        first.bias.fill_(0.5)  # type: ignore[union-attr,operator]
        last.bias.fill_(0.25)  # type: ignore[union-attr,operator]
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
        hidden = (3 * x @ first.weight.T + 0.5).relu()  # type: ignore[union-attr,operator]
        torch.testing.assert_close(
            model(x),
            hidden @ last.weight.T * (2 / 2) + 0.25,  # type: ignore[union-attr,operator]
        )


class Mine(nn.Module):
    """Registers what it reads off first."""

    def __init__(self, said: Any) -> None:
        super().__init__()
        self.read_off = nn.Linear(32, 3, bias=False)
        self.tokens = nn.Embedding(5, 32)
        self.mix = nn.Parameter(torch.zeros(32, 32))
        self.model_roles = said

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.read_off(self.tokens(x) @ self.mix)
        return found


def test_a_model_of_the_users_own_says_its_roles() -> None:
    said = ModelRoles(
        width=32,
        embedding=("tokens.weight",),
        unembedding=("read_off.weight",),
        inputs=("tokens",),
        outputs=("read_off",),
    )
    plan = plan_of(Mine(said), MuP(base_width=8))
    assert {name: tensor.role for name, tensor in plan.tensors.items()} == {
        "mix": Role.HIDDEN,
        "read_off.weight": Role.UNEMBEDDING,
        "tokens.weight": Role.EMBEDDING,
    }
    with pytest.raises(ConfigError, match="'mix' in a Mine are not known"):
        plan_of(Mine(None), MuP())
    with pytest.raises(ConfigError, match="of type dict"):
        plan_of(Mine({}), MuP())
    with pytest.raises(ConfigError, match="no layer between"):
        plan_of(linear((4,), 2), MuP())


@pytest.mark.parametrize(("decay", "factor"), [("rate", 1 / (M_D * RHO)), ("base", 1.0)])
def test_weight_decay_follows_the_groups_rate_or_the_bases(decay: Any, factor: float) -> None:
    """A step with a gradient of 0 is the decay alone: theta (1 - lr x factor x weight_decay)."""
    model = made(SmuPar(base_width=16, init_std=STD, density=RHO, decay=decay))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = optimizer_of(part(), model, 0.25, 0.5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, was in before.items():
        times = 1 - 0.25 * 0.5 * (factor if ".weight" in name and "norm" not in name and "blocks" in name else 1.0)
        if "norm" in name or name.endswith("bias"):
            times = 1.0
        torch.testing.assert_close(model.state_dict()[name], was * times)


def test_groups_have_the_plans_rates_for_the_optimizers_rule() -> None:
    for name, rule in (
        ("adamw", "adam"),
        ("adam", "adam"),
        ("sgd", "sgd"),
        ("packed_sgd", "sgd"),
        ("packed_adamw", "adam"),
    ):
        model = made(SmuPar(base_width=16, density=RHO))
        plan = plan_of(model, SmuPar(base_width=16, density=RHO))
        rate = {
            id(model.get_parameter(key)): getattr(tensor, f"{rule}_rate")  # type: ignore[arg-type]
            for key, tensor in plan.tensors.items()
        }
        optimizer = optimizer_of(part(name), model, 0.5, 0.0)
        seen = {id(each): group["lr"] / 0.5 for group in optimizer.param_groups for each in group["params"]}
        assert seen == pytest.approx(rate)


def test_what_there_is_no_rule_for_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rescales; use adamw"):
        optimizer_of(part("adam"), made(SmuPar(decay="base")), 0.1, 0.1)
    with pytest.raises(ConfigError, match=r"has no density"):
        optimizer_of(part("packed_adamw"), small_gpt(), 0.1, 0.0)


@pytest.mark.parametrize("scheme", [Scheme, MuP])
def test_with_sgd_a_step_changes_activations_alike_at_every_width_under_mup_alone(scheme: Any) -> None:
    """The change of the last hidden activations by one step, at 16 times the width: about 1 under MuP, far from it
    under sp.
    """
    changes = []
    for width in (64, 1024):
        base = {} if scheme is Scheme else {"base_width": 64}
        model = made(scheme(init_std=0.125, **base), mlp((8,), 4, hidden=(width, width)))
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
        y = torch.randint(4, (32,), generator=torch.Generator().manual_seed(1))
        optimizer = optimizer_of(part("sgd", momentum=0.0), model, 0.1, 0.0)
        hidden = model[:4]  # type: ignore[index]
        before = hidden(x).detach()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        changes.append((hidden(x).detach() - before).abs().mean().item())
    ratio = changes[1] / changes[0]
    assert 0.5 < ratio < 2 if scheme is MuP else not 0.25 < ratio < 4
