"""Memory of a training step: `fedsign estimate memory`."""
