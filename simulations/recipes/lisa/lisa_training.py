"""LISA and other methods fine-tune a language model centrally: loss, time per step, and where the weights move.

Paper: Pan et al. 2024 (arXiv 2403.17919).  The setup, small enough for two cores, is
`simulations.recipes.lisa.fine_tuning`'s: 300 steps on English text.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle, islice, product
from statistics import fmean, median

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from simulations.recipes.base import Metrics, Verdict, above, at_least, at_most, below, part, recipe
from simulations.recipes.cells import averages, best_settings, by_name, mean_ratio, on_all_cores, paired_difference
from simulations.recipes.lisa import fine_tuning
from simulations.recipes.lisa.fine_tuning import METHODS, PRETRAINING_STEPS, fine_tune, share_of_gain

_STEPS = 300
_RATES = {
    "full": (1e-3, 2e-3, 4e-3, 8e-3),
    "lora": (4e-3, 8e-3, 1.6e-2, 3.2e-2),
    "galore": (4e-3, 8e-3, 1.6e-2, 3.2e-2),
    "lisa": (1e-3, 2e-3, 4e-3, 8e-3),
}


@recipe(
    (
        "At the best rate of a small sweep LISA ends with a lower validation loss than LoRA, and within 3 % of full "
        "fine-tuning."
    ),
    part("LISA's final loss is below LoRA's", below(0.0, "lisa_minus_lora_high")),
    part("LISA's final loss is within 3 % of full fine-tuning's", at_most(1.03, "lisa_over_full")),
    source="LISA, sections 4.2 and 4.5",
    quick=[at_least(0.5, "share_of_gain")],
    null={"lisa_minus_lora_high": 0.0, "lisa_over_full": 1.1, "share_of_gain": 0.0},
    expected=Verdict.DOES_NOT_HOLD,
)
def lisa_convergence(quick: bool) -> Metrics:
    """Return final validation losses (quick: full fine-tuning and LISA, one rate, one seed, 40 steps).

    `share_of_gain`: the fraction of full fine-tuning's improvement on the base's loss that LISA reaches;
    `lisa_minus_lora` with its 95 % interval.

    Paper: sections 4.2 and 4.5: LISA converges like full fine-tuning and ends better than LoRA, at rates tuned for each
    method.  LoRA of rank 8 on all linear layers of the blocks, whose moments are a fraction of those of LISA's two
    blocks; GaLore of rank 16; LISA with embedding, head and two of six blocks, drawn every 10 steps.  The rates are a
    factor of two apart. The best one is chosen on seed 0 by validation loss and confirmed on three other seeds.  A
    first sweep ended a factor of four lower; all four methods were best at its upper end, so it was extended.

    The hypothesis was fixed before anything was run: LISA ends below LoRA, and at most 3 % above full fine-tuning.
    """
    if quick:
        job = partial(fine_tune, lr=1e-3, steps=40, seed=1, pretraining_steps=60)
        jobs = {(name, 1): partial(job, METHODS[name]) for name in ("full", "lisa")}
        # steps=0: the base's own loss
        return _metrics(by_name(on_all_cores(jobs | {("base", 1): partial(job, METHODS["full"], steps=0)})))
    sweep = {
        (name, rate): partial(fine_tune, METHODS[name], lr=rate, steps=_STEPS)
        for name, rates in _RATES.items()
        for rate in rates
    }
    best = best_settings(on_all_cores(sweep))
    runs = {  # seed by seed, since each process caches its bases
        (name, seed): partial(fine_tune, METHODS[name], lr=best[name], steps=_STEPS, seed=seed)
        for seed in (1, 2, 3)
        for name in best
    }
    runs |= {("base", seed): partial(fine_tune, METHODS["full"], lr=1e-3, steps=0, seed=seed) for seed in (1, 2, 3)}
    return _metrics(by_name(on_all_cores(runs))) | {f"{name}_rate": rate for name, rate in best.items()}


def _metrics(losses: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return means over seeds, and ratios of LISA to the others, paired by seed."""
    lisa, others = losses["lisa"], [name for name in losses if name not in ("lisa", "base")]
    metrics = averages(losses) | {f"lisa_over_{name}": mean_ratio(lisa, losses[name]) for name in others}
    if "lora" in losses:
        difference = paired_difference(lisa, losses["lora"])
        metrics |= {f"lisa_minus_lora{end}": difference[f"difference{end}"] for end in ("", "_low", "_high")}
    return metrics | {"share_of_gain": share_of_gain(losses["base"], lisa, losses["full"])}


