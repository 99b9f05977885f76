"""FedAvg: the server takes the mean of the clients' models.

Paper: McMahan et al. 2017 (arXiv 1602.05629), Algorithm 1.  `weighting = examples` is the paper's average; `uniform`
is the average in the FedSign paper's listing.
"""

from strategies.base import Strategy


class FedAvg(Strategy):
    """theta_{t+1} = mean_k theta_k."""
