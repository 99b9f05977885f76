"""A training that is interrupted and resumed, possibly sharded differently, over other ranks."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedsign.errors import ResultsError
from fedsign.sharding.paro import Sharded
from fedsign.sharding.state import load, save
from tests.distributed.training import Case, net_of, optimizer_of

HALF = 5
ALL_SAMPLES = 24  # of a step, whatever the ranks


def engine_of(case: Case) -> Sharded:
    return Sharded(
        net_of(case, seed=torch.distributed.get_rank()),
        lambda named: optimizer_of(case, [tensor for _, tensor in named]),
        grouping=case.grouping,
        strategy=case.strategy,
        dtype=case.dtype,
        rings=case.rings,
    )


def steps(engine: Sharded, case: Case, *, first: int, last: int) -> None:
    """Some of the steps, on this rank's share of samples that do not depend on the number of ranks."""
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        inputs, targets = torch.randn((2, ALL_SAMPLES, 3), generator=generator).to(case.dtype)
        rank, ranks = torch.distributed.get_rank(), case.grouping.ranks
        mine = slice(rank * ALL_SAMPLES // ranks, (rank + 1) * ALL_SAMPLES // ranks)
        nn.functional.mse_loss(engine(inputs[mine]), targets[mine]).backward()
        engine.step(clip_norm=0.3)


def begin(cases: list[Case], folder: Path) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Train to the half, save, and go on to the end; the values at both times."""
    found = []
    for case in cases:
        engine = engine_of(case)
        steps(engine, case, first=0, last=HALF)
        save(engine, folder / f"{case.strategy}-{case.dtype}".replace("torch.", ""))
        half = engine.full_state_dict()
        steps(engine, case, first=HALF, last=2 * HALF)
        found.append((half, engine.full_state_dict()))
    return found


def go_on(cases: list[Case], folder: Path) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """From a checkpoint to the end."""
    found = []
    for case in cases:
        engine = engine_of(case)
        load(engine, folder)
        half = engine.full_state_dict()
        steps(engine, case, first=HALF, last=2 * HALF)
        found.append((half, engine.full_state_dict()))
    return found


def wrong_ones(folder: Path) -> list[Any]:
    """What is said of a folder without a checkpoint, and of one of another model."""
    said = []
    engine = engine_of(Case(strategy="NNN", groups=1, per_group=2))
    save(engine, folder / "blocks")
    other = Sharded(
        nn.Linear(3, 3), lambda named: torch.optim.SGD(named, lr=0.1), grouping=engine.grouping, strategy="NNN"
    )
    for model, path in ((engine, folder / "none"), (other, folder / "blocks")):
        try:
            load(model, path)
        except ResultsError as error:
            said.append(str(error))
    return said
