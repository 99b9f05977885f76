"""Sparse models: what parameterizations give each tensor, and whether tuned hyperparameters transfer."""
