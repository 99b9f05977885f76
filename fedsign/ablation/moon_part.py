"""MOON's contrast with one half removed: only the pull to the received representation, or the push from the previous.

MOON (arXiv 2103.16257, Eq. 3) minimizes -log p_glob with p = softmax([cos(z, z_glob), cos(z, z_prev)] / tau).  Where
both similarities are equal, its slopes are -1 / (2 tau) in cos(z, z_glob) and 1 / (2 tau) in cos(z, z_prev).  One half
alone is linear with that slope.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from fedsign.objectives.base import LocalContext, Representation
from fedsign.objectives.moon import MU, TEMPERATURE, MoonObjective, Mu, Temperature


class MoonPart(MoonObjective):
    """Task loss + mu / (2 tau) * mean(-cos(z, z_glob)), or mean(cos(z, z_prev))."""

    def __init__(
        self,
        *,
        part: Literal["received", "previous"] = "received",
        mu: Mu = MU,
        temperature: Temperature = TEMPERATURE,
    ) -> None:
        super().__init__(mu=mu, temperature=temperature)
        self.part = part

    def contrast(self, z: Representation, context: LocalContext) -> Tensor | None:
        """One half of the contrast; see the formula of the class."""
        if self.mu == 0:
            return None
        slope, other = (-1, context.received) if self.part == "received" else (1, context.state)
        with torch.no_grad():
            fixed = z.of(other)
        near = functional.cosine_similarity(z.present, fixed, dim=-1)
        return slope * self.mu / (2 * self.temperature) * near.mean()
