"""LoRA: AdamW on low-rank adapters beside frozen matrices; only the adapters are trained, sent, averaged, and saved.

Paper: Hu et al. 2021 (arXiv 2106.09685), section 4.1.  A layer with W_0 [out, in] computes
W_0 x + (alpha / rank) B A x.  A [rank, in] starts Kaiming-uniform and B [out, rank] at 0, so the adapted model equals
its base bit for bit.  The layers come from `peft` (extra `llm`); the experiment's seed initializes them alike in every
process.

Experts that `transformers` stores as one tensor [num, ...] have adapters A [num rank, in] and B [out, num rank], as in
`peft` (`target_parameters`; `fedsign.optim.lora_experts`).  Dropout does not apply to them: it acts on a layer's input.

The base weights become non-persistent buffers.  Every process has them from building the model; everything else, from
requests to checkpoints, sees the adapters as the model.  `fedsign.models.transform.plain_model` merges them again.

With `aggregation=average`, the server averages A and B separately, and mean(B) mean(A) is not the mean of the updates
B_k A_k.  With b_k = B_k - mean(B) and a_k = A_k - mean(A), mean(B_k A_k) = mean(B) mean(A) + mean(b_k a_k).  The last
term, which is dropped, is second order in the client drift within a round.  The exact alternatives (`Aggregation`) are
in `fedsign.partial.adapters`.  Those that change the base make the adapted matrices part of the model: persistent
buffers, which are served and stored, but not trained.
"""

import logging
import re
from collections.abc import Collection, Container, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor, nn

from fedsign.errors import ConfigError, nearest
from fedsign.extras import require
from fedsign.models.features import classifier_of
from fedsign.models.transform import Transform, attach
from fedsign.optim.adamw import Decay, Epsilon, adamw
from fedsign.optim.bnb import quiet
from fedsign.optim.lora_experts import experts_of, keep_bases
from fedsign.optim.nf4 import NF4Linear, quantize
from fedsign.torchvision_shim import torchvision
from fedsign.traits import declares

ALL_LINEAR = "all_linear"
Aggregation = Literal["average", "ffa", "flora", "fedex"]
Quantization = Literal["none", "nf4"]
CHANGES_BASE = ("flora", "fedex")
_NAME = "client.optimizer.name=lora"


