"""Flower's own strategies, unmodified, with the settings that apply here.

These factories leave out Flower's settings for sampling (the round loop samples `server.cohort_size` clients),
federated evaluation (the server evaluates centrally), record keys, and `eta_l`, which Flower only prints.  Flower
weights replies by a metric; `weighting` selects which one.
"""
