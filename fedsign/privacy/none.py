"""No differential privacy."""


def none() -> None:
    """Use replies as they are."""
