"""What the recipes of SmuPar's sweeps share: the model of `smupar_gpt` on short batches, and figures read off a sweep."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsign.parameterisation.figures import transfer_figures
from fedsign.report.analysis import Found, write_found
from simulations.recipes.smupar.smupar_gpt import INIT_STD, experiment
from simulations.sparsity.transfer import Asked, tune

WIDTH, RATE = 128, 2.0**-9  # the best one of the dense model under muP
BATCHES: dict[str, Any] = {"data": {"block_length": 32}, "client": {"batch_size": 8}}  # 256 tokens a step
SAMPLES = 256  # held-out blocks that a loss is taken of
CELLS = Path("tuning") / "smupar"  # where all of them are played: they share cells, and go on with what is there


def powers(first: int, last: int, step: int = 1) -> list[float]:
    """2^first to 2^last.

    >>> powers(-3, -1)
    [0.125, 0.25, 0.5]
    """
    return [2.0**power for power in range(first, last + 1, step)]


def rates(quick: bool, *, seeds: int) -> Asked:
    """Learning rates 2^-12 to 2^-2 over 128 steps at the densities 1 and 1/32; quick: every second one, 2^-11 to 2^-3, over 64 steps."""
    return Asked(
        values=powers(-11, -3, 2) if quick else powers(-12, -2),
        densities=(1.0, 1 / 32),
        seeds=seeds,
        steps=64 if quick else 128,
        samples=SAMPLES,
    )


def starts(quick: bool, *, seeds: int) -> Asked:
    """The same of the start: the model's deviation times 2^-4 to 2^4; quick: every second one."""
    return replace(
        rates(quick, seeds=seeds),
        setting="init",
        values=[INIT_STD * factor for factor in powers(-4, 4, 2 if quick else 1)],
    )


def folder_of(name: str, quick: bool) -> Path:
    """Where numbers and picture of a sweep are written."""
    return Path("tuning") / f"{name}{'-quick' if quick else ''}"


def page_of(name: str, quick: bool) -> Path:
    """Its picture."""
    return folder_of(name, quick) / "transfer-loss.svg"


def swept(name: str, asked: Asked, *, quick: bool, width: int = WIDTH) -> Found:
    """Play what has not been played yet; write numbers and picture."""
    found = tune(experiment(width=width, lr=RATE, changes=BATCHES), asked, CELLS)
    write_found(found, folder_of(name, quick), transfer_figures(found))
    return found


def of_scheme(found: Found, scheme: str) -> list[Mapping[str, Any]]:
    """The readings under one scheme, the proxy's first."""
    return [row for row in found.summary if row["scheme"] == scheme]


def moved(found: Found, scheme: str) -> float:
    """How many factors of two the optimum moves at most, of all conditions."""
    return max(abs(float(row["moved"])) for row in of_scheme(found, scheme))


def raised(found: Found, scheme: str) -> float:
    """How many factors of two the optimum of the last condition is above the proxy's."""
    return float(of_scheme(found, scheme)[-1]["moved"])


def losses(found: Found, scheme: str, *, at: float | None = None) -> NDArray[np.float64]:
    """Of the last condition's seeds, at a value or, without one, at the own best of the condition."""
    rows = of_scheme(found, scheme)
    value = rows[-1]["best"] if at is None else at
    index = list(found.facts["values"]).index(value)
    loss: NDArray[np.float64] = found.arrays["loss"][found.facts["schemes"].index(scheme), -1, -1, index]
    return loss


def kept(found: Found, scheme: str) -> NDArray[np.float64]:
    """The same at the proxy's best value."""
    return losses(found, scheme, at=of_scheme(found, scheme)[0]["best"])


def ratio(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """The mean of paired ratios; infinite or NaN where a training diverged."""
    return float((first / second).mean())


def spread(name: str, ratios: NDArray[np.float64]) -> dict[str, float]:
    """The mean of paired ratios, and the smallest and the largest of them."""
    return {name: float(ratios.mean()), f"{name}_low": float(ratios.min()), f"{name}_high": float(ratios.max())}
