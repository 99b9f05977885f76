"""Clients that train a part of their model."""
