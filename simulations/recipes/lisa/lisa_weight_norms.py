"""Where LoRA and full fine-tuning move a language model: the norms that made the authors of LISA sample layers.

Paper: Pan et al. 2024 (arXiv 2403.17919), sections 3.1 and 3.2: the mean over training of a layer's weight norm,
w(l) = (1/T) sum_t ||theta_t(l)||_2, recorded after every step.  Under LoRA that of the embedding or the head is larger than that of the
layers between "often by a factor of hundreds"; under full fine-tuning it is not.

The model's head is a matrix of its own here, and LoRA has adapters on it as on all linear layers; the embedding has none, since
`peft`'s would not be merged into what is read off.  What a layer's norm is under LoRA the paper does not say: that of the
weights is the base's, which both methods share.  So two are measured, over all matrices of a layer: of the weights, W + (alpha/r) B A under
LoRA (`..._weights_ratio`), and of what fine-tuning has changed of them (`..._change_ratio`); each the head's over the mean of the
blocks'.  Set-up: `simulations.recipes.lisa.fine_tuning`, 300 steps.

The hypothesis was fixed before anything was run: the head's share of the change is larger under LoRA than under full fine-tuning
(`lora_over_full` above 1), and a factor of hundreds is not reached (`lora_change_ratio` below 100) in so small a model.
"""

from collections import defaultdict
from collections.abc import Iterator
from statistics import fmean

import torch
from torch import Tensor, nn

from simulations.backends.base import intra_op_threads
from simulations.recipes.base import Figures, at_least, at_most, recipe
from simulations.recipes.lisa.fine_tuning import METHODS, PRETRAINING_STEPS, fine_tune

_RATES = {"full": 1e-3, "lora": 4e-3}
_ADAPTED = {"query", "key", "value", "out", "up", "down", "head"}


@recipe(
    "LoRA's changes lie in the head rather than in the blocks, more so than those of full fine-tuning.",
    at_least(1.0, "lora_over_full"),
    at_most(100.0, "lora_change_ratio"),
    quick=[at_most(100.0, "lora_change_ratio")],
)
def lisa_weight_norms(quick: bool) -> Figures:
    """Ratios of norms that are means over all steps (quick: 30 steps after 60)."""
    with intra_op_threads(1):  # products this small are no faster with more, and much slower beside other work
        figures = {f"{name}_{what}_ratio": ratio for name in _RATES for what, ratio in _ratios(name, quick).items()}
    return figures | {"lora_over_full": figures["lora_change_ratio"] / figures["full_change_ratio"]}


def _ratios(name: str, quick: bool) -> dict[str, float]:
    """The head's mean norm over that of the blocks, of the weights and of their change."""
    method = {**METHODS[name], "targets": sorted(_ADAPTED)} if name == "lora" else METHODS[name]
    steps, pretraining_steps = (30, 60) if quick else (300, PRETRAINING_STEPS)
    start: dict[str, Tensor] = {}
    norms = {what: defaultdict[str, list[float]](list) for what in ("weights", "change")}

    def record(step: int, model: nn.Module) -> None:
        weights = dict(effective(model))
        if not step:
            start.update({name: tensor.clone() for name, tensor in weights.items()})
            return
        layers = defaultdict[str, list[str]](list)
        for name in weights:
            layers[name if name == "head" else ".".join(name.split(".")[:2])].append(name)
        for layer, names in layers.items():
            norms["weights"][layer].append(_norm([weights[name] for name in names]))
            norms["change"][layer].append(_norm([weights[name] - start[name] for name in names]))

    fine_tune(method, lr=_RATES[name], steps=steps, pretraining_steps=pretraining_steps, tied=False, on_step=record)
    return {
        what: fmean(of["head"]) / fmean(fmean(of[layer]) for layer in of if layer != "head")
        for what, of in norms.items()
    }


def _norm(tensors: list[Tensor]) -> float:
    return float(torch.stack([tensor.norm() for tensor in tensors]).norm())


@torch.no_grad()
def effective(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The matrices of the linear layers, adapters added."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            yield name, module.get_base_layer().weight + module.get_delta_weight("default")
        elif isinstance(module, nn.Linear) and name.rpartition(".")[2] in _ADAPTED:
            yield name, module.weight.detach()
