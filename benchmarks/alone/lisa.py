"""Savings of LISA compared with full fine-tuning: memory beyond the weights, and time per iteration.

The configuration of both: our gpt of 12 blocks, width 256, 8 heads, on `pytext` characters, batches of 8 rows of 128,
float32, torch's fused AdamW.  LISA samples 2 blocks every 20 steps and drops the moments of blocks that are frozen
again; embedding, head and the final norm always train.

- Memory: live bytes across a draw by a torch dispatch mode (`fedsign.memory.live`), and of three steps by the
    allocator.
- Time: a period of 20 iterations each, in turn, draws included; the ratio of each pair.
- With a GPU: LLaMA-2-7B's shapes in bf16, one row of 1,024 tokens, random weights.
"""

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.machine import machine
from benchmarks.measure import Result, dispersion, result_head, write_result
from fedsign.data.base import Dataset
from fedsign.data.text.pytext import pytext
from fedsign.memory.live import LiveBytes, allocated
from fedsign.memory.named import named_model
from fedsign.memory.step import GRADIENTS, STATES, WEIGHTS, language_loss
from fedsign.models.gpt import gpt
from fedsign.optim.lisa import LISA

NAME = "lisa"
DEPTH, WIDTH, HEADS, BATCH, LENGTH, LAYERS, PERIOD = 12, 256, 8, 8, 128, 2, 20
LARGE, LARGE_LENGTH = "llama-2-7b", 1024


@dataclass(slots=True)
class Training:
    """A model, its optimizer and its batches."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[tuple[Tensor, Tensor]]

    def step(self, live: LiveBytes | None = None) -> None:
        """Take one iteration."""
        features, targets = next(self.batches)
        self.optimizer.zero_grad()
        language_loss(self.model(features), targets).backward()
        if live is not None:
            live.name(GRADIENTS, [parameter.grad for parameter in self.model.parameters()])
        self.optimizer.step()
        if live is not None:
            live.name(STATES, _kept(self.optimizer))


def small(kind: str, data: Dataset) -> Training:
    """Make the module's configuration."""
    torch.manual_seed(0)
    model = gpt((LENGTH,), data.num_outputs, depth=DEPTH, width=WIDTH, num_heads=HEADS, tied=False)
    batches = _batches(lambda index: data.train.batch(index), len(data.train), BATCH, torch.device("cpu"))
    return Training(model, _optimizer(kind, model), batches)


def large(kind: str, device: torch.device) -> Training:
    """Make LLaMA-2-7B's shapes, with random weights created on the device in bf16."""
    named = named_model(LARGE)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = named.make(LARGE_LENGTH, False)
    finally:
        torch.set_default_dtype(torch.float32)
    rows = torch.randint(named.vocabulary, (64, LARGE_LENGTH + 1), generator=torch.Generator().manual_seed(0))
    batches = _batches(lambda index: (rows[index, :-1], rows[index, 1:]), len(rows), 1, device)
    return Training(model, _optimizer(kind, model), batches)


def _optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "full":
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return LISA(model, lr=1e-4, num_sampled_layers=LAYERS, period=PERIOD, draw=0, fused=True)


def _batches(
    rows: Callable[[Tensor], tuple[Tensor, Tensor]], num: int, size: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(0)
    while True:
        features, targets = rows(torch.randint(num, (size,), generator=rng))
        yield features.to(device), targets.to(device)


def _kept(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def memory(kind: str, data: Dataset) -> Result:
    """Measure a period and the next one's first steps, with one draw between, after a step that creates the moments."""
    with LiveBytes() as live:
        training = small(kind, data)
        live.name(WEIGHTS, training.model.parameters())
        training.step(live)
        live.begin("counted")
        for _ in range(PERIOD + 1):
            training.step(live)
        gradients, states, peak = live.most_of(GRADIENTS), live.most_of(STATES), live.peak_of("counted")
        weights = live.current[WEIGHTS]
    del training, live
    gc.collect()
    with allocated(torch.device("cpu")) as given:
        again = small(kind, data)
        for _ in range(3):
            again.step()
    del again
    return {
        "weights_bytes": weights,
        "gradients_bytes": gradients,
        "optimizer_bytes": states,
        "beyond_weights_bytes": peak.total_bytes - weights,
        "allocator_beyond_weights_bytes": given.peak_bytes - weights,
    }


def iteration_s(training: Training) -> tuple[float, float]:
    """Return the mean over a period, of wall-clock time and of process time."""
    began, own = time.perf_counter(), time.process_time()
    for _ in range(PERIOD):
        training.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / PERIOD, (time.process_time() - own) / PERIOD


def on_gpu(repetitions: int) -> Result:
    """Measure peak and time of each, sequentially, since both do not fit together."""
    device, found = torch.device("cuda"), {}
    for kind in ("full", "lisa"):
        with allocated(device) as given:
            training = large(kind, device)
            for _ in range(PERIOD + 2):
                training.step()
        taken = [iteration_s(training)[0] for _ in range(repetitions)]
        found[kind] = {"peak_bytes": given.peak_bytes, "iteration_s": dispersion(taken)}
        del training
        gc.collect()
        torch.cuda.empty_cache()
    return found


def measure(path: Path, *, repetitions: int) -> None:
    """Measure memory once, since it is deterministic, and times in turn."""
    before = machine()
    data = pytext(0, block_length=LENGTH)
    bytes_of = {kind: memory(kind, data) for kind in ("full", "lisa")}
    competitors = {kind: small(kind, data) for kind in bytes_of}
    taken: dict[str, list[tuple[float, float]]] = {kind: [] for kind in competitors}
    for repetition in range(repetitions + 1):
        for kind, training in competitors.items():
            seconds = iteration_s(training)
            if repetition:
                taken[kind].append(seconds)
                print(f"{NAME}: {kind} {1000 * seconds[0]:.0f} ms an iteration", flush=True)
    pairs = list(zip(taken["lisa"], taken["full"], strict=True))
    full, lisa = bytes_of["full"], bytes_of["lisa"]

    def kept(of: Result) -> int:
        return int(of["gradients_bytes"] + of["optimizer_bytes"])

    result: dict[str, Any] = {
        **result_head(NAME, "What LISA saves", before, repetitions),
        "threads": torch.get_num_threads(),
        "bytes": bytes_of,
        "kept_ratio": kept(lisa) / kept(full),
        "beyond_weights_ratio": lisa["beyond_weights_bytes"] / full["beyond_weights_bytes"],
        "iteration_s": {kind: dispersion([wall for wall, _ in values]) for kind, values in taken.items()},
        "iteration_ratio": dispersion([one[0] / other[0] for one, other in pairs]),
        "cpu_ratio": dispersion([one[1] / other[1] for one, other in pairs]),
    }
    if torch.cuda.is_available():
        result["gpu"] = {**result_head(NAME, "", before, repetitions), "device": "cuda", **on_gpu(repetitions)}
    write_result(path, result)
    print(
        f"{NAME}: optimizer and gradients {result['kept_ratio']:.3f} of full, all beyond the weights "
        f"{result['beyond_weights_ratio']:.3f}"
    )
    print(f"{NAME}: an iteration {result['iteration_ratio']['median']:.3f} of full's")
