"""A language model that LISA fine-tunes in one place, beside other methods: its loss, how fast a step is, and where the weights move.

Paper: Pan et al. 2024 (arXiv 2403.17919).  The set-up, small enough for two cores, is `simulations.recipes.lisa.fine_tuning`'s: 300 steps
on English text.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle, islice, product
from statistics import fmean, median

import torch
from torch import Tensor, nn

from simulations.backends.base import intra_op_threads
from simulations.recipes.base import Figures, Verdict, at_least, at_most, recipe
from simulations.recipes.cells import averages, best_settings, by_name, mean_ratio, on_all_cores
from simulations.recipes.lisa import fine_tuning
from simulations.recipes.lisa.fine_tuning import METHODS, PRETRAINING_STEPS, fine_tune

_STEPS = 300
_RATES = {
    "full": (1e-3, 2e-3, 4e-3, 8e-3),
    "lora": (4e-3, 8e-3, 1.6e-2, 3.2e-2),
    "galore": (4e-3, 8e-3, 1.6e-2, 3.2e-2),
    "lisa": (1e-3, 2e-3, 4e-3, 8e-3),
}


@recipe(
    "At the best rate of a small sweep LISA ends with a lower validation loss than LoRA, and within 3 % of full fine-tuning.",
    at_most(1.0, "lisa_over_lora"),
    at_most(1.03, "lisa_over_full"),
    expected=Verdict.DOES_NOT_HOLD,  # LISA is 5.6 % above full fine-tuning after 300 steps; docs/recipes.md has the figures
    quick=[at_most(1.15, "lisa_over_full")],
)
def lisa_convergence(quick: bool) -> Figures:
    """Final validation losses (quick: full fine-tuning and LISA, one rate, one seed, 40 steps).

    Paper: sections 4.2 and 4.5: LISA converges like full fine-tuning and ends better than LoRA, at rates that are searched for each method.
    LoRA of rank 8 on all linear layers of the blocks, whose adapters have a fraction of the moments that LISA's two of six blocks
    have, GaLore of rank 16, LISA with embedding, head and two of six blocks, drawn anew every 10 steps.  The rates tried are a
    factor of two apart for all; the best one is chosen on seed 0 by the validation loss and confirmed on three others.  A first sweep
    ended a factor of four lower, and all four methods were best at its upper end: it was moved up.

    The hypothesis was fixed before anything was run: LISA ends below LoRA, and at most 3 % above full fine-tuning.
    """
    if quick:
        job = partial(fine_tune, lr=1e-3, steps=40, seed=1, pretraining_steps=60)
        return _figures(by_name(on_all_cores({(name, 1): partial(job, METHODS[name]) for name in ("full", "lisa")})))
    sweep = {
        (name, rate): partial(fine_tune, METHODS[name], lr=rate, steps=_STEPS)
        for name, rates in _RATES.items()
        for rate in rates
    }
    best = best_settings(on_all_cores(sweep))
    runs = {  # seed by seed: a process keeps the bases that it has made
        (name, seed): partial(fine_tune, METHODS[name], lr=best[name], steps=_STEPS, seed=seed)
        for seed in (1, 2, 3)
        for name in best
    }
    return _figures(by_name(on_all_cores(runs))) | {f"{name}_rate": rate for name, rate in best.items()}


def _figures(losses: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Means over seeds, and LISA's over each other's, paired by seed."""
    others = [name for name in losses if name != "lisa"]
    return averages(losses) | {f"lisa_over_{name}": mean_ratio(losses["lisa"], losses[name]) for name in others}


_KEPT = 0  # the period of a draw that is kept


