"""Gradients through a training: `fedsign condense`, `fedsign tune learn`."""
