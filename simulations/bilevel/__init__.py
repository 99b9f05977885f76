"""Gradients through training: `fedsign condense` and `fedsign tune learn`."""