_KEPT = 0  # the period of a draw that is never repeated
_CONTRASTS = ("one_minus_four_blocks", "short_minus_long_period", "fixed_minus_redrawn")


@recipe(
    (
        "LISA ends lower with four of six blocks than with one, with longer periods, and with blocks drawn anew than "
        "with blocks drawn once."
    ),
    part(
        "sampling four of six blocks gives a lower final loss than sampling one",
        above(0.0, "one_minus_four_blocks_low"),
    ),
    part("longer sampling periods give a lower final loss", above(0.0, "short_minus_long_period_low")),
    part("fixed blocks give a higher final loss than resampled blocks", above(0.0, "fixed_minus_redrawn_low")),
    source="LISA, section 4.5 and appendix A.4",
    quick=[above(0.0, "one_minus_four_blocks")],
    null=dict.fromkeys(("one_minus_four_blocks", *(f"{quantity}_low" for quantity in _CONTRASTS)), 0.0),
    expected=Verdict.IN_PART,
)
def lisa_ablation(quick: bool) -> Metrics:
    """Return mean validation losses `loss_<blocks>_<period>` (quick: 1 and 4 blocks, one period, one seed, 40 steps).

    Paper: section 4.5 and appendix A.4: "more sampling layers and higher sampling period lead to better performance",
    up to a point; layers that are drawn once and kept ("LISA-fix") are generally worse than repeated draws.  The rate
    is 1e-3 for all; 1, 2 and 4 of 6 blocks; a draw every 5, 20 and 75 steps; 3 seeds.  (The paper's K is a period in
    steps in one place, and a number of segments in another.)

    Averaged over periods, 4 blocks end below 1. Averaged over numbers of blocks, periods of 75 steps end below those of
    5, and draws every 20 steps below a single draw.  `_low` is the low end of the difference's 95 % interval, paired by
    seed.
    """
    layers, periods, seeds = ((1, 4), (5, _KEPT), (0,)) if quick else ((1, 2, 4), (5, 20, 75, _KEPT), (0, 1, 2))
    steps, pretraining_steps = (40, 60) if quick else (_STEPS, PRETRAINING_STEPS)
    jobs = {}
    for layer, period, seed in product(layers, periods, seeds):
        # `or 20`: a period must be positive, though without `redraw` it has no effect
        method = {"name": "lisa", "num_sampled_layers": layer, "period": period or 20, "redraw": period != _KEPT}
        jobs[layer, period, seed] = partial(
            fine_tune, method, lr=1e-3, steps=steps, seed=seed, pretraining_steps=pretraining_steps
        )
    losses = on_all_cores(jobs)

    def of_seeds(layers: Sequence[int], periods: Sequence[int]) -> list[float]:
        return [fmean(losses[layer, period, seed] for layer, period in product(layers, periods)) for seed in seeds]

    drawn = [period for period in periods if period != _KEPT]
    contrasts = {
        "one_minus_four_blocks": (of_seeds([1], drawn), of_seeds([4], drawn)),
        "short_minus_long_period": (of_seeds(layers, drawn[:1]), of_seeds(layers, drawn[-1:])),
        "fixed_minus_redrawn": (of_seeds(layers, [_KEPT]), of_seeds(layers, [5 if quick else 20])),
    }
    metrics = {
        f"loss_{layer}_{period or 'fixed'}": fmean(of_seeds([layer], [period]))
        for layer, period in product(layers, periods)
    }
    for name, (first, second) in contrasts.items():
        metrics[name] = fmean(first) - fmean(second)
        if not quick:
            metrics[f"{name}_low"] = paired_difference(first, second)["difference_low"]
    return metrics


_WARM_UP = 2  # uncounted steps of each method


