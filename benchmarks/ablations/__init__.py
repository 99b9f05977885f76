"""The experiments behind docs/ablations.md, and what they gave."""
