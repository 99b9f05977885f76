"""Masks that stay as they were drawn."""

from fedsign.parameterisation.sparsity.base import MaskRule


def static() -> MaskRule | None:
    """No rule."""
    return None