@recipe(
    (
        "An iteration of LISA with 2 of 12 blocks is at least 1.2 times as fast as one of full fine-tuning, and not "
        "slower than LoRA's."
    ),
    part("an iteration of LISA is at least 1.2 times as fast as full fine-tuning's", at_least(1.2, "full_over_lisa")),
    part("an iteration of LISA takes less time than LoRA's", above(1.0, "lora_over_lisa")),
    part("an iteration of LISA is 2.9 times as fast as full fine-tuning's", at_least(2.9, "full_over_lisa")),
    part("an iteration of LISA is 1.5 times as fast as LoRA's", at_least(1.5, "lora_over_lisa")),
    source="LISA, Figure 4",
    quick=[at_least(1.1, "full_over_lisa_flops")],
    null=dict.fromkeys(("full_over_lisa", "lora_over_lisa", "full_over_lisa_flops"), 1.0),
    expected=Verdict.IN_PART,
)
def lisa_speed(quick: bool) -> Metrics:
    """Return seconds per iteration (median), LISA's speedup, and its ratio of floating-point operations.

    The quick check (4 blocks, 3 rounds) judges operations of matrix products (`..._flops`), which other programs on the
    machine do not disturb.

    Paper: section 4.1: for LLaMA-2-7B with batches of one, on a GPU, an iteration of LISA takes 1/2.9 of full
    fine-tuning's time and 1/1.5 of LoRA's.  Here: our `gpt` of 12 blocks, width 256 and 8 heads, batches of 8 rows of
    128 characters, torch's default AdamW (on a CPU a loop over tensors), on this machine's CPU with torch's default
    threads.  Counting multiplications, LISA saves nothing in the forward pass and in the backward pass to the inputs,
    but computes only a sixth of the weight gradients. That leaves (1 + 1 + 1/6)/3 of full fine-tuning's, a speedup of
    1.38, plus the savings in the optimizer.

    The methods take single steps in turn, in changing order, so that other load hits all of them; ratios are medians of
    the rounds' ratios.  The hypothesis was fixed before anything was run: at least 1.2 times as fast as full
    fine-tuning, not slower than LoRA.  On a busy machine this can fail for reasons unrelated to LISA: rerun it alone.
    """
    rounds, steps = (3 if quick else 25), {name: _stepper(name, quick) for name in ("full", "lora", "lisa")}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for at in range(rounds + _WARM_UP):
        # starts with another method in each round: the first one would pay for cold caches every time
        for name in islice(cycle(steps), at % len(steps), at % len(steps) + len(steps)):
            began = time.perf_counter()
            steps[name]()
            if at >= _WARM_UP:
                times[name].append(time.perf_counter() - began)
    metrics = {f"{name}_s": median(found) for name, found in times.items()}
    # outside of the timed rounds: the counter slows a step down
    flops = {name: _flops(steps[name]) for name in ("full", "lisa")}
    metrics["full_over_lisa_flops"] = flops["full"] / flops["lisa"]
    for name in ("full", "lora"):
        # ratios within a round first: load that lasts for a round cancels
        metrics[f"{name}_over_lisa"] = median(
            other / one for other, one in zip(times[name], times["lisa"], strict=True)
        )
    return metrics


def _flops(step: Callable[[], None]) -> int:
    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())


def _stepper(name: str, quick: bool) -> Callable[[], None]:
    method = {**METHODS[name], "period": 5} if name == "lisa" else METHODS[name]
    work = fine_tuning.workload(0, method, depth=4 if quick else 12, width=256, num_heads=8)
    model = work.make_model()
    batch = work.dataset.train.batch(torch.arange(fine_tuning.BATCH_SIZE))
    return partial(fine_tuning.take_step, work, model, fine_tuning.begin(work, model, 1e-4, round=1), batch)


_NORM_RATES = {"full": 1e-3, "lora": 4e-3}
_ADAPTED = {"query", "key", "value", "out", "up", "down", "head"}


