"""The memory that a training step takes: `fedsign estimate memory`."""
