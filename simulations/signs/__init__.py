"""Comparison of models' signs: `fedsign analyze signs`."""
