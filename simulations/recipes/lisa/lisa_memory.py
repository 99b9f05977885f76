"""LISA fits LLaMA-2-7B into 24 GB and takes less than LoRA at 70B: the deterministic part of the paper's table.

Paper: arXiv 2403.17919, section 4.1: mini-batches of one row of 1,024 tokens, weights, gradients and moments in bf16,
no activation checkpointing; LoRA of rank 128 on all linear layers, embedding and head, dropout 0.1.  Memory is computed
from shapes. Differs: attention uses a fused kernel, which keeps no tokens x tokens weights, unlike the paper's runs;
`math_7b_lisa_2l_gb` shows the effect.  A GB is 10^9 bytes; the device's context is not included.
"""

from collections.abc import Mapping
from itertools import pairwise

import torch

from fedsign.memory.estimate import Estimate, Setting, estimate
from fedsign.memory.methods import methods_of
from fedsign.memory.step import AttentionKind
from simulations.memory.estimate import of_named
from simulations.recipes.base import Metrics, Verdict, above, at_most, part, recipe, within

_STATIC = {
    "eh": 15.0,
    "lisa_2l": 17.5,
    "lisa_4l": 19.9,
    "full": 53.9,
}  # GB: 2 bytes per weight, 6 per trained weight
SEVEN = {"eh": "E+H", "lisa_2l": "E+H+2L", "lisa_4l": "E+H+4L", "full": "full"}


def of(model: str, methods: Mapping[str, str], attention: AttentionKind = "fused") -> dict[str, Estimate]:
    """Return one row of the paper's table, by method."""
    work = of_named(model, batch=1, tokens=1024, checkpoint=False)
    bf16 = torch.bfloat16
    setting = Setting(weights=bf16, gradients=bf16, states=bf16, attention=attention)
    made = methods_of(methods.values(), rank=128, dropout=0.1)
    return {name: estimate(work, method, setting) for name, method in zip(methods, made, strict=True)}


def _peaks(estimates: Mapping[str, Estimate]) -> dict[str, float]:
    return {name: found.peak.total_bytes / 1e9 for name, found in estimates.items()}


@recipe(
    (
        "LISA with 2 layers trains LLaMA-2-7B in 24 GB, and LLaMA-2-70B in less than LoRA of rank 128; it takes more "
        "with every layer."
    ),
    part("LLaMA-2-7B with two layers fits into 24 GB with fused attention", at_most(24.0, "peak_7b_lisa_2l_gb")),
    part(
        "LLaMA-2-7B with two layers fits into 24 GB with 1,024 tokens and without fused attention, as in the paper",
        at_most(24.0, "math_7b_lisa_2l_gb"),
    ),
    part("memory grows with the number of sampled layers: none, two, four, all", above(0.0, "smallest_step_7b_gb")),
    part("LLaMA-2-70B with two layers takes less than with LoRA of rank 128", above(0.0, "lora_minus_lisa_70b_gb")),
    source="LISA, section 4.1",
    given=[threshold for name, gb in _STATIC.items() for threshold in within(gb, 0.05, f"static_7b_{name}_gb")],
    null={
        **{f"static_7b_{name}_gb": gb for name, gb in _STATIC.items()},
        **dict.fromkeys(("peak_7b_lisa_2l_gb", "math_7b_lisa_2l_gb"), 53.9),  # full fine-tuning's
        **dict.fromkeys(("smallest_step_7b_gb", "lora_minus_lisa_70b_gb"), 0.0),
    },
    quick=[at_most(24.0, "peak_7b_lisa_2l_gb"), above(0.0, "smallest_step_7b_gb", "lora_minus_lisa_70b_gb")],
    expected=Verdict.IN_PART,
)
def lisa_memory(quick: bool) -> Metrics:
    """Return peaks and static parts in GB. Nothing is random, so a quick check is a full one."""
    seven = of("llama-2-7b", SEVEN)
    peaks = _peaks(seven)
    seventy = _peaks(of("llama-2-70b", {"lora": "lora", "lisa_2l": "E+H+2L"}))
    math = _peaks(of("llama-2-7b", {"lisa_2l": "E+H+2L"}, attention="math"))
    return {
        **{f"static_7b_{name}_gb": found.static_bytes / 1e9 for name, found in seven.items()},
        **{f"peak_7b_{name}_gb": peak for name, peak in peaks.items()},
        # SEVEN is in ascending order: any negative step is a counterexample
        "smallest_step_7b_gb": min(after - before for before, after in pairwise(peaks.values())),
        "math_7b_lisa_2l_gb": math["lisa_2l"],
        **{f"peak_70b_{name}_gb": peak for name, peak in seventy.items()},
        "lora_minus_lisa_70b_gb": seventy["lora"] - seventy["lisa_2l"],
    }
