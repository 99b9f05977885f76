"""No server optimizer: the server adopts the strategy's proposal."""


def none() -> None:
    """Serve the proposal unchanged."""
