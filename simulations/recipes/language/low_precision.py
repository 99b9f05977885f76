"""Low precision that learns: bf16 weights, 8-bit moments, and a 4-bit base, against float32 on one language model.

The model and data are those of `federated-llm`: a LLaMA of 0.2 M parameters, pretrained on help texts, and four silos
with questions about Python's standard library.  FedAvg over all silos, 5 rounds of 10 local steps of 8 blocks:

    float32       AdamW at a learning rate of 1e-4
    master        the same with model.dtype=bf16, whose steps are taken in float32 masters
    stochastic    bf16, rounded stochastically after each step and by the server
    plain         bf16 as torch steps in it, rounded to nearest
    moments_8bit  float32 with client.optimizer.name=adamw_8bit
    lora, nf4     LoRA of rank 8 at 8e-3, and the same on a base in 4 bits

Each is judged by the share of a reference's gain that it keeps: how far the loss falls below the pretrained model's,
over how far it falls with float32, or with LoRA for `nf4`.

The thresholds were fixed after one look at seed 0; the seeds of the measurement are 1 to 3.
"""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from fedsign.config import from_dict
from fedsign.data.text import libraries as llm
from fedsign.errors import ConfigError
from fedsign.optim.bnb import bitsandbytes
from fedsign.workload import Workload
from simulations.recipes.base import Metrics, NotDecidableHere, Part, Verdict, at_least, at_most, part, recipe
from simulations.recipes.cells import all_rounds, final_values
from simulations.recipes.kept import workspace
from simulations.recipes.language import docstrings, federated_llm, small_llama

_ADAMW, _LORA = {"name": "adamw"}, {"name": "lora", "rank": 8}
_BF16 = {"dtype": "bf16"}
_METHODS: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {  # settings of clients and model
    "float32": ({"lr": 1e-4, "optimizer": _ADAMW}, {}),
    "master": ({"lr": 1e-4, "optimizer": _ADAMW, "low_precision": "master"}, _BF16),
    "stochastic": ({"lr": 1e-4, "optimizer": _ADAMW, "low_precision": "stochastic"}, _BF16),
    "plain": ({"lr": 1e-4, "optimizer": _ADAMW, "low_precision": "plain"}, _BF16),
    "moments_8bit": ({"lr": 1e-4, "optimizer": {"name": "adamw_8bit"}}, {}),
    "lora": ({"lr": 8e-3, "optimizer": _LORA}, {}),
    "nf4": ({"lr": 8e-3, "optimizer": {**_LORA, "quantization": "nf4"}}, {}),
}
_QUICK = ("float32", "master", "plain")
_REFERENCE = {"nf4": "lora"}  # of the others: float32


def parts_of_low_precision(of: str = "", *, plain: float) -> tuple[Part, ...]:
    """What bf16 and moments in 8 bits keep of float32's gain; `plain`: the most of bf16 rounded to nearest."""
    return (
        part(
            f"{of}bf16 with float32 masters keeps 98 % of float32's gain, and rounded stochastically 95 %",
            at_least(0.98, "master_gain"),
            at_least(0.95, "stochastic_gain"),
        ),
        part(f"{of}bf16 rounded to nearest keeps at most {100 * plain:g} % of it", at_most(plain, "plain_gain")),
        part(f"{of}moments in 8 bits keep 95 % of it", at_least(0.95, "moments_8bit_gain")),
    )


@recipe(
    "Weights in bf16, moments in 8 bits, and a base in 4 bits learn as float32 does, and bf16 rounded to nearest not.",
    *parts_of_low_precision(plain=0.8),
    part("a base in 4 bits keeps 95 % of LoRA's gain", at_least(0.95, "nf4_gain")),
    quick=[at_least(0.9, "master_gain"), at_most(0.9, "plain_gain")],
    null={
        **dict.fromkeys(("master_gain", "stochastic_gain", "moments_8bit_gain", "nf4_gain"), 0.6),
        "plain_gain": 1.0,
    },
    expected=Verdict.HOLDS,
)
def low_precision(quick: bool) -> Metrics:
    """Return gains over the reference's, and losses in nats per token (quick: a shorter pretraining, three runs)."""
    try:
        llm.transformers("this recipe")
        if not quick:
            bitsandbytes("this recipe")
    except ConfigError as error:
        raise NotDecidableHere(str(error)) from error
    seeds, rounds, pretraining_steps = ((0,), 1, 40) if quick else ((1, 2, 3), 5, 800)
    names = _QUICK if quick else tuple(_METHODS)
    with workspace() as folder:
        docstrings.write(folder / "lines")
        small_llama.write(folder / "base", steps=pretraining_steps)
        cells = {(name, seed): _cell(folder, name, seed, rounds) for seed in seeds for name in names}
        work = Workload(from_dict(cells["float32", seeds[0]]))
        pretrained = work.evaluate(work.make_model())["loss"]
        runs = all_rounds(cells)
    of_run = final_values(runs, "loss", last=1)
    losses = {name: fmean(of_run[name, seed] for seed in seeds) for name in names}
    gains = {
        f"{name}_gain": (pretrained - loss) / (pretrained - losses[_REFERENCE.get(name, "float32")])
        for name, loss in losses.items()
        if name not in ("float32", "lora")
    }
    lost = fmean(float(runs["plain", seed][0]["lost_updates"]) for seed in seeds)
    sent = {name: float(runs[name, seeds[0]][-1]["bytes_up"]) / len(docstrings.SILOS) / 1e6 for name in names}
    return {
        "pretrained_loss": pretrained,
        **{f"{name}_loss": loss for name, loss in losses.items()},
        **gains,
        "plain_lost_updates": lost,
        **{f"{name}_mb_up": megabytes for name, megabytes in sent.items()},
    }


def _cell(folder: Path, name: str, seed: int, rounds: int) -> dict[str, Any]:
    """Return the experiment of one method."""
    experiment = federated_llm.cell(folder, "lora", "", seed, rounds)
    client, model = _METHODS[name]
    return {**experiment, "client": {**experiment["client"], **client}, "model": {**experiment["model"], **model}}
