"""Callbacks: watch a run from the process that started it."""