def adapt(model: nn.Module, settings: Mapping[str, Any]) -> None:
    """Insert adapters and freeze everything else; `settings` are those of `lora`.

    Raises:
        ConfigError: `peft` is missing, a target does not exist, or a target has hooks.
    """
    quiet()
    torchvision()  # installs the shim: `peft` imports torchvision, which fails beside a torch without CUDA
    peft = require("peft", extra="llm", feature=_NAME)
    ends = _ends(model)
    names, experts = _targets(model, settings["targets"], ends, has_dropout=settings["dropout"] > 0)
    aggregation, ranks = settings.get("aggregation", "average"), settings.get("ranks", ())
    if experts and (aggregation != "average" or ranks):
        raise ConfigError(
            f"client.optimizer.aggregation={aggregation} and ranks={list(ranks)} were given, but '{experts[0]}' holds "
            "experts, whose adapters are averaged with one rank; use aggregation=average and ranks=[], or leave "
            "experts out of client.optimizer.targets."
        )
    if settings.get("quantization", "none") == "nf4" and (aggregation in CHANGES_BASE or experts):
        why = f"holds experts in '{experts[0]}', which are not quantized" if experts else "is changed by the server"
        raise ConfigError(
            f"client.optimizer.quantization=nf4 was given with aggregation={aggregation}, but the base {why}; use "
            "quantization=none" + (", or name linear layers in client.optimizer.targets." if experts else ", or ffa.")
        )
    whole = list(ends.values()) if settings["head"] else []
    both = [name for name in names if name in ends and settings["head"]]
    if both:
        raise ConfigError(
            f"client.optimizer.targets names '{both[0]}', which client.optimizer.head=true trains whole; "
            "leave out one of the two."
        )
    config = peft.LoraConfig(
        r=settings["rank"],
        lora_alpha=settings["alpha"],
        lora_dropout=settings["dropout"],
        # peft matches a string as a regex on the full name, but the entries of a list as suffixes
        target_modules="|".join(map(re.escape, names)) if names else [],
        target_parameters=experts or None,
        fan_in_fan_out=bool(names) and all(_is_transposed(model.get_submodule(name)) for name in names),
    )
    peft.inject_adapter_in_model(config, model)
    if experts:
        keep_bases(model, peft.tuners.lora.layer.ParamWrapper)
    if settings.get("quantization", "none") == "nf4":
        quantize(model)
    _freeze(model, config, trained=whole, aggregation=aggregation)


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapted layer: W + scale B A."""

    layer: str  # its name in the model
    scale: float
    is_transposed: bool  # W is [in, out]
    frozen_a: Tensor | None = field(default=None, compare=False)  # A, if it is not trained

    @property
    def base(self) -> str:
        """The name of W."""
        return _joined(self.layer, "base_layer.weight")

    @property
    def a(self) -> str:
        """The name of A [rank, in]."""
        return _joined(self.layer, "lora_A.default.weight")

    @property
    def b(self) -> str:
        """The name of B [out, rank]."""
        return _joined(self.layer, "lora_B.default.weight")


@dataclass(frozen=True, slots=True)
class Adapters(Transform):
    """A model's adapters; `frozen` names the former parameters that are not trained."""

    frozen: tuple[str, ...]
    adapters: tuple[Adapter, ...] = ()
    config: Any = field(default=None, compare=False)  # of `peft`

    def place(self, model: nn.Module, shared: dict[str, Tensor]) -> None:
        """Let all models of this process share the frozen tensors that never change."""
        for name in self.frozen:
            owner, key = _owner(model, name)
            if key in owner._non_persistent_buffers_set:
                setattr(owner, key, shared.setdefault(name, owner.get_buffer(key)))
        for name, module in model.named_modules():
            if isinstance(module, NF4Linear):
                module.share(name, shared)

    def save_adapters(self, network: nn.Module, base: str, folder: Path) -> int:
        """Write adapter_config.json and adapter_model.safetensors, as `peft` does.

        Raises:
            ConfigError: the base or the head was trained, too.
        """
        adapted = [(name, layer) for name, layer in network.named_modules() if hasattr(layer, "lora_A")]
        tensors = {**dict(network.named_parameters()), **dict(network.named_buffers())}
        added = {name: tensor.detach() for name, tensor in tensors.items() if ".lora_" in name}
        changed = [name for name in network.state_dict() if name not in added]
        if changed:
            raise ConfigError(
                f"the adapters alone were asked for, but the run has changed '{changed[0]}' of the base, too "
                "(client.optimizer.head=true, or aggregation=flora or fedex); export the merged model, without "
                "--adapters."
            )
        # wrappers of an expert's tensors lie in one another
        layers = [(name.replace(".base_layer", ""), getattr(layer, "parameter_name", "")) for name, layer in adapted]
        config = copy(self.config)
        config.base_model_name_or_path, config.task_type, config.inference_mode = base, "CAUSAL_LM", True
        config.target_modules = sorted(name for name, tensor in layers if not tensor)
        config.target_parameters = sorted(f"{name}.{tensor}" for name, tensor in layers if tensor) or None
        config.save_pretrained(str(folder))
        # the name of the adapter is no part of a file's keys
        keys = {f"base_model.model.{name.replace('.default', '')}": tensor for name, tensor in added.items()}
        save_file({key: tensor.contiguous() for key, tensor in keys.items()}, folder / "adapter_model.safetensors")
        return sum(tensor.numel() for tensor in added.values())

    def frozen_weights(self, model: nn.Module) -> Collection[str]:
        """All of the base."""
        return self.frozen

    def plain(self, model: nn.Module) -> nn.Module:
        """Merge the adapters: W_0 + (alpha / rank) B A; the shared tensors do not change."""
        for name in self.frozen:
            owner, key = _owner(model, name)
            setattr(owner, key, nn.Parameter(vars(owner)["_buffers"].pop(key)))
        # a list, because set_submodule changes the tree during the loop
        for name, layer in [*model.named_modules()]:
            # recognizes peft's layers without importing peft
            if not hasattr(layer, "lora_A"):
                continue
            base: Any = layer.get_base_layer()
            base = base.plain() if isinstance(base, NF4Linear) else base
            key = getattr(layer, "parameter_name", "weight")
            weight = getattr(base, key)
            with torch.no_grad():
                # out of place: all models of this process share W_0
                setattr(base, key, nn.Parameter(weight + layer.get_delta_weight("default").to(weight)))
            # adapters of several tensors of a module are nested, and the outermost one comes first
            if not name.endswith(".base_layer"):
                model.set_submodule(name, base)
        return model


