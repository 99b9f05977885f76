"""Silos train a wide sparse model with a rate tuned on a narrow dense one: perplexity against bytes, under three parameterisations.

Paper: Dey et al. 2024 (arXiv 2405.15743), whose models are trained in one place.  Here three silos share the documents of `pytext`; each
takes ten local steps in each of eight rounds, from fresh moments, and the models are averaged (FedAvg).  The model is that of
`simulations.recipes.smupar.smupar_gpt` at width 256, at densities 1, 1/4, 1/16 and 1/64, with `packed_adamw`.  Masks are drawn with an exact
number of weights, where the paper's code draws each on its own, so that bytes are no chance.  The logits of attention are scaled as
those of the base's heads, so that at the base's width, dense, the three parameterisations are one model: one rate, tuned there on
held-out blocks, is the rate of all cells.

The hypothesis was fixed before anything was run: at densities 1/16 and 1/64 SmuPar's loss is at least 5 % below that of the standard
parameterisation and of muP, after equal rounds and so for equal bytes.  Bytes are exact: (dense part + density x hidden part) x width.
"""

from collections.abc import Mapping, Sequence
from math import prod
from statistics import mean
from typing import Any

from fedsign.config import from_dict, merged
from fedsign.parameterisation.plan import plan_of
from fedsign.parameterisation.roles import Role
from fedsign.parameterisation.section import ParameterisationPart
from fedsign.storage.results import Line
from fedsign.workload import Workload
from simulations.recipes.base import Figures, Recipe, Threshold, Verdict
from simulations.recipes.cells import all_rounds
from simulations.recipes.smupar.smupar_gpt import BASE_WIDTH, HEAD_WIDTH, INIT_STD

_SILOS, _STEPS, _ROUNDS, _WIDTH, _SEEDS = 3, 10, 8, 256, (1,)
_SCHEMES = ("sp", "mup", "smupar")
_SHARES = (1, 4, 16, 64)  # one weight in so many
_EXPONENTS = range(-10, -3)  # of the rates that are tried on the proxy, powers of 2
_FOUND = 2**-8  # by the full form, for the quick one
_FLOAT_BYTES = 4


def measure(quick: bool) -> Figures:
    """Losses, perplexities and megabytes (quick: density 1/64 for two rounds, with the rate that was found)."""
    if quick:
        return _figures((64,), seeds=_SEEDS, lr=_FOUND, width=_WIDTH, rounds=2)
    losses = all_rounds([_proxy(exponent) for exponent in _EXPONENTS])
    found = {
        2.0**exponent: float(lines[-1]["validation_loss"]) for exponent, lines in zip(_EXPONENTS, losses, strict=True)
    }
    rate = min(found, key=lambda lr: found[lr])
    return {"rate": rate} | dict(_figures(_SHARES, seeds=_SEEDS, lr=rate, width=_WIDTH, rounds=_ROUNDS))


def _figures(shares: Sequence[int], *, seeds: Sequence[int], lr: float, width: int, rounds: int) -> Figures:
    cells = {
        (scheme, share, seed): _cell(scheme, 1 / share, seed, lr=lr, width=width, rounds=rounds)
        for scheme in _SCHEMES
        for share in shares
        for seed in seeds
        if (scheme, share) != ("mup", 1)  # which is smupar's
    }
    runs = dict(zip(cells, all_rounds(list(cells.values())), strict=True))
    figures: dict[str, float] = {}
    for scheme, share in dict.fromkeys((scheme, share) for scheme, share, _ in cells):
        last = [runs[scheme, share, seed][-1] for seed in seeds]
        figures[f"{scheme}_{share}_loss"] = mean(float(line["loss"]) for line in last)
        figures[f"{scheme}_{share}_perplexity"] = mean(float(line["perplexity"]) for line in last)
    for share in shares:
        up = [float(line["bytes_up"]) / _SILOS for seed in seeds for line in runs["smupar", share, seed]]
        figures[f"megabytes_{share}"] = mean(up) / 1e6
    for share in sorted({16, 64} & {*shares}):
        for other in ("sp", "mup"):
            pairs = [(runs["smupar", share, seed][-1]["loss"], runs[other, share, seed][-1]["loss"]) for seed in seeds]
            figures[f"smupar_over_{other}_{share}"] = mean(float(mine) / float(its) for mine, its in pairs)
    return figures | dict(_account(cells, runs))


