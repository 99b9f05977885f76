"""Silos fine-tune SmolLM2-135M-Instruct by AdamW, LISA, LoRA, and QLoRA, compared at equal bytes and equal seconds.

Two federations of four silos, all of them in each of 5 rounds, with 4 local steps of 4 blocks of 128 tokens: silos with
questions and answers about parts of Python's standard library (`simulations.recipes.language.docstrings`), as
conversations in the model's chat template; and silos with a play each, 5 % of them for testing.  Metrics are losses in
nats per scored token on test data of all silos, 3 seeds.  Matrix products are in bf16 (autocast).

Methods: AdamW on all weights; LISA with 2 of 30 blocks, drawn once per round for all silos, besides the embedding; LoRA
of rank 8, also on a base in 4 bits (QLoRA).  Each has the best of three learning rates on a seed of its own (2 rounds).

A recipe of its own takes AdamW on the questions in low precision, for 2 rounds at the rate that the first recipe found:
weights in bf16 with float32 masters, rounded stochastically, or to nearest, and moments in 8 bits.  Each is judged by
the share of float32's gain that it keeps, as in `low-precision`.  As controls, float32 and masters start from
weights in bf16.

Methods differ in bytes and seconds per round.  A comparison at equal cost is at the smallest cost of a complete
training among the methods, and takes of every method the last loss within it; before its first round, that is the
pretrained model's.  Seconds are those of training and aggregation, without evaluation: the median over the rounds of a
method's first seed, which do the same work, and share a GPU with nothing.

The thresholds were fixed before anything was run; rates, steps, and bf16 after looks at the tuning seed, and at seed 0
with 8 steps in float32.
"""

import json
import os
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from fedsign.config import from_dict, merged
from fedsign.data.text import libraries as llm
from fedsign.errors import DataError
from fedsign.memory.measure import free_bytes
from fedsign.numerics import device_of
from fedsign.workload import Workload
from simulations.api import run
from simulations.language.export import export
from simulations.recipes.base import Metrics, Verdict, at_least, at_most, below, part, recipe
from simulations.recipes.cells import best_settings, on_all_cores
from simulations.recipes.kept import workspace
from simulations.recipes.language import docstrings
from simulations.recipes.language.low_precision import parts_of_low_precision
from simulations.recipes.language.pretrained import smollm2
from simulations.recipes.where import Budget, Where

_ROUNDS, _SEEDS, _TUNING_SEED, _TUNING_ROUNDS = 5, (0, 1, 2), 100, 2
_METHODS: Mapping[str, tuple[Mapping[str, Any], Sequence[float]]] = {  # settings, and rates to try
    "full": ({"name": "adamw"}, (1e-4, 2e-4, 4e-4)),
    "lisa": ({"name": "lisa", "num_sampled_layers": 2, "draws": "per_round"}, (4e-4, 8e-4, 1.6e-3)),
    "lora": ({"name": "lora", "rank": 8}, (2e-3, 4e-3, 8e-3)),
    "qlora": ({"name": "lora", "rank": 8, "quantization": "nf4"}, (2e-3, 4e-3, 8e-3)),
}
_LOW: Mapping[str, Mapping[str, Any]] = {  # changes of full fine-tuning
    **{
        name: {"client": {"low_precision": name}, "model": {"dtype": "bf16"}}
        for name in ("master", "stochastic", "plain")
    },
    "moments_8bit": {"client": {"optimizer": {"name": "adamw_8bit"}}},
}
_LOW_ROUNDS, _LOW_RATE = 2, 1e-4
_STEPS, _NUM_SILOS, _LETTERS_OF_A_PLAY, _TEST_LINES = 4, 4, 40_000, 64
_SMALL = [name for name in _METHODS if name != "full"]
_COST = "12 trainings of 5 rounds and 12 of 2, about an hour on two cores, 6 GB a process; what is done is kept"
_PROCESS_BYTES = 6 * 10**9
_EXPORT = (at_most(1e-3, "export_logits_error", "peft_logits_error"), at_least(1.0, "export_same_tokens"))

Curve = list[dict[str, float]]
"""Of each round: loss, and cumulative bytes and seconds; the pretrained model comes first."""