@declares(adapt_model=adapt)
def lora(
    parameters: Iterable[nn.Parameter],
    lr: float,
    weight_decay: float,
    *,
    rank: Annotated[int, Field(gt=0)] = 8,
    alpha: Annotated[float, Field(gt=0)] = 16.0,
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0,
    targets: str | tuple[str, ...] = ALL_LINEAR,
    head: bool = False,
    aggregation: Aggregation = "average",
    ranks: tuple[Annotated[int, Field(gt=0)], ...] = (),
    quantization: Quantization = "none",
    beta1: Decay = 0.9,
    beta2: Decay = 0.999,
    eps: Epsilon = 1e-8,
) -> torch.optim.Optimizer:
    """AdamW on adapters at `targets`: linear layers and experts given by the ends of their names, or all but the head.

    `head` also trains the token embedding and the head, or the classifier of other models, in full.  `ranks` are those
    of the clients, `rank` at most; all clients scale by alpha / `rank`.  `aggregation`: see `fedsign.partial.adapters`.
    `quantization` is that of the adapted layers' base (`fedsign.optim.nf4`).
    """
    return adamw(parameters, lr, weight_decay, beta1=beta1, beta2=beta2, eps=eps)


def _ends(model: nn.Module) -> dict[str, nn.Module]:
    """Embedding and head of a language model, or the classifier of other models, by name."""
    ends = getattr(model, "ends", None)
    layers = [classifier_of(model)] if ends is None else list(ends)
    return {name: module for name, module in model.named_modules() if any(module is end for end in layers)}


def _targets(
    model: nn.Module, given: str | Iterable[str], ends: Mapping[str, nn.Module], *, has_dropout: bool
) -> tuple[list[str], list[str]]:
    """The linear layers and the tensors of experts to adapt; names those that `all_linear` does not cover."""
    wanted = [given] if isinstance(given, str) else list(given)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) or _is_transposed(module)]
    experts = experts_of(model)
    all_names = (*linear, *experts)
    layers, tensors = ([name for name in names if _is_named(name, wanted)] for names in (linear, experts))
    if has_dropout and tensors:
        raise ConfigError(
            f"client.optimizer.dropout was given, but '{tensors[0]}' holds experts, to which dropout does not apply; "
            "set client.optimizer.dropout=0, or leave experts out of client.optimizer.targets."
        )
    if ALL_LINEAR in wanted:
        layers = [name for name in linear if name in layers or name not in ends]
        tensors = [] if has_dropout else experts
        _warn_of_uncovered(model, {f"{name}.weight" for name in linear} | set(tensors), ends)
    lost = [each for each in wanted if each != ALL_LINEAR and not any(_is_at(name, each) for name in all_names)]
    if lost or not (layers or tensors):
        missing = next(iter(lost or wanted), "")
        last = sorted({name.rpartition(".")[2] for name in all_names})
        raise ConfigError(
            f"client.optimizer.targets={wanted} was given, but the {type(model).__name__} has no linear layer "
            f"'{missing}'.{nearest(missing, last)} Expected {ALL_LINEAR} or names that end in some of "
            f"{', '.join(last)}."
        )
    hooked = [name for name in layers if model.get_submodule(name)._forward_hooks]
    if hooked:
        raise ConfigError(
            f"{_NAME} was given, but the layer '{hooked[0]}' is changed by the strategy already, "
            "and an adapter would lie beside it; use another strategy or another optimizer."
        )
    return layers, tensors


