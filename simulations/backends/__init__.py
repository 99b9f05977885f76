"""Engines: where an experiment's clients run."""