def _parts(learned: float, data: str) -> list[Any]:
    return [
        part(
            f"SmolLM2 on {data}: each method's loss is at most {learned:g} times that of the pretrained model",
            at_most(learned, *(f"{name}_over_pretrained" for name in _METHODS)),
        ),
        part(
            f"SmolLM2 on {data}: at equal bytes, LISA, LoRA, and QLoRA have a lower loss than full fine-tuning",
            below(1.0, *(f"{name}_over_full_at_bytes" for name in _SMALL)),
        ),
        part(
            f"SmolLM2 on {data}: at equal seconds, LISA's and LoRA's losses are at most 1.03 times full fine-tuning's",
            at_most(1.03, *(f"{name}_over_full_at_seconds" for name in ("lisa", "lora"))),
        ),
        part(
            f"SmolLM2 on {data}: at equal rounds, a base in 4 bits costs LoRA at most 2 % of loss",
            at_most(1.02, "qlora_over_lora"),
        ),
        part(
            f"SmolLM2 on {data}: transformers and peft load the result, with the same logits and next words", *_EXPORT
        ),
    ]


_NULL = {f"{name}_over_pretrained": 1.0 for name in _METHODS}
_NULL |= {f"{name}_over_full_at_bytes": 1.1 for name in _SMALL}
_NULL |= {"lisa_over_full_at_seconds": 1.1, "lora_over_full_at_seconds": 1.1, "qlora_over_lora": 1.1}
_NULL |= {"export_logits_error": 1.0, "peft_logits_error": 1.0, "export_same_tokens": 0.0}


@recipe(
    (
        "Four silos that fine-tune SmolLM2-135M-Instruct on questions about Python need fewer bytes with LISA, LoRA, "
        "and QLoRA than with full fine-tuning, and LISA and LoRA no more time."
    ),
    *_parts(0.9, "questions"),
    quick=[*_EXPORT],
    null=_NULL,
    expected=Verdict.IN_PART,
)
def smollm2_instructions(quick: bool) -> Metrics:
    """Return losses and costs (quick: two steps of LoRA at two silos)."""
    with workspace() as folder:
        return _measured(_conversations(folder, quick), quick, folder)


@recipe(
    "SmolLM2-135M-Instruct learns with weights in bf16, and with moments in 8 bits, as with float32; rounded to "
    "nearest, bf16 loses updates.",
    *parts_of_low_precision("SmolLM2 on questions: ", plain=0.9),
    quick=[at_least(0.5, "master_gain")],
    null={f"{name}_gain": 1.0 if name == "plain" else 0.4 for name in _LOW},
    expected=Verdict.HOLDS,
)
def smollm2_low_precision(quick: bool) -> Metrics:
    """Return the share of float32's gain that each way keeps (quick: masters, a step of one seed at two silos)."""
    with workspace() as folder:
        make = _maker(_conversations(folder, quick), quick, steps=1 if quick else _STEPS)
        ways = {"master": _LOW["master"]} if quick else dict(_LOW)
        if not quick:
            of_bf16 = {"model": {"path": _in_bf16(folder)}}
            ways |= {"full_of_bf16": of_bf16, "master_of_bf16": merged(_LOW["master"], of_bf16)}
        seeds, rounds = (_SEEDS[:1], 1) if quick else (_SEEDS, _LOW_ROUNDS)
        cells = {
            (name, seed): partial(_curve, merged(make("full", _LOW_RATE, seed, rounds=rounds), ways.get(name, {})))
            for name in ("full", *ways)
            for seed in seeds
        }
        curves = on_all_cores(cells, processes=_num_processes())
    losses = {f"{name}_loss": fmean(curves[name, seed][-1]["loss"] for seed in seeds) for name in ("full", *ways)}
    return {"pretrained_loss": curves["full", 0][0]["loss"], **losses, **kept_gains(curves, ways, seeds)}


@recipe(
    (
        "Four silos that fine-tune SmolLM2-135M-Instruct on a play each need fewer bytes with LISA, LoRA, and "
        "QLoRA than with full fine-tuning, and LISA and LoRA no more time."
    ),
    *_parts(0.98, "plays"),
    quick=[*_EXPORT],
    null=_NULL,
    data={"text_folder": Verdict.IN_PART},
    budget=lambda quick, where: Budget(known="two steps, minutes" if quick else _COST),
    takes_model=False,
    takes_other_data=False,
)
def smollm2_plays(quick: bool, where: Where) -> Metrics:
    """The same of the longest texts in `--data-root`."""
    with workspace() as folder:
        _write_plays(Path(where.data.get("root", "data")), folder / "plays")
        data = {"name": "text_folder", "root": str(folder / "plays"), "test_fraction": 0.05}
        return _measured(data, quick, folder)


def _maker(data: Mapping[str, Any], quick: bool, *, steps: int) -> Callable[..., dict[str, Any]]:
    base = str(smollm2("peft", *([] if quick else ["bitsandbytes"])))
    # bf16 products take minutes on a CPU without bf16 instructions
    small: dict[str, Any] = {"precision": "float32", "batch_size": 1, "cohort_size": 2} if quick else {}
    data = {**data, "tokenizer": base, "block_length": 64 if quick else 128}
    return partial(_experiment, data=data, base=base, steps=steps, **small)


