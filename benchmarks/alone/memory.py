"""The peak memory of whole runs beside what `fedsign estimate memory` says: architectures x methods x sizes.

Each cell is two rounds of one client in float32, batches of one sample of 64 tokens (or patches), three local steps,
in a process of its own: `fedsign estimate memory --config ... --measure`.  The measured peak is the median of several
runs.  Those with weights or moments in fewer bits, and the largest models, are of the Llama of `transformers`, and so
are those of several processes: two ranks with two samples, or two workers with two clients, in four rounds.  Cells that
are in the result already are not measured again; those whose estimate exceeds `LARGEST` are not measured at all.

Where there is a GPU, cells of one process run on it instead, and the peak is that of PyTorch's allocator there.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy as np
import torch

from benchmarks.machine import machine
from benchmarks.measure import result_head, write_result
from fedsign.config import from_dict, merged
from fedsign.data.base import Dataset, Samples
from fedsign.data.text.pytext import pytext

NAME = "memory"
LARGEST = 16e9  # bytes
SIZES = {"75 M": (640, 15), "285 M": (1024, 22)}  # width and depth
METHODS: dict[str, dict[str, Any]] = {
    "LISA": {"name": "lisa"},
    "LoRA": {"name": "lora"},
    "AdamW": {"name": "adamw"},
    "SGD, momentum": {"name": "sgd", "momentum": 0.9},
    "GaLore": {"name": "galore"},
}
LLAMA_SIZES = {"75 M": SIZES["75 M"], "1 B": (2048, 21), "3 B": (3072, 28)}
OF_LLAMA: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # what they change of [model] and [client]
    "AdamW, bf16 with masters, 75 M": ({"dtype": "bf16"}, {}),
    "AdamW, bf16 stochastic, 75 M": ({"dtype": "bf16"}, {"low_precision": "stochastic"}),
    "AdamW, 8-bit moments, 75 M": ({}, {"optimizer": {"name": "adamw_8bit"}}),
    "LoRA, NF4 base, 75 M": ({}, {"optimizer": {"name": "lora", "quantization": "nf4"}}),
    "LISA, 1 B": ({}, {"optimizer": METHODS["LISA"]}),
    "LoRA, 1 B": ({}, {"optimizer": METHODS["LoRA"]}),
    "LISA, bf16 stochastic, 3 B": ({"dtype": "bf16"}, {"low_precision": "stochastic", "optimizer": METHODS["LISA"]}),
    "LoRA, bf16, 3 B": ({"dtype": "bf16"}, {"optimizer": METHODS["LoRA"]}),
}
OF_PROCESSES: dict[str, tuple[str, dict[str, Any]]] = {  # method, and changes of the experiment
    **{
        f"{method}, 2 ranks, {strategy}, 75 M": (
            method,
            {"client": {"batch_size": 2, "sharding": {"ranks": 2, "strategy": strategy}}},
        )
        for method in ("AdamW", "LoRA")
        for strategy in ("III", "NNN")
    },
    **{
        f"{method}, 2 workers, 75 M": (
            method,
            {"engine": {"workers": 2}, "partition": {"num_clients": 2}, "server": {"cohort_size": 2}},
        )
        for method in ("AdamW", "LISA")
    },
}
_ROOT = Path(__file__).parents[2]


def text(seed: int) -> Dataset:
    """Eight training samples of 64 characters, and two for testing."""
    dataset = pytext(seed, block_length=64)
    return replace(dataset, train=dataset.train[np.arange(8)], test=dataset.test[np.arange(2)])


def images(seed: int) -> Dataset:
    """As many images of 3 x 32 x 32."""
    generator = torch.Generator().manual_seed(seed)
    samples = Samples(features=torch.rand(10, 3, 32, 32, generator=generator), targets=torch.arange(10) % 2)
    return Dataset(train=samples[np.arange(8)], test=samples[np.arange(8, 10)], class_names=("a", "b"))


def architectures(folder: Path, width: int, depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and settings of each model; configurations of `transformers` are written to `folder`."""
    gpt2 = {"model_type": "gpt2", "n_layer": depth, "n_embd": width, "n_head": width // 64, "n_positions": 64}
    neox = {"model_type": "gpt_neox", **_shapes(width, depth), "intermediate_size": 4 * width}
    llama = {"ffn_width": _ffn_width(width), "positions": "rotary", "norm": "rms_norm", "activation": "swiglu"}
    yield "Llama", {"name": "gpt", "width": width, "depth": depth, "num_heads": width // 64, "bias": False, **llama}
    yield "GPT-2", _written(folder, gpt2)
    yield "GPT-NeoX", _written(folder, neox)
    yield "ViT", {"name": "benchmarks.networks:vit", "width": width, "depth": depth}


def of_llama(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and experiment of each cell of the Llama of `transformers`."""
    for name, (of_model, of_client) in OF_LLAMA.items():
        model = {**_llama(folder, LLAMA_SIZES[name.rsplit(", ", 1)[1]]), **of_model}
        yield name, merged(experiment(model, METHODS["AdamW"], folder / "runs"), {"client": of_client})
    for name, (method, changes) in OF_PROCESSES.items():
        cell = experiment(_llama(folder, LLAMA_SIZES["75 M"]), METHODS[method], folder / "runs")
        yield name, merged({**cell, "rounds": 4}, changes)


def _llama(folder: Path, size: tuple[int, int]) -> dict[str, Any]:
    width, depth = size
    llama = {"model_type": "llama", **_shapes(width, depth), "intermediate_size": _ffn_width(width)}
    return _written(folder, llama)


def _shapes(width: int, depth: int) -> dict[str, int]:
    heads = {"num_attention_heads": width // 64, "max_position_embeddings": 64}
    return {"num_hidden_layers": depth, "hidden_size": width, **heads}


def _ffn_width(width: int) -> int:
    return width * 11 // 4 // 64 * 64


def _written(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    path = folder / f"{config['model_type']}.json"
    path.write_text(json.dumps({**config, "vocab_size": 256}), encoding="utf-8")
    return {"name": "transformers", "config": str(path)}


def experiment(model: dict[str, Any], optimizer: dict[str, Any], root: Path) -> dict[str, Any]:
    """Return the experiment of a cell."""
    is_text = model["name"] != "benchmarks.networks:vit"
    kind = {"task": "language", "metrics": []} if is_text else {}
    return {
        **kind,
        "data": {"name": f"benchmarks.alone.memory:{'text' if is_text else 'images'}"},
        "partition": {"name": "iid", "num_clients": 1},
        "model": model,
        "client": {"batch_size": 1, "local_steps": 3, "path": "sequential", "optimizer": optimizer},
        "server": {"cohort_size": 1},
        "strategy": {"name": "fedavg"},
        "rounds": 2,
        "results": {"root": str(root)},
    }


def measure(path: Path, *, repetitions: int) -> None:
    """Measure the cells that are missing, the small ones first."""
    result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    of_device: dict[str, Any] = result if device == "cpu" else result.setdefault("gpu", {})
    cells: dict[str, Any] = of_device.get("cells", {})
    head = result_head(NAME, "Memory of a run", machine(), 1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, tree in _experiments(folder):
            if name not in cells and not (device == "cuda" and name in OF_PROCESSES):
                cells[name] = _cell(merged(tree, {"engine": {"device": device}}), folder, repetitions)
                of_device |= {**head, "device": device, "cells": cells}
                write_result(path, result)
                print(name, cells[name], flush=True)


def _experiments(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for size, (width, depth) in SIZES.items():
        for method, optimizer in METHODS.items():
            for architecture, model in architectures(folder, width, depth):
                yield f"{architecture}, {method}, {size}", experiment(model, optimizer, folder / "runs")
    yield from of_llama(folder)


def _cell(tree: dict[str, Any], folder: Path, repetitions: int) -> dict[str, Any]:
    """Return estimated and measured bytes, of several processes by name, or why there are none."""
    config = folder / "experiment.toml"
    config.write_text(from_dict(tree).to_toml(), encoding="utf-8")
    command = [sys.executable, "-m", "simulations.cli", "estimate", "memory", "--config", str(config), "--json"]
    found: list[dict[str, Any]] = []
    for more in ([], *[["--measure"]] * repetitions):
        estimate = found[0] if found else {}
        if estimate.get("estimated_bytes", 0) > LARGEST:
            return {**estimate, "refused": "too large to be measured here"}
        done = subprocess.run([*command, *more], capture_output=True, text=True, cwd=_ROOT, check=False)
        if done.returncode:
            return {**estimate, "refused": done.stderr.strip().splitlines()[-1][:200]}
        found.append(_account(json.loads(done.stdout)))
    _, *measured = found
    for each, *others in zip(*(run.get("processes", {"": run}).values() for run in measured), strict=True):
        each["all_measured_bytes"] = [run["measured_bytes"] for run in (each, *others)]
        each["measured_bytes"] = median_low(each["all_measured_bytes"])
    return measured[0]


def _account(account: dict[str, Any]) -> dict[str, Any]:
    found = {"num_parameters": account["num_parameters"], "estimated_bytes": account["peak_bytes"]}
    if "processes" in account:
        return {**found, "processes": {each["name"]: _peaks(each) for each in account["processes"]}}
    more = {"num_trained": account["num_trained"], "activations_bytes": account["phases"]["train"]["activations"]}
    return {**found, **_peaks(account), **more}


def _peaks(process: dict[str, Any]) -> dict[str, Any]:
    measured = process.get("measured_bytes")
    return {"estimated_bytes": process["peak_bytes"], "in": process["peak_in"], "measured_bytes": measured}
