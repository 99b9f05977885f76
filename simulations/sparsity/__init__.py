"""Sparse models: what parameterisations give each tensor, and whether tuned settings transfer."""
