"""The experiments behind docs/ablations.md, and their results."""
