"""Static masks."""

from fedsign.parameterization.sparsity.base import MaskRule


def static() -> MaskRule | None:
    """No rule: masks never change."""
    return None
