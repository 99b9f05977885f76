"""No differential privacy: what clients send is used as it is."""


def none() -> None:
    """Nothing is clipped, nothing is added."""
