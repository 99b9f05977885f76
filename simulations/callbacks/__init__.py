"""Callbacks: what watches a run from the process that started it."""
