"""LISA fits LLaMA-2-7B into 24 GB, and takes less than LoRA at 70B: what is certain of the paper's table, from shapes alone.

Paper: arXiv 2403.17919, section 4.1: mini-batches of one row of 1,024 tokens, weights, gradients and moments in bf16, no activation
checkpointing; LoRA of rank 128 on all linear layers, embedding and head, dropout 0.1.  Differs: attention with a fused kernel, which keeps no
tokens x tokens weights; the paper's runs had none, and `math_7b_lisa_2l_gb` says what that makes.  Bytes are 10^9 a GB; a device's
context is not in them.
"""

from itertools import pairwise

import torch

from fedsign.memory.estimate import Estimate, Setting, Work, estimate
from fedsign.memory.methods import methods_of
from fedsign.memory.named import subject_of
from fedsign.memory.step import AttentionKind, Precision, next_tokens
from simulations.recipes.base import Figures, at_least, at_most, recipe, within

TOKENS, RANK, DROPOUT = 1024, 128, 0.1
IN_BF16 = Precision(weights=torch.bfloat16, gradients=torch.bfloat16, states=torch.bfloat16)
SEVEN = {"eh": "E+H", "lisa_2l": "E+H+2L", "lisa_4l": "E+H+4L", "full": "full"}


def of(model: str, method: str, attention: AttentionKind = "fused") -> Estimate:
    """One row of one cell of the paper's table."""
    subject = subject_of(model)
    work = Work(
        title=subject.title,
        make=lambda: subject.make(TOKENS, False),
        batch=lambda dtype: next_tokens(1, TOKENS, subject.vocabulary),
    )
    (asked,) = methods_of([method], rank=RANK, dropout=DROPOUT)
    return estimate(work, asked, Setting(precision=IN_BF16, attention=attention))


@recipe(
    "LISA with 2 layers trains LLaMA-2-7B in 24 GB, and LLaMA-2-70B in less than LoRA of rank 128; it takes more with every layer.",
    within("static_7b_eh_gb", 15.0, 0.05),
    within("static_7b_lisa_2l_gb", 17.5, 0.05),
    within("static_7b_lisa_4l_gb", 19.9, 0.05),
    within("static_7b_full_gb", 53.9, 0.05),
    at_most("peak_7b_lisa_2l_gb", 24.0),
    at_least("smallest_step_7b_gb", 0.0),
    at_least("lora_minus_lisa_70b_gb", 0.0),
)
def lisa_memory(quick: bool) -> Figures:
    """Peaks and static parts in GB; nothing is drawn, so that a quick check is the whole one."""
    seven = {name: of("llama-2-7b", method) for name, method in SEVEN.items()}
    peaks = {f"peak_7b_{name}_gb": found.peak.total_bytes / 1e9 for name, found in seven.items()}
    lora, lisa = (of("llama-2-70b", method).peak.total_bytes / 1e9 for method in ("lora", "E+H+2L"))
    return {
        **{f"static_7b_{name}_gb": found.static.total / 1e9 for name, found in seven.items()},
        **peaks,
        "smallest_step_7b_gb": min(after - before for before, after in pairwise(peaks.values())),
        "math_7b_lisa_2l_gb": of("llama-2-7b", "E+H+2L", "math").peak.total_bytes / 1e9,
        "peak_70b_lora_gb": lora,
        "peak_70b_lisa_2l_gb": lisa,
        "lora_minus_lisa_70b_gb": lora - lisa,
    }
