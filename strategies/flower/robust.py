"""Flower's robust aggregation rules against f malicious clients among n (f = num_malicious_nodes).

FedMedian, FedTrimmedAvg: Yin et al. 2018 (arXiv 1803.01498).  Per coordinate, the median, or the mean without the
int(beta n) smallest and largest values.  Neither is weighted.

Krum: Blanchard et al. 2017 (arXiv 1703.02757).  The reply with the smallest sum of squared distances to its n - f - 2
nearest neighbors; 2f + 2 < n.  MultiKrum: the mean of the `num_nodes_to_select` best.

Bulyan: El Mhamdi et al. 2018 (arXiv 1802.07927).  Select n - 2f replies by Krum, then average per coordinate the
n - 4f values nearest to the median; n >= 4f + 3.

Flower differs from the papers: Bulyan takes the n - 2f best of a single Krum, where the paper reruns Krum after each
selection; MultiKrum weights the selected replies by the sample counts that they claim, unless `weighting` is uniform;
distances are computed as |x|^2 + |y|^2 - 2 x y in float32, which loses small distances between large models.
"""

from typing import Annotated

from flwr.serverapp import strategy as flower
from pydantic import Field

from strategies.base import Weighting
from strategies.flower.common import arguments

Count = Annotated[int, Field(ge=0)]


def fedmedian() -> flower.FedMedian:
    """Coordinate-wise median."""
    return flower.FedMedian(**arguments())


def fedtrimmedavg(*, beta: Annotated[float, Field(ge=0, lt=0.5)] = 0.2) -> flower.FedTrimmedAvg:
    """Coordinate-wise mean without the tails."""
    return flower.FedTrimmedAvg(beta=beta, **arguments())


def krum(*, num_malicious_nodes: Count = 0) -> flower.Krum:
    """The single reply with the nearest neighbors."""
    return flower.Krum(num_malicious_nodes=num_malicious_nodes, **arguments())


def multikrum(
    *,
    num_malicious_nodes: Count = 0,
    num_nodes_to_select: Annotated[int, Field(ge=1)] = 3,
    weighting: Weighting = "examples",
) -> flower.MultiKrum:
    """Mean of the replies with the nearest neighbors; Flower's default of selecting one would be Krum."""
    return flower.MultiKrum(
        num_malicious_nodes=num_malicious_nodes, num_nodes_to_select=num_nodes_to_select, **arguments(weighting)
    )


def bulyan(*, num_malicious_nodes: Count = 0) -> flower.Bulyan:
    """Selection by Krum, then a trimmed mean around the median."""
    return flower.Bulyan(num_malicious_nodes=num_malicious_nodes, **arguments())
