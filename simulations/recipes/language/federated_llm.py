"""Four silos fine-tune a pretrained language model, each on questions about its part of Python's standard library.

The model is `simulations.recipes.language.small_llama`'s, trained on help texts and loaded by `transformers`; questions
and answers come from `simulations.recipes.language.docstrings`.  FedAvg over all four silos, 10 rounds of 10 local
steps of 8 blocks, with LISA (one of three blocks, the same for all silos in a round) and with LoRA (rank 8); and each
silo alone with LISA, for the same number of steps.  All are judged on the test lines of all silos: mean loss per answer
token, in nats.  One pretrained model, 3 seeds of fine-tuning.

The federated LISA model is then exported by `fedsign export` and loaded by `transformers`, whose logits and generated
words are compared.

The thresholds were fixed before anything was run: the federated loss is at most 0.85 of the pretrained model's for both
methods, and with LISA at most 0.98 of the best single silo's.  Learning rates were tuned on another seed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from fedsign.config import from_dict, merged
from fedsign.data.text import libraries as llm
from fedsign.errors import ConfigError
from fedsign.storage.results import Record
from fedsign.workload import Workload
from simulations.api import Run, run
from simulations.language.export import export
from simulations.recipes.base import Metrics, NotDecidableHere, Verdict, at_least, at_most, part, recipe
from simulations.recipes.cells import all_rounds, final_values
from simulations.recipes.kept import workspace
from simulations.recipes.language import docstrings, small_llama

_STEPS, _NEW_TOKENS = 10, 24
_METHODS: dict[str, tuple[float, Mapping[str, Any]]] = {
    "lisa": (2e-3, {"name": "lisa", "num_sampled_layers": 1, "period": _STEPS, "draws": "per_round"}),
    "lora": (8e-3, {"name": "lora", "rank": 8}),
}
_RunKey = tuple[str, str, int]  # method, silo (empty: all), seed
_SHOWN: _RunKey = ("lisa", "", 0)
_TUNED = ("lisa_over_pretrained", "lora_over_pretrained")
_EXPORT = (at_most(1e-3, "export_logits_error"), at_least(1.0, "export_same_tokens"))


@recipe(
    (
        "Four silos fine-tune a language model better together than the best of them alone, and transformers loads "
        "the result."
    ),
    part(
        "four silos: with LISA and with LoRA, the loss is at most 0.85 times that of the pretrained model",
        at_most(0.85, *_TUNED),
    ),
    part(
        "with LISA, the loss is at most 0.98 times that of the best silo alone",
        at_most(0.98, "lisa_over_best_alone"),
    ),
    part("transformers loads the federation's model: the same logits, the same next words", *_EXPORT),
    quick=[at_most(0.95, "lisa_over_pretrained"), *_EXPORT],
    null={
        **dict.fromkeys((*_TUNED, "lisa_over_best_alone"), 1.0),
        "export_logits_error": 1.0,
        "export_same_tokens": 0.0,
    },
    expected=Verdict.HOLDS,
)
def federated_llm(quick: bool) -> Metrics:
    """Return losses in nats per token (quick: a shorter pretraining, 2 rounds, one seed)."""
    try:
        llm.transformers("this recipe")
    except ConfigError as error:
        raise NotDecidableHere(str(error)) from error
    seeds, rounds, pretraining_steps = ((0,), 2, 80) if quick else ((0, 1, 2), 10, 800)
    kinds = [*((name, "") for name in _METHODS), *(("lisa", silo) for silo in docstrings.SILOS)]
    with workspace() as folder:
        docstrings.write(folder / "lines")
        small_llama.write(folder / "base", steps=pretraining_steps)
        cells = {(*kind, seed): cell(folder, *kind, seed, rounds) for seed in seeds for kind in kinds}
        # apart: `all_rounds` deletes its run folders, and this one is exported
        shown = run({**cells.pop(_SHOWN), "callbacks": [], "results": {"root": str(folder / "runs")}})
        work = Workload(from_dict(cell(folder, *_SHOWN, 1)))
        pretrained = work.evaluate(work.make_model())["loss"]
        metrics = _metrics({_SHOWN: shown.rounds, **all_rounds(cells)}, seeds, pretrained)
        return metrics | _of_export(shown, folder / "tuned")


def _metrics(runs: Mapping[_RunKey, list[Record]], seeds: Sequence[int], pretrained: float) -> dict[str, float]:
    losses = final_values(runs, "loss", last=1)
    together = {name: fmean(losses[name, "", seed] for seed in seeds) for name in _METHODS}
    alone = fmean(min(losses["lisa", silo, seed] for silo in docstrings.SILOS) for seed in seeds)
    metrics = {"pretrained_loss": pretrained, "best_alone_loss": alone}
    metrics |= {f"{name}_loss": loss for name, loss in together.items()}
    metrics |= {f"{name}_over_pretrained": loss / pretrained for name, loss in together.items()}
    metrics["lisa_over_best_alone"] = together["lisa"] / alone
    for name in _METHODS:
        metrics[f"{name}_mb_up"] = float(runs[name, "", 0][-1]["bytes_up"]) / len(docstrings.SILOS) / 1e6
    return metrics


def cell(folder: Path, method: str, silo: str, seed: int, rounds: int) -> dict[str, Any]:
    """Return the experiment of one silo, or of all if none is given."""
    lr, optimizer = _METHODS[method]
    num = 1 if silo else len(docstrings.SILOS)
    changes = {
        "seed": seed,
        "rounds": rounds,
        "data": {
            "name": "jsonl",
            "path": str(folder / "lines" / f"{silo or 'train'}.jsonl"),
            "test_path": str(folder / "lines" / "test.jsonl"),
            "tokenizer": str(folder / "base"),
            "block_length": small_llama.BLOCK_LENGTH,
            "prompt": "short",
            "owner": "silo",
        },
        "partition": {"name": "iid" if silo else "natural", "num_clients": num},
        "server": {"cohort_size": num},
        "strategy": {"weighting": "examples"},
        "model": {"name": "transformers", "path": str(folder / "base")},
    }
    return merged(small_llama.experiment(steps=_STEPS, lr=lr, optimizer=optimizer), changes)


def _of_export(done: Run, folder: Path) -> dict[str, float]:
    """Return the distance between the exported model's logits and the run's, and the fraction of equal next words."""
    export(done.path, folder)
    library = llm.transformers("this recipe")
    theirs = library.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    tokenizer = library.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ours = done.model().cpu()
    tokens = torch.tensor([tokenizer.encode("### Instruction:\nWhat does str.split do?\n\n### Response:\n")])
    with torch.no_grad():
        error = (theirs(tokens).logits - ours(tokens)).abs().max().item()
        generated = theirs.generate(tokens, max_new_tokens=_NEW_TOKENS, min_new_tokens=_NEW_TOKENS, do_sample=False)
        for _ in range(_NEW_TOKENS):
            # what `min_new_tokens` does: no end before the last word
            logits = ours(tokens)[:, -1].index_fill(1, torch.tensor([tokenizer.eos_token_id]), -torch.inf)
            tokens = torch.cat([tokens, logits.argmax(dim=1, keepdim=True)], dim=1)
    return {"export_logits_error": error, "export_same_tokens": (generated == tokens).float().mean().item()}
