"""No server optimizer: the server goes to the target."""


def none() -> None:
    """The target is served as it is."""
