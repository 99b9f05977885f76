"""Comparison of models' signs: `fedsign analyse signs`."""
