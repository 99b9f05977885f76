"""Static masks."""

from fedsign.parameterisation.sparsity.base import MaskRule


def static() -> MaskRule | None:
    """No rule: masks never change."""
    return None
