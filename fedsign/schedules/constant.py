"""No change."""


def constant(round: int, rounds: int) -> float:
    """1."""
    return 1.0