def _measured(data: Mapping[str, Any], quick: bool, folder: Path) -> dict[str, float]:
    make = _maker(data, quick, steps=2 if quick else _STEPS)
    if quick:
        return _of_export(make("lora", 1e-3, 0, rounds=1), folder)
    sweep = {
        (name, rate): partial(_curve, make(name, rate, _TUNING_SEED, rounds=_TUNING_ROUNDS))
        for name, (_, rates) in _METHODS.items()
        for rate in rates
    }
    at_once = _num_processes()
    tuned = on_all_cores(sweep, processes=at_once)
    best = best_settings({key: curve[-1]["loss"] for key, curve in tuned.items()})
    cells = {
        (name, seed): partial(_curve, make(name, best[name], seed, rounds=_ROUNDS))
        for name in _METHODS
        for seed in _SEEDS
    }
    first = {key: cell for key, cell in cells.items() if key[1] == _SEEDS[0]}
    found = on_all_cores(first, processes=1 if torch.cuda.is_available() else at_once)
    found |= on_all_cores({key: job for key, job in cells.items() if key not in first}, processes=at_once)
    metrics = _metrics(timed(found))
    metrics |= {f"{name}_rate": rate for name, rate in best.items()}
    return metrics | _of_export(make("lora", best["lora"], 0, rounds=1), folder)


