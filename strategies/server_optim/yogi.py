"""FedYogi's server step (arXiv 2003.00295, Algorithm 2):  v <- v - (1 - beta2) Delta^2 sign(v - Delta^2)."""

from torch import Tensor

from strategies.server_optim.adam import ServerAdam


class ServerYogi(ServerAdam):
    """Yogi on the pseudo-gradient (FedYogi)."""

    def second_moment(self, before: Tensor, square: Tensor) -> Tensor:
        """v <- v - (1 - beta2) Delta^2 sign(v - Delta^2)."""
        return before - (1 - self.beta2) * square * (before - square).sign()
