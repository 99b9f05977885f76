"""FedAdam's server step (arXiv 2003.00295, Algorithm 2):  v <- beta2 v + (1 - beta2) Delta^2."""

from torch import Tensor

from strategies.server_optim.adaptive import AdaptiveOptimizer, Decay, Rate


class ServerAdam(AdaptiveOptimizer):
    """Adam on the pseudo-gradient (FedAdam)."""

    def __init__(self, *, lr: Rate = 0.03, beta1: Decay = 0.9, beta2: Decay = 0.99, tau: Rate = 0.001) -> None:
        super().__init__(lr=lr, beta1=beta1, tau=tau)
        self.beta2 = beta2

    def second_moment(self, before: Tensor, square: Tensor) -> Tensor:
        """v <- beta2 v + (1 - beta2) Delta^2."""
        return self.beta2 * before + (1 - self.beta2) * square
