"""Silos train a wide sparse model with a rate tuned on a narrow dense one: perplexity against bytes, in three schemes.

Paper: Dey et al. 2024 (arXiv 2405.15743), with centralized training.  Here three silos share the documents of `pytext`;
each takes ten local steps in each of eight rounds, from fresh moments, and the models are averaged (FedAvg).  The model
is `simulations.recipes.smupar.smupar_gpt`'s at width 256 and densities 1, 1/4, 1/16 and 1/64, with `packed_adamw`.
Masks have an exact number of weights, whereas the paper's code draws each weight independently, so bytes are not
random.  Attention logits are scaled as in the base's heads, so that at the base's width, dense, the three
parameterizations are the same model: one rate, tuned there on held-out blocks, serves all cells.

The hypothesis was fixed before anything was run: at densities 1/16 and 1/64, SmuPar's loss is at least 5 % below that
of the standard parameterization and of muP, after equal rounds and thus equal bytes.  Bytes are exact: (dense part +
density x hidden part) x width.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from statistics import fmean
from typing import Any

from fedsign.config import from_dict, merged
from fedsign.storage.results import Record
from fedsign.workload import Workload
from simulations.recipes.base import Metrics, Verdict, at_most, part, recipe
from simulations.recipes.cells import all_rounds, best_settings, final_values
from simulations.recipes.smupar.smupar_gpt import BASE_WIDTH, HEAD_WIDTH, experiment, hidden
from simulations.sparsity.coordinates import variant

_SILOS, _STEPS, _ROUNDS, _WIDTH, _SEEDS = 3, 10, 8, 256, (1, 2, 3)
_FLOAT_BYTES = 4
_OTHERS = {"sp": "SP", "mup": "muP"}
_AT_THE_LOWEST = [f"smupar_over_{name}_64" for name in _OTHERS]
_EXACT = (at_most(0.0, "bytes_error"), at_most(1.01, "hidden_over_density"))


@recipe(
    (
        "Sparse clients send density times the hidden part and no more of it; at densities 1/16 and 1/64, with the "
        "dense proxy's rate, SmuPar's loss is at least 5 % below the others'."
    ),
    part("clients send exactly the dense weights and the nonzero hidden weights", *_EXACT),
    *(
        part(
            f"at density 1/{share} SmuPar's loss is 5 % or more below that of {title}",
            at_most(0.95, f"smupar_over_{name}_{share}"),
        )
        for share, (name, title) in product((16, 64), _OTHERS.items())
    ),
    quick=[*_EXACT, at_most(0.98, *_AT_THE_LOWEST)],
    null={"bytes_error": 1.0, "hidden_over_density": 64.0}  # whole tensors are sent
    | {f"smupar_over_{name}_{share}": 1.0 for share, name in product((16, 64), _OTHERS)},
    expected=Verdict.IN_PART,
)
def federated_smupar(quick: bool) -> Metrics:
    """Return losses, perplexities and megabytes, means over 3 seeds.

    Quick: density 1/64 for two rounds, one seed, with the rate found by the full check.
    """
    if quick:
        return _metrics((64,), _SEEDS[:1], lr=2**-8, rounds=2)
    proxies = {}
    for rate in (2.0**power for power in range(-10, -3)):
        proxy = _cell("smupar", 1.0, 0, lr=rate, width=BASE_WIDTH, rounds=_ROUNDS)
        proxies["proxy", rate] = merged(proxy, {"data": {"validation_fraction": 0.1}})
    best = best_settings(final_values(all_rounds(proxies), "validation_loss", last=1))["proxy"]
    return {"rate": best, **_metrics((1, 4, 16, 64), _SEEDS, lr=best, rounds=_ROUNDS)}


def _metrics(shares: Sequence[int], seeds: Sequence[int], *, lr: float, rounds: int) -> Metrics:
    """Return metrics by inverse density (`shares`); ratios are paired by seed."""
    # the dense model is the same under muP and SmuPar, and is run once, as SmuPar's
    points = [
        (scheme, share) for scheme in ("sp", "mup", "smupar") for share in shares if (scheme, share) != ("mup", 1)
    ]
    cells = {  # dense, muP and SmuPar are the same
        (scheme, share, seed): _cell(scheme, 1 / share, seed, lr=lr, width=_WIDTH, rounds=rounds)
        for (scheme, share), seed in product(points, seeds)
    }
    runs = all_rounds(cells)
    losses, perplexities = (final_values(runs, metric, last=1) for metric in ("loss", "perplexity"))
    metrics: dict[str, float] = {}
    for scheme, share in points:
        metrics[f"{scheme}_{share}_loss"] = fmean(losses[scheme, share, seed] for seed in seeds)
        metrics[f"{scheme}_{share}_perplexity"] = fmean(perplexities[scheme, share, seed] for seed in seeds)
    for share in shares:
        records = runs["smupar", share, seeds[0]]
        metrics[f"megabytes_{share}"] = fmean(float(record["bytes_up"]) / _SILOS for record in records) / 1e6
    for share, other in product(sorted({16, 64} & {*shares}), _OTHERS):
        ratios = [losses["smupar", share, seed] / losses[other, share, seed] for seed in seeds]
        metrics[f"smupar_over_{other}_{share}"] = fmean(ratios)
        metrics |= {f"smupar_over_{other}_{share}_low": min(ratios), f"smupar_over_{other}_{share}_high": max(ratios)}
    return metrics | _account(cells, runs)


def _account(
    cells: Mapping[tuple[str, int, int], Mapping[str, Any]], runs: Mapping[tuple[str, int, int], Sequence[Record]]
) -> dict[str, float]:
    """Return the largest deviation over all rounds: of the bytes from the formula, and of the hidden part from its
    own.
    """
    errors, shares = [], []
    for key, cell in cells.items():
        model = Workload(from_dict(dict(cell))).make_model()
        sizes = {name: _SILOS * _FLOAT_BYTES * each.numel() for name, each in model.named_parameters()}
        inside = sum(sizes[name] for name in hidden(model))
        dense, thinned = sum(sizes.values()) - inside, inside / key[1]
        for record, way in product(runs[key], ("bytes_up", "bytes_down")):
            # exact integers in float64: any byte too many shows
            errors.append(abs(float(record[way]) - (dense + thinned)))
            shares.append((float(record[way]) - dense) / thinned)
    return {"bytes_error": max(errors), "hidden_over_density": max(shares)}


def _cell(scheme: str, density: float, seed: int, *, lr: float, width: int, rounds: int) -> dict[str, Any]:
    changes = {
        "rounds": rounds,
        "data": {"block_length": 64, "test_fraction": 0.03},
        "partition": {"name": "natural", "num_clients": _SILOS},
        "parameterization": {"base_head_width": HEAD_WIDTH},
        "sparsity": {"draw": "exact"},
        "client": {"local_steps": _STEPS, "batch_size": 4, "optimizer": {"name": "packed_adamw"}},
        "server": {"cohort_size": _SILOS},
        "engine": {"sparse_products": "dense"},  # the same arithmetic at every density
    }
    config = variant(experiment(width=width, lr=lr, changes=changes), scheme, density, seed=seed)
    return config.model_dump(mode="json")
