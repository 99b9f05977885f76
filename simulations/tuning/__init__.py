"""Tuning of one experiment's settings by search, compared with gradients."""