@recipe(
    "LISA ends lower with four of six blocks than with one, and with blocks drawn anew than with blocks drawn once.",
    at_least(0.0, "one_minus_four_blocks", "fixed_minus_redrawn"),
    quick=[at_most(3.0, "loss_4_5")],
)
def lisa_ablation(quick: bool) -> Figures:
    """Mean validation losses `loss_<blocks>_<period>` (quick: 1 and 4 blocks, one period, one seed, 40 steps).

    Paper: section 4.5 and appendix A.4: more sampled layers are better, up to a point; layers that are drawn once and kept ("LISA-fix")
    are generally worse than layers drawn anew.  The rate is 1e-3 for all; 1, 2 and 4 of 6 blocks; a draw every 5, 20 and 75
    steps; 3 seeds.

    The hypothesis was fixed before anything was run: averaged over periods and seeds, 4 blocks end below 1; averaged over the
    numbers of blocks and seeds, draws every 20 steps end below one draw that is kept.
    """
    layers, periods, seeds = ((1, 4), (5, _KEPT), (0,)) if quick else ((1, 2, 4), (5, 20, 75, _KEPT), (0, 1, 2))
    steps, pretraining_steps = (40, 60) if quick else (_STEPS, PRETRAINING_STEPS)
    jobs = {}
    for layer, period, seed in product(layers, periods, seeds):
        method = {"name": "lisa", "num_sampled_layers": layer, "period": period or 20, "redraw": period != _KEPT}
        jobs[layer, period, seed] = partial(
            fine_tune, method, lr=1e-3, steps=steps, seed=seed, pretraining_steps=pretraining_steps
        )
    losses = on_all_cores(jobs)

    def mean(layers: Sequence[int], periods: Sequence[int]) -> float:
        return fmean(losses[cell] for cell in product(layers, periods, seeds))

    drawn = [period for period in periods if period != _KEPT]
    redrawn = 5 if quick else 20
    return {
        **{f"loss_{each}_{period or 'fixed'}": mean([each], [period]) for each, period in product(layers, periods)},
        "one_minus_four_blocks": mean([1], drawn) - mean([4], drawn),
        "fixed_minus_redrawn": mean(layers, [_KEPT]) - mean(layers, [redrawn]),
    }


_WARM_UP = 2  # steps of each, which are not counted


@recipe(
    "An iteration of LISA with 2 of 12 blocks is at least 1.2 times as fast as one of full fine-tuning, and not slower than LoRA's.",
    at_least(1.2, "full_over_lisa"),
    at_least(1.0, "lora_over_lisa"),
    quick=[at_least(0.5, "full_over_lisa")],
)
def lisa_speed(quick: bool) -> Figures:
    """Seconds of an iteration (median), and how many times as fast LISA is (quick: 4 blocks, 3 rounds).

    Paper: section 4.1: for LLaMA-2-7B with batches of one, on a GPU, an iteration of LISA takes 1/2.9 of
    full fine-tuning's time and 1/1.5 of LoRA's.  Here: our `gpt` of 12 blocks, width 256 and 8 heads, batches of 8 rows of 128
    characters, torch's AdamW as it comes (on a CPU a loop over the tensors), on this machine's CPU and as many threads as torch takes.  By counting multiplications, forward
    and backward to the inputs cost LISA the same as all, and the gradients of weights a sixth, so that (1 + 1 + 1/6)/3 of full
    fine-tuning's are left, 1.38 times as fast; the optimiser's share comes on top.

    The methods take single steps in turn, in an order that changes, so that whatever else the machine does falls on all; ratios are
    medians of the rounds' ratios.  The hypothesis was fixed before anything was run: 1.2 times as fast as full fine-tuning or more, not
    slower than LoRA.  On a machine that is busy this can fail for reasons that are not LISA's: run it again alone.
    """
    rounds, steps = (3 if quick else 25), {name: _stepper(name, quick) for name in ("full", "lora", "lisa")}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for at in range(rounds + _WARM_UP):
        for name in islice(cycle(steps), at % len(steps), at % len(steps) + len(steps)):
            began = time.perf_counter()
            steps[name]()
            if at >= _WARM_UP:
                times[name].append(time.perf_counter() - began)
    figures = {f"{name}_s": median(found) for name, found in times.items()}
    for name in ("full", "lora"):
        figures[f"{name}_over_lisa"] = median(its / mine for its, mine in zip(times[name], times["lisa"], strict=True))
    return figures


