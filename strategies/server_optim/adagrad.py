"""FedAdagrad's server step (arXiv 2003.00295, Algorithm 2):  v <- v + Delta^2."""

from torch import Tensor

from strategies.server_optim.adaptive import AdaptiveOptimizer, Decay, Rate


class ServerAdagrad(AdaptiveOptimizer):
    """Adagrad on the pseudo-gradient (FedAdagrad)."""

    def __init__(self, *, lr: Rate = 0.03, beta1: Decay = 0.0, tau: Rate = 0.001) -> None:
        super().__init__(lr=lr, beta1=beta1, tau=tau)

    def second_moment(self, before: Tensor, square: Tensor) -> Tensor:
        """v <- v + Delta^2."""
        return before + square
