"""Parameterizations: how initialization, learning rates, and multipliers depend on width and density."""