def _num_processes() -> int:
    """As many as there are cores, and as fit into memory."""
    device = device_of("auto")
    return max(1, min(os.cpu_count() or 1, free_bytes(device) // _PROCESS_BYTES))


def _metrics(curves: Mapping[tuple[str, int], Curve]) -> dict[str, float]:
    pretrained = curves["full", 0][0]["loss"]
    metrics = {"pretrained_loss": pretrained}
    for name in _METHODS:
        of_seeds = [curves[name, seed] for seed in _SEEDS]
        metrics[f"{name}_loss"] = fmean(curve[-1]["loss"] for curve in of_seeds)
        metrics[f"{name}_over_pretrained"] = metrics[f"{name}_loss"] / pretrained
        metrics[f"{name}_mb"] = fmean(curve[-1]["bytes"] for curve in of_seeds) / 1e6
        metrics[f"{name}_seconds"] = fmean(curve[-1]["seconds"] for curve in of_seeds)
    metrics["qlora_over_lora"] = metrics["qlora_loss"] / metrics["lora_loss"]
    for name in _SMALL:
        for cost in ("bytes", "seconds"):
            ratios = [ratio_at_equal(cost, curves[name, seed], curves["full", seed]) for seed in _SEEDS]
            metrics[f"{name}_over_full_at_{cost}"] = fmean(ratios)
    return metrics


def kept_gains(
    curves: Mapping[tuple[str, int], Curve], names: Collection[str], seeds: Collection[int]
) -> dict[str, float]:
    """How far the loss falls in low precision, over how far it falls in float32."""

    def gain(name: str) -> float:
        return fmean(curves[name, seed][0]["loss"] - curves[name, seed][-1]["loss"] for seed in seeds)

    return {f"{name}_gain": gain(name) / gain("full") for name in names}


def timed(curves: Mapping[tuple[str, int], Curve]) -> dict[tuple[str, int], Curve]:
    """Give every round the median seconds of its method's first seed: what else the machine does must not decide."""

    def of_a_round(name: str) -> float:
        times = [point["seconds"] for point in curves[name, _SEEDS[0]]]
        return median(after - before for before, after in pairwise(times))

    return {
        (name, seed): [{**point, "seconds": at * of_a_round(name)} for at, point in enumerate(curve)]
        for (name, seed), curve in curves.items()
    }


def ratio_at_equal(cost: str, one: Curve, other: Curve) -> float:
    """Return one's loss over the other's at the smaller of both final costs."""
    budget = min(one[-1][cost], other[-1][cost])
    at_one, at_other = ([point["loss"] for point in curve if point[cost] <= budget][-1] for curve in (one, other))
    return at_one / at_other


def _experiment(
    method: str,
    lr: float,
    seed: int,
    *,
    data: Mapping[str, Any],
    base: str,
    rounds: int = _ROUNDS,
    steps: int,
    precision: str = "bf16",
    batch_size: int = 4,
    cohort_size: int = _NUM_SILOS,
) -> dict[str, Any]:
    optimizer = dict(_METHODS[method][0])
    if method == "lisa":
        optimizer["period"] = steps  # new blocks in each round
    return {
        "seed": seed,
        "rounds": rounds,
        "task": "language",
        "metrics": ["perplexity"],
        "callbacks": [],
        "engine": {"device": "auto", "precision": precision},
        "data": dict(data),
        "partition": {"name": "natural", "num_clients": _NUM_SILOS},
        "server": {"cohort_size": cohort_size},
        "strategy": {"name": "fedavg", "weighting": "examples"},
        "model": {"name": "transformers", "path": base},
        "client": {
            "local_steps": steps,
            "batch_size": batch_size,
            "lr": lr,
            "clip_norm": 1.0,
            "optimizer": optimizer,
        },
        "results": {"checkpoint_every": rounds},
    }


def _curve(experiment: Mapping[str, Any]) -> Curve:
    work = Workload(from_dict(dict(experiment)))
    points = [{"loss": work.evaluate(work.make_model())["loss"], "bytes": 0.0, "seconds": 0.0}]
    del work  # the run builds its own
    with tempfile.TemporaryDirectory() as root:
        done = run({**experiment, "results": {**experiment["results"], "root": root}})
        for record, timing in zip(done.rounds, done.folder.timings(), strict=True):
            sent = record["bytes_up"] + record["bytes_down"]
            took = sum(value for key, value in timing.items() if key.endswith("_s") and key != "evaluate_s")
            last = points[-1]
            points.append({"loss": record["loss"], "bytes": last["bytes"] + sent, "seconds": last["seconds"] + took})
    return points


def _of_export(experiment: Mapping[str, Any], folder: Path) -> dict[str, float]:
    """Return the distances of the exported model's logits, merged and of `peft`, from the run's."""
    done = run({**experiment, "results": {"root": str(folder / "runs")}})
    export(done.path, folder / "merged")
    export(done.path, folder / "adapters", adapters=True)
    library = llm.transformers("this recipe")
    import peft  # installed with the same extra

    tokenizer = library.AutoTokenizer.from_pretrained(folder / "merged")
    asked = [{"role": "user", "content": "What does str.split do?"}]
    tokens = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids, ours = tokens["input_ids"], done.model().cpu().eval()
    merged = library.AutoModelForCausalLM.from_pretrained(folder / "merged").eval()
    base = library.AutoModelForCausalLM.from_pretrained(smollm2())
    beside = peft.PeftModel.from_pretrained(base, folder / "adapters").eval()
    with torch.no_grad():
        logits = ours(ids)
        errors = [(theirs(ids).logits - logits).abs().max().item() for theirs in (merged, beside)]
        words = [theirs.generate(ids, max_new_tokens=16, do_sample=False) for theirs in (merged, beside)]
    same = float(torch.equal(*words))
    return {"export_logits_error": errors[0], "peft_logits_error": errors[1], "export_same_tokens": same}


def _conversations(folder: Path, quick: bool) -> dict[str, Any]:
    """Write the conversations; returns the settings of the data."""
    most = {"train": 100, "test": 4} if quick else {"test": _TEST_LINES}
    docstrings.write(folder / "lines")
    for name in ("train", "test"):
        lines = [json.loads(line) for line in (folder / "lines" / f"{name}.jsonl").read_text("utf-8").splitlines()]
        lines = lines[:: max(1, len(lines) // most.get(name, len(lines)))]
        made = [
            {
                "messages": [
                    {"role": "user", "content": line["instruction"]},
                    {"role": "assistant", "content": line["output"]},
                ],
                "silo": line["silo"],
            }
            for line in lines
        ]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in made)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    paths = {"path": str(folder / "train.jsonl"), "test_path": str(folder / "test.jsonl")}
    return {"name": "jsonl", **paths, "owner": "silo"}


def _in_bf16(folder: Path) -> str:
    """The pretrained model in a folder whose weights are bf16, as most are published."""
    rounded = llm.transformers("this recipe").AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.bfloat16)
    rounded.save_pretrained(folder / "bf16")
    return str(folder / "bf16")


def _write_plays(root: Path, folder: Path) -> None:
    """Write the beginnings of the longest texts.

    Raises:
        DataError: there are too few.
    """
    texts = sorted(root.glob("*.txt"), key=lambda path: (-path.stat().st_size, path.name))[:_NUM_SILOS]
    if len(texts) < _NUM_SILOS:
        raise DataError(
            f"{root} has {len(texts)} texts, but this recipe needs {_NUM_SILOS} plays, one .txt file each: name their "
            "folder with --set data.root=PATH."
        )
    folder.mkdir()
    for path in texts:
        text = path.read_text(encoding="utf-8", errors="replace")[:_LETTERS_OF_A_PLAY]
        (folder / path.name).write_text(text, encoding="utf-8")
