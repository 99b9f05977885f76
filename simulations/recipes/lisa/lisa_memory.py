"""LISA fits LLaMA-2-7B into 24 GB, and takes less than LoRA at 70B: what is certain of the paper's table, from shapes alone.

Paper: arXiv 2403.17919, section 4.1: mini-batches of one row of 1,024 tokens, weights, gradients and moments in bf16, no activation
checkpointing; LoRA of rank 128 on all linear layers, embedding and head, dropout 0.1.  Differs: attention with a fused kernel, which keeps no
tokens x tokens weights; the paper's runs had none, and `math_7b_lisa_2l_gb` says what that makes.  Bytes are 10^9 a GB; a device's
context is not in them.
"""

from collections.abc import Mapping
from itertools import pairwise

import torch

from fedsign.memory.estimate import Estimate, Setting, estimate
from fedsign.memory.methods import methods_of
from fedsign.memory.step import AttentionKind
from simulations.memory.estimate import of_named
from simulations.recipes.base import Figures, at_least, at_most, recipe, within

SEVEN = {"eh": "E+H", "lisa_2l": "E+H+2L", "lisa_4l": "E+H+4L", "full": "full"}


def of(model: str, methods: Mapping[str, str], attention: AttentionKind = "fused") -> dict[str, Estimate]:
    """One row of the paper's table, by the methods' names here."""
    work = of_named(model, batch=1, tokens=1024, checkpoint=False)
    bf16 = torch.bfloat16
    setting = Setting(weights=bf16, gradients=bf16, states=bf16, attention=attention)
    made = methods_of(methods.values(), rank=128, dropout=0.1)
    return {name: estimate(work, method, setting) for name, method in zip(methods, made, strict=True)}


def _peaks(estimates: Mapping[str, Estimate]) -> dict[str, float]:
    return {name: found.peak.total_bytes / 1e9 for name, found in estimates.items()}


@recipe(
    "LISA with 2 layers trains LLaMA-2-7B in 24 GB, and LLaMA-2-70B in less than LoRA of rank 128; it takes more with every layer.",
    within(15.0, 0.05, "static_7b_eh_gb"),
    within(17.5, 0.05, "static_7b_lisa_2l_gb"),
    within(19.9, 0.05, "static_7b_lisa_4l_gb"),
    within(53.9, 0.05, "static_7b_full_gb"),
    at_most(24.0, "peak_7b_lisa_2l_gb"),
    at_least(0.0, "smallest_step_7b_gb", "lora_minus_lisa_70b_gb"),
)
def lisa_memory(quick: bool) -> Figures:
    """Peaks and static parts in GB; nothing is drawn, so that a quick check is the whole one."""
    seven = of("llama-2-7b", SEVEN)
    peaks = _peaks(seven)
    seventy = _peaks(of("llama-2-70b", {"lora": "lora", "lisa_2l": "E+H+2L"}))
    math = _peaks(of("llama-2-7b", {"lisa_2l": "E+H+2L"}, attention="math"))
    return {
        **{f"static_7b_{name}_gb": found.static_bytes / 1e9 for name, found in seven.items()},
        **{f"peak_7b_{name}_gb": peak for name, peak in peaks.items()},
        "smallest_step_7b_gb": min(after - before for before, after in pairwise(peaks.values())),
        "math_7b_lisa_2l_gb": math["lisa_2l"],
        **{f"peak_70b_{name}_gb": peak for name, peak in seventy.items()},
        "lora_minus_lisa_70b_gb": seventy["lora"] - seventy["lisa_2l"],
    }
