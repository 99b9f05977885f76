"""Engines: where the clients of an experiment run."""