@recipe(
    "Under LoRA the head's norm is hundreds of times that of the blocks; under full fine-tuning it is not.",
    part(
        "under LoRA, the norm of the head is at least 100 times that of the blocks",
        at_least(100.0, "lora_weights_ratio"),
    ),
    part(
        "LoRA changes the head at least 100 times as much as the blocks",
        at_least(100.0, "lora_change_ratio"),
    ),
    part(
        "the head's share of the change is larger under LoRA than under full fine-tuning",
        above(0.0, "lora_minus_full_low"),
    ),
    source="LISA, section 3.1",
    quick=[at_least(0.1, "smallest_change_ratio")],  # both train the head
    null={
        "lora_weights_ratio": 1.0,
        "lora_change_ratio": 1.0,
        "lora_minus_full_low": 0.0,
        "smallest_change_ratio": 0.0,
    },
    expected=Verdict.DOES_NOT_HOLD,
)
def lisa_weight_norms(quick: bool) -> Metrics:
    """Return ratios of norms averaged over all steps, means over 3 seeds (quick: 30 steps after 60, one seed).

    Paper: sections 3.1 and 3.2: the mean over training of a layer's weight norm, w(l) = (1/T) sum_t ||theta_t(l)||_2,
    recorded after every step.  Under LoRA that of the embedding or the head is larger than that of the layers between
    "often by a factor of hundreds"; under full fine-tuning it is not.

    Here the model's head is a separate matrix, with LoRA adapters like all linear layers; the embedding has none, since
    `peft`'s would not be merged into the measured weights.  The paper does not define a layer's norm under LoRA; the
    norm
    of the weights is dominated by the base, which both methods share.  So two are measured over all matrices of a
    layer:
    the norm of the weights, W + (alpha/r) B A under LoRA (`..._weights_ratio`), and of their change by fine-tuning
    (`..._change_ratio`); each is the head's norm over the mean of the blocks'.  300 steps.

    The thresholds are the paper's: "hundreds" is 100 or more, of either norm, and the head's share of the change is
    larger under LoRA than under full fine-tuning (`lora_minus_full`, of the two ratios, with the low end of its 95 %
    interval).
    """
    seeds = (0,) if quick else (0, 1, 2)
    jobs = {(name, seed): partial(_ratios, name, seed, quick) for seed in seeds for name in _NORM_RATES}
    ratios = by_name(on_all_cores(jobs))
    found = {
        f"{name}_{quantity}_ratio": [each[quantity] for each in of_seeds]
        for name, of_seeds in ratios.items()
        for quantity in ("weights", "change")
    }
    pair = found["lora_change_ratio"], found["full_change_ratio"]
    difference = paired_difference(*pair)
    metrics = averages(found) | {"lora_over_full": mean_ratio(*pair), "lora_minus_full": difference["difference"]}
    metrics["smallest_change_ratio"] = min(metrics["lora_change_ratio"], metrics["full_change_ratio"])
    return metrics if quick else metrics | {"lora_minus_full_low": difference["difference_low"]}


def _ratios(name: str, seed: int, quick: bool) -> dict[str, float]:
    """Return the head's mean norm over the blocks', of the weights and of their change."""
    method = {**METHODS[name], "targets": sorted(_ADAPTED)} if name == "lora" else METHODS[name]
    steps, pretraining_steps = (30, 60) if quick else (300, PRETRAINING_STEPS)
    work, model = fine_tuning.pretrained(method, seed, pretraining_steps, tied=False)
    # without adapters `effective` returns views, which training changes
    start = {name: tensor.clone() for name, tensor in effective(model)}
    norms = {quantity: defaultdict[str, list[float]](list) for quantity in ("weights", "change")}

    def record(model: nn.Module) -> None:
        weights = dict(effective(model))
        layers = defaultdict[str, list[str]](list)
        for name in weights:
            # "blocks.3.attention.query" belongs to the layer "blocks.3"
            layers[name if name == "head" else ".".join(name.split(".")[:2])].append(name)
        for layer, names in layers.items():
            norms["weights"][layer].append(_norm([weights[name] for name in names]))
            norms["change"][layer].append(_norm([weights[name] - start[name] for name in names]))

    train = fine_tuning.half(work.dataset.train, 1)
    fine_tuning.minimize(work, model, train, steps=steps, lr=_NORM_RATES[name], round=2, on_step=record)
    return {
        quantity: fmean(of["head"]) / fmean(fmean(of[layer]) for layer in of if layer != "head")
        for quantity, of in norms.items()
    }


def _norm(tensors: list[Tensor]) -> float:
    # the norm of all matrices together, without concatenating them
    return float(torch.stack([tensor.norm() for tensor in tensors]).norm())


@torch.no_grad()
def effective(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return the matrices of the linear layers with adapters merged."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            yield name, module.get_base_layer().weight + module.get_delta_weight("default")
        elif isinstance(module, nn.Linear) and name.rpartition(".")[2] in _ADAPTED:
            yield name, module.weight.detach()