def _warn_of_uncovered(model: nn.Module, covered: Container[str], ends: Mapping[str, nn.Module]) -> None:
    """Name the matrices that stay as they are, except embeddings, head, and classifier."""
    left: dict[str, str] = {}  # one of each kind
    for name, parameter in model.named_parameters():
        owner, key = _owner(model, name)
        is_end = name.rpartition(".")[0] in ends or isinstance(owner, nn.Embedding)
        # biases of experts have a row for each
        if parameter.dim() > 1 and not (name in covered or is_end or key.endswith("bias")):
            left.setdefault(f"{type(owner).__name__}.{key}", name)
    if left:
        _warn(
            f"client.optimizer.targets={ALL_LINEAR} leaves {', '.join(left.values())} and others of their kind without "
            "an adapter, which needs a linear layer, or experts and client.optimizer.dropout=0."
        )


@cache
def _warn(said: str) -> None:
    """Once in a process, which builds a model several times."""
    logging.getLogger("fedsign").warning(said)


def _is_named(name: str, wanted: Iterable[str]) -> bool:
    return any(_is_at(name, each) for each in wanted)


def _is_at(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _is_transposed(module: nn.Module) -> bool:
    """Whether it is GPT-2's linear layer in `transformers`, which stores [in, out]."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def _freeze(model: nn.Module, config: Any, *, trained: Iterable[nn.Module], aggregation: str) -> None:
    """Turn all parameters except the adapters and those of `trained` into buffers.

    They are non-persistent, unless the server changes them.
    """
    kept = {parameter for module in trained for parameter in module.parameters()}
    layers = {name: layer for name, layer in model.named_modules() if hasattr(layer, "lora_A")}
    if any(hasattr(layer, "parameter_name") for layer in layers.values()):
        layers = {}  # the delta of experts is no product of two matrices: the aggregation error is not measured
    adapters = [_adapter(name, layer, freezes_a=aggregation == "ffa") for name, layer in layers.items()]
    changing = {each.base for each in adapters} if aggregation in CHANGES_BASE else set()
    fixed = {each.a for each in adapters if each.frozen_a is not None}
    frozen = []
    # with duplicates: a tied parameter must become a buffer under each of its names
    for name, parameter in [*model.named_parameters(remove_duplicate=False)]:
        owner, key = _owner(model, name)
        # the dot in front also finds an adapter at the root
        if (".lora_" in f".{name}" and name not in fixed) or parameter in kept:
            parameter.requires_grad_(True)
        else:
            del owner._parameters[key]
            owner.register_buffer(key, parameter.detach(), persistent=name in changing)
            frozen.append(name)
            if name in changing:
                owner.register_load_state_dict_pre_hook(_adopt_weight)
    attach(model, Adapters(tuple(frozen), tuple(adapters), config))


def _adapter(name: str, layer: Any, *, freezes_a: bool) -> Adapter:
    frozen_a = layer.lora_A["default"].weight.detach() if freezes_a else None
    return Adapter(name, float(layer.scaling["default"]), bool(layer.fan_in_fan_out), frozen_a)


def _adopt_weight(module: nn.Module, tensors: Mapping[str, Tensor], prefix: str, *_: object) -> None:
    """Make a received base weight the buffer itself instead of copying it: nobody writes into it.

    A process then holds the base once.  Loading into a tied weight would also change the layer that it is tied to.
    """
    given, own = tensors.get(f"{prefix}weight"), module._buffers.get("weight")
    if given is None or own is None or given.shape != own.shape:
        return  # loading reports it
    if given.device == own.device and given.dtype == own.dtype:
        module._buffers["weight"] = given
    else:
        module._buffers["weight"] = torch.empty_like(own)  # the copy that follows must not write into shared memory


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key
