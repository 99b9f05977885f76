"""LoRA: starts bit-identical to its base, trains and sends only adapters, and merges into a plain model."""

import copy
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from clients.local_optim import LocalOptimizer
from clients.state.store import ClientStore
from clients.trainer import SequentialTrainer
from fedsign import plugins
from fedsign.compatibility import Experiment
from fedsign.config import ExperimentConfig, from_dict
from fedsign.data.text import libraries as llm
from fedsign.errors import ConfigError
from fedsign.models.transform import plain_model
from fedsign.optim.lora import adapt
from fedsign.records import ObjectiveSpec, TrainReply, tensors_of
from fedsign.seeding import Purpose, global_stream
from fedsign.workload import Workload
from simulations.api import run
from tests.language.test_gpt import LLAMA
from tests.language.test_gpt import build as gpt
from tests.training.requests import request

if find_spec("peft") is None:
    pytest.skip("peft is not installed", allow_module_level=True)

SETTINGS: dict[str, Any] = {"rank": 3, "alpha": 6.0, "dropout": 0.0, "targets": "all_linear", "head": False}


def of_transformers(kind: str) -> nn.Module:
    from fedsign.models.causal_lm import CausalLM, untie

    library = llm.transformers("this test")
    ends = {"vocab_size": 17, "bos_token_id": 0, "eos_token_id": 1}
    if kind == "gpt2":
        config = library.GPT2Config(**ends, n_positions=12, n_embd=32, n_layer=2, n_head=4)
    else:
        config = library.LlamaConfig(
            **ends,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    with global_stream(0, Purpose.MODEL):
        network = library.AutoModelForCausalLM.from_config(config)
    untie(network)
    return CausalLM(network)


def mlp() -> nn.Module:
    with global_stream(0, Purpose.MODEL):
        model: nn.Module = plugins.build("model", "mlp", {"hidden": [7, 5]}, (12,), 4)
    return model


MODELS: dict[str, Any] = {
    "gpt": gpt,
    "LLaMA-like": lambda: gpt(**LLAMA, num_kv_heads=2),
    "recomputed": lambda: gpt(checkpoint_activations=True),
    "transformers LLaMA": lambda: of_transformers("llama"),
    "transformers GPT-2": lambda: of_transformers("gpt2"),
    "mlp": mlp,
}
LANGUAGE = [name for name in MODELS if name != "mlp"]


def inputs(name: str, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if name == "mlp":
        return torch.randn(3, 12, generator=generator)
    return torch.randint(17, (3, 12), generator=generator)


def adapted(name: str, seed: int = 0, **changes: Any) -> nn.Module:
    model: nn.Module = MODELS[name]()
    with global_stream(seed, Purpose.ADAPTERS):
        adapt(model, SETTINGS | changes)
    return model


def moved(model: nn.Module, seed: int = 5) -> nn.Module:
    """With adapters that do something."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_an_adapted_model_starts_as_its_base_to_the_last_bit(name: str) -> None:
    base, model = MODELS[name]().eval(), adapted(name).eval()
    assert torch.equal(model(inputs(name)), base(inputs(name)))
    starts = dict(model.named_parameters())
    assert starts and all(key.endswith((".lora_A.default.weight", ".lora_B.default.weight")) for key in starts)
    for key, parameter in starts.items():
        assert parameter.any() == (".lora_A." in key)
        assert parameter.abs().max() <= 1 / math.sqrt(parameter.shape[1])  # Kaiming's bound with a = sqrt(5)


@pytest.mark.parametrize("name", MODELS)
def test_the_seed_alone_decides_the_adapters_bits(name: str) -> None:
    one, again, other = (adapted(name, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[key], again[key]) for key in one)
    assert not all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("name", MODELS)
def test_the_state_is_the_adapters_and_nothing_else_trains(name: str) -> None:
    """rank x (in + out) numbers for each linear layer, and gradients for all of them once B is not 0."""
    base, model = MODELS[name](), moved(adapted(name)).train()
    assert list(model.state_dict()) == [key for key, _ in model.named_parameters(remove_duplicate=False)]
    sides = [sum(each.weight.shape) for each in base.modules() if isinstance(each, nn.Linear) or hasattr(each, "nf")]
    tied = getattr(base, "head", 0) is None or name == "transformers GPT-2"
    end = 0 if tied else sides[-1]  # the head, or the classifier, is not among the targets
    assert sum(parameter.numel() for parameter in model.parameters()) == 3 * (sum(sides) - end)
    model(inputs(name)).logsumexp(dim=-1).mean().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), key
        assert parameter.grad.any() or "key" in key, key


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_merged_model_is_the_adapted_one_to_rounding_and_has_the_bases_names(name: str, head: bool) -> None:
    base, model = MODELS[name](), moved(adapted(name, head=head).double()).eval()
    expected = model(inputs(name).double() if name == "mlp" else inputs(name)).detach()
    frozen = {key: buffer.clone() for key, buffer in model.named_buffers()}
    kept = dict(model.named_buffers())
    merged = plain_model(copy.copy(model))
    found = merged(inputs(name).double() if name == "mlp" else inputs(name)).detach()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    plain = base.double().eval()(inputs(name).double() if name == "mlp" else inputs(name)).detach()
    assert (found - plain).abs().max() > 1e-3
    assert merged.state_dict().keys() == base.state_dict().keys()
    assert {key for key, _ in merged.named_parameters()} == {key for key, _ in base.named_parameters()}
    assert all(torch.equal(kept[key], frozen[key]) for key in frozen)  # others may use them


def test_a_layer_gives_w_x_plus_alpha_over_rank_b_a_x() -> None:
    model = moved(adapted("mlp").double())
    layer: Any = model.get_submodule("0")
    x = torch.randn(4, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    a, b = layer.lora_A.default.weight, layer.lora_B.default.weight
    expected = x @ layer.weight.T + layer.bias + 6.0 / 3 * x @ a.T @ b.T
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_the_ends_train_whole_where_they_are_asked_for(name: str) -> None:
    base, model = MODELS[name](), adapted(name, head=True)
    whole = {key: parameter for key, parameter in model.named_parameters() if ".lora_" not in key}
    ends = {"mlp": ["4.weight", "4.bias"], "gpt": ["embedding.weight"], "recomputed": ["embedding.weight"]}
    ends |= {
        "transformers GPT-2": ["network.transformer.wte.weight"],
        "LLaMA-like": ["embedding.weight", "head.weight"],
    }
    ends |= {"transformers LLaMA": ["network.model.embed_tokens.weight", "network.lm_head.weight"]}
    assert list(whole) == ends[name]
    assert all(torch.equal(whole[key], base.state_dict()[key]) for key in whole)


def test_targets_are_the_ends_of_names() -> None:
    def layers(**changes: Any) -> set[str]:
        return {key.partition(".lora_")[0] for key, _ in adapted("LLaMA-like", **changes).named_parameters()}

    assert layers(targets=["query", "value"]) == {
        f"blocks.{at}.attention.{name}" for at in (0, 1) for name in ("query", "value")
    }
    assert layers(targets="blocks.1.ffn.up") == {"blocks.1.ffn.up"}
    assert layers(targets=["head"]) == {"head"}
    assert layers(targets=["all_linear", "head"]) == layers() | {"head"}
    assert len(layers()) == 2 * 7


def test_what_cannot_be_adapted_is_a_sentence() -> None:
    with pytest.raises(
        ConfigError,
        match=r"targets=\['querry'\] was given, but the GPT has no linear layer 'querry'\. Did you mean 'query'\?",
    ):
        adapted("gpt", targets=["querry"])
    with pytest.raises(ConfigError, match=r"names 'head', which client\.optimizer\.head=true trains whole"):
        adapted("LLaMA-like", targets=["head"], head=True)
    with pytest.raises(ConfigError, match=r"has no linear layer ''"):
        adapted("gpt", targets=[])
    with pytest.raises(ConfigError, match=r"client\.optimizer\.targets"):
        adapted("gpt", targets=[])


def test_on_the_meta_device_nothing_is_allocated() -> None:
    with torch.device("meta"):
        model = adapted("LLaMA-like")
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


def experiment(tmp_path: Path, **changes: Any) -> ExperimentConfig:
    optimizer = {"name": "lora", "rank": 2, "head": True, "dropout": 0.1}
    return from_dict(
        {
            "rounds": 3,
            "callbacks": [],
            "partition": {"num_clients": 4, "alpha": 1.0},
            "client": {"local_epochs": 1, "lr": 0.01, "optimizer": optimizer},
            "server": {"cohort_size": 2},
            "results": {"root": str(tmp_path / "runs"), "checkpoint_every": 1},
            **changes,
        }
    )


def test_every_process_makes_the_same_model_and_a_reply_holds_what_trains(tmp_path: Path) -> None:
    work = Workload(experiment(tmp_path))
    one, other = work.make_model(), Workload(work.config).make_model()
    served = tensors_of(one)
    assert served.keys() == other.state_dict().keys()
    assert all(torch.equal(served[name], other.state_dict()[name]) for name in served)
    base = {name: buffer.clone() for name, buffer in one.named_buffers()}
    assert base and not base.keys() & served.keys()
    trainer = SequentialTrainer(work)
    (reply,) = trainer.train_many([request(served)], ClientStore(tmp_path / "states"))
    assert isinstance(reply, TrainReply) and reply.tensors.keys() == served.keys() == reply.roles.keys()
    assert any(not torch.equal(reply.tensors[name], served[name]) for name in served if ".lora_B." in name)
    assert all(torch.equal(buffer, base[name]) for name, buffer in trainer._model.module.named_buffers())


def test_a_run_learns_and_its_files_hold_adapters_alone(tmp_path: Path) -> None:
    config = experiment(tmp_path, rounds=5)
    done = run(config)
    assert done.rounds[-1]["accuracy"] > done.rounds[0]["accuracy"] > 0.1
    saved = [*done.path.rglob("*.safetensors")]
    assert saved
    names = Workload(config).make_model().state_dict().keys()
    assert load_file(done.path / "model.safetensors").keys() == names
    assert all(not name.endswith("base_layer.weight") for path in saved for name in load_file(path))


@pytest.mark.parametrize("strategy", ["fedprox", "feddyn", "fedsign", "moon", "flower_fedadam", "flower_fedmedian"])
def test_a_strategy_takes_the_adapters_for_the_model(strategy: str, tmp_path: Path) -> None:
    config = experiment(tmp_path, strategy={"name": strategy}, rounds=2)
    done = run(config)
    assert math.isfinite(done.rounds[-1]["loss"]) and not done.rounds[-1]["failures"]
    assert load_file(done.path / "model.safetensors").keys() == Workload(config).make_model().state_dict().keys()


def test_scaffold_needs_an_optimizer_that_does_not_rescale(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"client\.optimizer\.name=lora was given, but objective 'scaffold' needs an optimizer"
    ):
        run(experiment(tmp_path, strategy={"name": "scaffold"}))


@pytest.mark.needs("cohort")
def test_a_stack_of_clients_is_refused_and_so_is_a_strategy_that_changes_layers_itself(tmp_path: Path) -> None:
    from clients.cohort.rules import COHORT

    why = COHORT.why_not(Experiment(workload=Workload(experiment(tmp_path)), spec=ObjectiveSpec()))
    assert why == "client.optimizer.name=lora freezes weights, of which a stack would hold one copy for each client"
    with pytest.raises(ConfigError, match=r"the layer '\d' is changed by the strategy already"):
        Workload(experiment(tmp_path, strategy={"name": "fedpan"})).make_model()


def test_the_optimizer_is_adamw_of_the_adapters() -> None:
    model = adapted("mlp")
    made: Any = plugins.build("optimizer", "lora", {"beta1": 0.8}, model.parameters(), 0.01, 0.1)
    assert type(made) is torch.optim.AdamW
    assert [id(each) for each in made.param_groups[0]["params"]] == [id(each) for each in model.parameters()]
    assert (made.defaults["lr"], made.defaults["betas"], made.defaults["weight_decay"]) == (0.01, (0.8, 0.999), 0.1)
    assert LocalOptimizer(lambda lr: made).fresh(0.01) is made


def test_models_of_one_experiment_hold_the_frozen_weights_once_and_merging_leaves_the_others_alone(
    tmp_path: Path,
) -> None:
    work = Workload(experiment(tmp_path))
    one, other = work.make_model(), work.with_section("client", path="sequential", chunk=0).make_model()
    frozen, its = dict(one.named_buffers()), dict(other.named_buffers())
    assert frozen and all(frozen[name] is its[name] for name in frozen)
    kept = [value for values in vars(one)["_fedsign_outside_state"].values() for value in values.values()]
    assert all(any(value is own for own in frozen.values()) for value in kept if isinstance(value, Tensor))
    before = {name: buffer.clone() for name, buffer in its.items()}
    plain_model(moved(one))
    assert all(torch.equal(buffer, before[name]) for name, buffer in other.named_buffers())
    elsewhere = dict(Workload(work.config).make_model().named_buffers())
    assert all(elsewhere[name] is not its[name] and torch.equal(elsewhere[name], its[name]) for name in its)