def _account(
    cells: Mapping[tuple[str, int, int], Mapping[str, Any]], runs: Mapping[tuple[str, int, int], Sequence[Line]]
) -> Figures:
    """Of any round of any cell: how far its bytes are from (dense part + density x hidden part) x width; the hidden part by its formula."""
    errors, shares = [], []
    for key, cell in cells.items():
        dense, hidden = (_SILOS * _FLOAT_BYTES * size for size in _sizes(cell))
        thinned = hidden / key[1]
        for line in runs[key]:
            for way in ("bytes_up", "bytes_down"):
                errors.append(abs(float(line[way]) - (dense + thinned)))
                shares.append((float(line[way]) - dense) / thinned)
    return {"bytes_error": max(errors), "hidden_over_density": max(shares)}


def _sizes(cell: Mapping[str, Any]) -> tuple[int, int]:
    """Weights of the part that is never sparse, and of the hidden part, whether they are there or not."""
    config = from_dict(dict(cell))
    model = Workload(config).make_model()
    tensors = plan_of(model, ParameterisationPart.of(config).build()).tensors.values()
    hidden = sum(prod(tensor.shape) for tensor in tensors if tensor.role is Role.HIDDEN)
    return sum(parameter.numel() for parameter in model.parameters()) - hidden, hidden


def _proxy(exponent: int) -> dict[str, Any]:
    """The base: dense and narrow, the same under all three."""
    held_out = {"data": {"validation_fraction": 0.1}}
    return merged(_cell("smupar", 1.0, 0, lr=2.0**exponent, width=BASE_WIDTH, rounds=_ROUNDS), held_out)


def _cell(scheme: str, density: float, seed: int, *, lr: float, width: int, rounds: int) -> dict[str, Any]:
    of_base = {} if scheme == "sp" else {"base_width": BASE_WIDTH, "base_head_width": HEAD_WIDTH}
    return {
        "seed": seed,
        "rounds": rounds,
        "task": "language",
        "metrics": ["perplexity"],
        "data": {"name": "pytext", "block_length": 64, "test_fraction": 0.03},
        "partition": {"name": "natural", "num_clients": _SILOS},
        "model": {"name": "gpt", "depth": 2, "width": width, "num_heads": width // HEAD_WIDTH, "bias": False},
        "parameterisation": {"name": scheme, "init_std": INIT_STD, "density": density, **of_base},
        "sparsity": {"draw": "exact"},
        "client": {
            "local_steps": _STEPS,
            "batch_size": 4,
            "lr": lr,
            "weight_decay": 0.1,
            "clip_norm": 1.0,
            "optimizer": {"name": "packed_adamw", "beta1": 0.9, "beta2": 0.95},
        },
        "strategy": {"name": "fedavg"},
        "server": {"cohort_size": _SILOS},
        "engine": {"sparse_products": "dense"},  # the same arithmetic at every density
    }


_EXACT = (
    Threshold(figure="bytes_error", bound="at most", value=0.0),
    Threshold(figure="hidden_over_density", bound="at most", value=1.01),
)
RECIPE = Recipe(
    name="federated-smupar",
    claim="Sparse clients send density times the hidden part and no more of it; at densities 1/16 and 1/64, with the dense proxy's rate, SmuPar's loss is at least 5 % below the others'.",
    measure=measure,
    thresholds=(
        *_EXACT,
        *(
            Threshold(figure=f"smupar_over_{scheme}_{share}", bound="at most", value=0.95)
            for share in (16, 64)
            for scheme in ("sp", "mup")
        ),
    ),
    expected=Verdict.DOES_NOT_HOLD,
    quick_thresholds=(
        *_EXACT,
        Threshold(figure="smupar_over_sp_64", bound="at most", value=1.0),
        Threshold(figure="smupar_over_mup_64", bound="at most", value=1.0),
    ),
)
