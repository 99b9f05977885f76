"""Clients that train a part of the model at a time."""
