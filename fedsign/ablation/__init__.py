"""Ablation of a regularizer: matched controls show which part of it produces the gain."""