def _stepper(name: str, quick: bool) -> Callable[[], None]:
    method = {**METHODS[name], "period": 5} if name == "lisa" else METHODS[name]
    work = fine_tuning.workload(0, method, depth=4 if quick else 12, width=256, num_heads=8)
    model = work.make_model()
    batch = work.dataset.train.batch(torch.arange(fine_tuning.BATCH_SIZE))
    return partial(fine_tuning.take_step, work, model, fine_tuning.begin(work, model, 1e-4, round=1), batch)


_NORM_RATES = {"full": 1e-3, "lora": 4e-3}
_ADAPTED = {"query", "key", "value", "out", "up", "down", "head"}


@recipe(
    "LoRA's changes lie in the head rather than in the blocks, more so than those of full fine-tuning.",
    at_least(1.0, "lora_over_full"),
    at_most(100.0, "lora_change_ratio"),
    quick=[at_most(100.0, "lora_change_ratio")],
)
def lisa_weight_norms(quick: bool) -> Figures:
    """Ratios of norms that are means over all steps (quick: 30 steps after 60).

    Paper: sections 3.1 and 3.2: the mean over training of a layer's weight norm,
    w(l) = (1/T) sum_t ||theta_t(l)||_2, recorded after every step.  Under LoRA that of the embedding or the head is larger than that of the
    layers between "often by a factor of hundreds"; under full fine-tuning it is not.

    The model's head is a matrix of its own here, and LoRA has adapters on it as on all linear layers; the embedding has none, since
    `peft`'s would not be merged into what is read off.  What a layer's norm is under LoRA the paper does not say: that of the
    weights is the base's, which both methods share.  So two are measured, over all matrices of a layer: of the weights, W + (alpha/r) B A under
    LoRA (`..._weights_ratio`), and of what fine-tuning has changed of them (`..._change_ratio`); each the head's over the mean of the
    blocks'.  300 steps.

    The hypothesis was fixed before anything was run: the head's share of the change is larger under LoRA than under full fine-tuning
    (`lora_over_full` above 1), and a factor of hundreds is not reached (`lora_change_ratio` below 100) in so small a model.
    """
    with intra_op_threads(1):  # products this small are no faster with more, and much slower beside other work
        figures = {
            f"{name}_{what}_ratio": ratio for name in _NORM_RATES for what, ratio in _ratios(name, quick).items()
        }
    return figures | {"lora_over_full": figures["lora_change_ratio"] / figures["full_change_ratio"]}


def _ratios(name: str, quick: bool) -> dict[str, float]:
    """The head's mean norm over that of the blocks, of the weights and of their change."""
    method = {**METHODS[name], "targets": sorted(_ADAPTED)} if name == "lora" else METHODS[name]
    steps, pretraining_steps = (30, 60) if quick else (300, PRETRAINING_STEPS)
    work, model = fine_tuning.pretrained(method, 0, pretraining_steps, tied=False)
    start = {name: tensor.clone() for name, tensor in effective(model)}
    norms = {what: defaultdict[str, list[float]](list) for what in ("weights", "change")}

    def record(model: nn.Module) -> None:
        weights = dict(effective(model))
        layers = defaultdict[str, list[str]](list)
        for name in weights:
            layers[name if name == "head" else ".".join(name.split(".")[:2])].append(name)
        for layer, names in layers.items():
            norms["weights"][layer].append(_norm([weights[name] for name in names]))
            norms["change"][layer].append(_norm([weights[name] - start[name] for name in names]))

    train = fine_tuning.half(work.dataset.train, 1)
    fine_tuning.minimise(work, model, train, steps=steps, lr=_NORM_RATES[name], round=2, on_step=record)
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
